"""Reading JSON documents into models, with every failure as one `InvalidInputError`."""

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from coop_plan.schemas.errors import InvalidInputError

INT64_MAX = 2**63 - 1
"""Upper limit of every size in bytes: planners hold sizes in int64."""


class Model(BaseModel):
    """Base of every object of the contract: unknown fields are refused, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


M = TypeVar("M", bound=BaseModel)


def escape(part: str | int) -> str:
    """One reference token of a JSON pointer (RFC 6901, section 3)."""
    return str(part).replace("~", "~0").replace("/", "~1")


def parse(model: type[M], document: str | bytes | dict[str, Any], source: str = "") -> M:
    """
    Validate `document` (JSON text or its decoded object) as `model`.

    Raises:
        InvalidInputError: naming the first fault and its JSON pointer.
    """
    try:
        if isinstance(document, dict):
            return model.model_validate(document)
        try:
            return model.model_validate_json(document)
        except ValidationError as error:
            if error.errors()[0]["type"] != "json_invalid":
                raise
            _refuse_broken_json(document, source)
            raise
    except ValidationError as error:
        raise _translate(model, error, document, source) from None


def _refuse_broken_json(document: str | bytes, source: str) -> None:
    """Name the line of a syntax error, or the constant (NaN, Infinity) that JSON does not have."""

    def refuse(constant: str) -> None:
        raise InvalidInputError(f"not JSON: {constant} is not a number in JSON", source=source)

    try:
        json.loads(document, parse_constant=refuse)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise InvalidInputError(f"not JSON: {error.msg} at {where}", source=source) from None
    except UnicodeDecodeError:
        raise InvalidInputError("not JSON: the text is not UTF-8", source=source) from None
    except RecursionError:
        raise InvalidInputError("not JSON: nested too deeply", source=source) from None
    except InvalidInputError:
        raise
    except ValueError:
        raise InvalidInputError(
            "not JSON that can be read: a number has thousands of digits", source=source
        ) from None


def read(model: type[M], path: Path | str) -> M:
    """
    Read the file at `path` as `model`.

    Raises:
        InvalidInputError: the file cannot be read, or what `parse` raises.
    """
    try:
        document = Path(path).read_bytes()
    except OSError as error:
        raise InvalidInputError(f"cannot be read: {error.strerror}", source=str(path)) from None
    return parse(model, document, source=str(path))


def _translate(
    model: type[BaseModel], error: ValidationError, document: object, source: str
) -> InvalidInputError:
    errors = error.errors(include_url=False)
    first = errors[0]
    if first["type"] == "int_type" and isinstance(first.get("input"), dict):
        # An object where an id or an object may stand: what is wrong in the object comes next.
        place = first["loc"][:-1]
        first = next((e for e in errors[1:] if e["loc"][: len(place)] == place), first)
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, InvalidInputError):
        return InvalidInputError(inner.message, inner.pointer, source)
    # Tagged unions and one-of-types fields add the branch's name to the location, which is
    # no part of the document: keep only what can be followed in it.
    try:
        node: Any = json.loads(document) if isinstance(document, (str, bytes)) else document
    except ValueError:
        node = None
    parts: list[str] = []
    for part in first["loc"]:
        in_list = isinstance(node, list) and isinstance(part, int) and part < len(node)
        if in_list or (isinstance(node, dict) and part in node):
            node = node[part]
        elif isinstance(node, dict) and first["type"] == "missing" and part == first["loc"][-1]:
            node = None
        else:
            continue
        parts.append(escape(part))
    pointer = "".join(f"/{part}" for part in parts)
    message = first["msg"][0].lower() + first["msg"][1:]
    if first["type"] == "extra_forbidden":
        message = "unknown field (nothing of that name belongs here)"
    elif first["type"] == "missing":
        message = "required field is missing"
    return InvalidInputError(message, pointer, source)
