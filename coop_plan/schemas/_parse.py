"""Reading JSON documents into models, with every failure as one `InvalidInputError`."""

import json
import re
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from coop_plan.schemas.errors import InvalidInputError

INT64_MAX = 2**63 - 1
"""Upper limit of every size in bytes: planners hold sizes in int64."""

BOM = b"\xef\xbb\xbf"


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """
    Base of every object of the contract: unknown fields are refused, values are frozen.

    Only what is parsed has its types and ranges checked. The garbage collector need not know them:
    a document has tens of thousands and no circle.
    """

    def model_copy(self, update: dict[str, Any]) -> Self:
        """The same with other values, which are taken as they are."""
        return msgspec.structs.replace(self, **update)

    def to_dict(self) -> dict[str, Any]:
        """The decoded document."""
        made: dict[str, Any] = msgspec.to_builtins(self)
        return made

    def to_json(self) -> str:
        """The document as compact JSON text."""
        return msgspec.json.encode(self).decode()


M = TypeVar("M", bound=Model)


def escape(part: str | int) -> str:
    """One reference token of a JSON pointer (RFC 6901, section 3)."""
    return str(part).replace("~", "~0").replace("/", "~1")


def parse(model: type[M], document: str | bytes | dict[str, Any], source: str = "") -> M:
    """
    Validate `document` (JSON text or its decoded object) as `model`.

    Reading stops at the first fault: a document of a million faults costs no more than one.

    Raises:
        InvalidInputError: naming the first fault and its JSON pointer.
    """
    try:
        if isinstance(document, dict):
            return msgspec.convert(document, model)
        data = document.encode() if isinstance(document, str) else document
        if data[:2] == b"\x1f\x8b":
            raise InvalidInputError("not JSON: it is a gzip file, unpack it first", source=source)
        data = data.removeprefix(BOM)
        made = msgspec.json.decode(data, type=model)
    except msgspec.ValidationError as error:
        raise _translate(error, source) from None
    except msgspec.DecodeError as error:
        raise _syntax(model, data, str(error), source) from None
    except UnicodeError:
        raise InvalidInputError("not JSON: the text is not UTF-8", source=source) from None
    except RecursionError:
        raise InvalidInputError("not JSON: nested too deeply", source=source) from None
    _refuse_duplicates(data, source)
    return made


def read(model: type[M], path: Path | str) -> M:
    """
    Read the file at `path` as `model`.

    Raises:
        InvalidInputError: the file cannot be read, or what `parse` raises.
    """
    return parse(model, read_bytes(path), source=str(path))


def read_bytes(path: Path | str) -> bytes:
    """
    What the file at `path` holds.

    Raises:
        InvalidInputError: it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInputError(f"cannot be read: {reason}", source=str(path)) from None


_PLACE = re.compile(r"(?s)(.*?)(?: - at `\$(.*)`)?")
_NAMED = re.compile(r"(?s)Object (contains unknown|missing required) field `(.*)`")


def _translate(error: msgspec.ValidationError, source: str) -> InvalidInputError:
    """The fault in our words, its place as a JSON pointer."""
    match = _PLACE.fullmatch(str(error))
    message, path = (match[1], match[2] or "") if match is not None else (str(error), "")
    # `$.ops[3].inputs[0]`; what is below a free key (`versions[...]`) has no better place.
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
        unknown = "unknown field (nothing of that name belongs here)"
        message = unknown if named[1] == "contains unknown" else "required field is missing"
    message = message[0].lower() + message[1:].replace("`", "").replace("enum value", "value")
    return InvalidInputError(" ".join(message.split())[:300], pointer, source)


def _syntax(model: type[M], data: bytes, message: str, source: str) -> InvalidInputError:
    """A syntax error with its line; or the constant (NaN, Infinity) that JSON does not have."""
    found = re.search(r"(.*) \(byte (\d+)\)", message.removeprefix("JSON is malformed: "))
    if found is None:
        what = "it ends too early" if data.strip() else "the text is empty"
        return InvalidInputError(f"not JSON: {what}", source=source)
    at = int(found[2])
    at -= data[at - 1 : at + 1] == b"-I"
    line, column = data.count(b"\n", 0, at) + 1, at - data.rfind(b"\n", 0, at)
    constant = re.match(rb"-?(NaN|Infinity)", data[at : at + 9])
    if constant is None:
        what = f"{found[1]} at line {line} column {column}"
        return InvalidInputError(f"not JSON: {what}", source=source)
    name = constant[0].decode()
    try:  # as a text it has a place in the document, and is as wrong
        msgspec.json.decode(data[:at] + b'""' + data[at + len(name) :], type=model)
    except msgspec.ValidationError as error:
        pointer = _translate(error, "").pointer
    except msgspec.DecodeError:
        pointer = ""
    return InvalidInputError(f"{name} is not a number in JSON", pointer, source)


def _refuse_duplicates(data: bytes, source: str) -> None:
    """
    Refuse an object that names a field twice: which one was meant?

    Decoded and written again a document has as many colons as before, unless a field was lost. An
    escaped colon could hide one; then, and to say where, the text is read slowly.
    """
    again = msgspec.json.encode(msgspec.json.decode(data))
    if again.count(b":") == data.count(b":") and b"\\u003" not in data:
        return

    def once(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                shown = name if len(name) <= 50 else f"{name[:50]}..."
                message = f"an object names the field '{shown}' twice"
                raise InvalidInputError(message, source=source)
            seen.add(name)

    json.loads(data, object_pairs_hook=once)
