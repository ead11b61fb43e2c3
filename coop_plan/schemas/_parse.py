"""Parser of JSON documents into models; every failure raises `InvalidInputError`."""

import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from coop_plan.schemas.errors import InvalidInputError

INT64_MAX = 2**63 - 1
"""Upper limit of every size in bytes: planners store sizes in int64."""

BOM = b"\xef\xbb\xbf"

GZIP_START = b"\x1f\x8b"


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Base class of every object of the contract: unknown fields are errors, values are frozen.

    Types and ranges are checked by the parser only, not by the constructor. Objects are not tracked
    by the garbage collector: a document has tens of thousands of them and no cycles.
    """

    def model_copy(self, update: dict[str, Any]) -> Self:
        """A copy with some fields replaced, unchecked."""
        return msgspec.structs.replace(self, **update)

    def to_dict(self) -> dict[str, Any]:
        """The decoded document."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        return document

    def to_json(self) -> str:
        """The document as compact JSON text."""
        return msgspec.json.encode(self).decode()


M = TypeVar("M", bound=Model)


def escape(part: str | int) -> str:
    """One reference token of a JSON pointer (RFC 6901, section 3)."""
    return str(part).replace("~", "~0").replace("/", "~1")


def parse(model: type[M], document: str | bytes | dict[str, Any], source: str = "") -> M:
    """Validate `document` (JSON text or its decoded object) as `model`.

    Parsing stops at the first fault, so a document of a million faults costs no more than one.

    Raises:
        InvalidInputError: the first fault and its JSON pointer.
    """
    try:
        if isinstance(document, dict):
            return msgspec.convert(document, model)
        data = document.encode() if isinstance(document, str) else document
        if data.startswith(GZIP_START):
            raise InvalidInputError("not JSON: it is a gzip file; unpack it first", source=source)
        data = data.removeprefix(BOM)
        parsed = msgspec.json.decode(data, type=model)
    except msgspec.ValidationError as error:
        raise _translate(error, source) from None
    except msgspec.DecodeError as error:
        raise _syntax(model, data, str(error), source) from None
    except UnicodeError:
        raise InvalidInputError("not JSON: the text is not UTF-8", source=source) from None
    except RecursionError:
        raise InvalidInputError("not JSON: nested too deeply", source=source) from None
    _check_duplicates(data, source)
    return parsed


def read(model: type[M], path: Path | str) -> M:
    """The file at `path`, parsed as `model`.

    Raises:
        InvalidInputError: the file cannot be read, or `parse` raises it.
    """
    return parse(model, read_bytes(path), source=str(path))


def read_bytes(path: Path | str) -> bytes:
    """The bytes of the file at `path`, unpacked if it is a gzip file.

    Raises:
        InvalidInputError: the file cannot be read.
    """
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInputError(f"cannot be read: {reason}", source=str(path)) from None
    return unpacked(data, str(path))


def unpacked(data: bytes, source: str) -> bytes:
    """The content of a gzip file; other data as they are.

    The size is not limited, so a service unpacks its requests elsewhere.

    Raises:
        InvalidInputError: a damaged gzip file.
    """
    if not data.startswith(GZIP_START):
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidInputError(f"cannot be unpacked: {error}", source=source) from None


_PLACE = re.compile(r"(?s)(.*?)(?: - at `\$(.*)`)?")
_NAMED = re.compile(r"(?s)Object (contains unknown|missing required) field `(.*)`")


def _translate(error: msgspec.ValidationError, source: str) -> InvalidInputError:
    """Msgspec's error as ours, with a JSON pointer."""
    match = _PLACE.fullmatch(str(error))
    message, path = (match[1], match[2] or "") if match is not None else (str(error), "")
    # `$.ops[3].inputs[0]` → `/ops/3/inputs/0`; a path ends at a free key (`versions[...]`).
    pointer = "".join(
        f"/{escape(name or index)}"
        for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path.partition("[...]")[0])
    )
    inner = error.__cause__
    if isinstance(inner, InvalidInputError):
        return InvalidInputError(inner.message, pointer + inner.pointer, source)
    named = _NAMED.fullmatch(message)
    if named is not None:
        pointer += f"/{escape(named[2])}"
        unknown = "unknown field: the contract has no field of that name here"
        message = unknown if named[1] == "contains unknown" else "required field is missing"
    message = message[0].lower() + message[1:].replace("`", "").replace("enum value", "value")
    return InvalidInputError(" ".join(message.split())[:300], pointer, source)


def _syntax(model: type[M], data: bytes, message: str, source: str) -> InvalidInputError:
    """The error for malformed JSON: line and column, or the constant (NaN, Infinity) found."""
    found = re.search(r"(.*) \(byte (\d+)\)", message.removeprefix("JSON is malformed: "))
    if found is None:
        what = "the text ends too early" if data.strip() else "the text is empty"
        return InvalidInputError(f"not JSON: {what}", source=source)
    at = int(found[2])
    at -= data[at - 1 : at + 1] == b"-I"
    line, column = data.count(b"\n", 0, at) + 1, at - data.rfind(b"\n", 0, at)
    constant = re.match(rb"-?(NaN|Infinity)", data[at : at + 9])
    if constant is None:
        what = f"{found[1]} at line {line} column {column}"
        return InvalidInputError(f"not JSON: {what}", source=source)
    name = constant[0].decode()
    # In its place an empty text or list is a type error, whose JSON pointer is the constant's.
    pointer = ""
    for other in (b'""', b"[]"):
        try:
            msgspec.json.decode(data[:at] + other + data[at + len(name) :], type=model)
        except msgspec.ValidationError as error:
            pointer = _translate(error, "").pointer
            break
        except msgspec.DecodeError:
            break
    return InvalidInputError(f"{name} is not a number in JSON", pointer, source)


_PARTS = msgspec.json.Decoder(
    dict[str, msgspec.Raw] | list[msgspec.Raw] | str | float | bool | None
)

PART_BYTES, PART_ITEMS = 1 << 16, 64
"""Larger objects and lists are decoded in parts: as a whole they take ten times their bytes."""


def _colons(data: bytes | msgspec.Raw) -> int:
    """Number of colons in a document that is decoded and encoded again."""
    text = bytes(data)
    if b":" not in text:  # for example a long list of ids
        return 0
    if len(text) < PART_BYTES:
        return msgspec.json.encode(msgspec.json.decode(text)).count(b":")
    parts = _PARTS.decode(text)
    if isinstance(parts, list):
        if len(parts) > PART_ITEMS:
            starts = range(0, len(parts), PART_ITEMS)
            return sum(_colons(b"[%b]" % b",".join(parts[at : at + PART_ITEMS])) for at in starts)
        return sum(map(_colons, parts))
    if isinstance(parts, dict):
        names = msgspec.json.encode(dict.fromkeys(parts)).count(b":")
        return names + sum(map(_colons, parts.values()))
    return msgspec.json.encode(parts).count(b":")


def _check_duplicates(data: bytes, source: str) -> None:
    """Raise `InvalidInputError` if an object names a field twice.

    A document that is decoded and encoded again loses a colon per duplicate. If the counts differ,
    or an escaped colon could hide one, Python's slower parser finds the name.
    """
    if _colons(data) == data.count(b":") and b"\\u003" not in data:
        return

    def check(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                shown = name if len(name) <= 50 else f"{name[:50]}..."
                message = f"an object names the field '{shown}' twice: remove one"
                raise InvalidInputError(message, source=source)
            seen.add(name)

    json.loads(data, object_pairs_hook=check)
