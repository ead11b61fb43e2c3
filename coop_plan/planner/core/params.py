"""Groups of parameters: the type of a field is its unit and valid range, checked when made."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints


class Within(NamedTuple):
    """The valid range of a number, both ends included."""

    least: float
    most: float


Share = Annotated[float, Within(0.0, 1.0)]
"""A part of a whole: of time left, of bytes, of the base cost."""

Ratio = Annotated[float, Within(0.0, math.inf)]
"""A multiple of something, at least 0."""

Seconds = Annotated[float, Within(0.0, math.inf)]
"""Wall-clock time."""

Factor = Annotated[float, Within(1.0, math.inf)]
"""What something is multiplied or divided by, at least 1."""

Positive = Annotated[float, Within(math.ulp(0.0), math.inf)]
"""Above 0."""

PositiveShare = Annotated[float, Within(math.ulp(0.0), 1.0)]
"""A part of a whole, not none of it."""

Count = Annotated[int, Within(1, math.inf)]
"""How many, at least one."""

Size = Annotated[int, Within(0, math.inf)]
"""How many, or how large a graph: at least 0."""


def _check(where: str, kind: Any, value: Any) -> None:
    """Raise ValueError where a value, or a part of a tuple, is out of its kind's range."""
    if get_origin(kind) is Annotated:
        _, (least, most) = get_args(kind)
        if not least <= value <= most:
            raise ValueError(f"{where} is {value}, not within {least} and {most}")
    elif get_origin(kind) is tuple:
        kinds = get_args(kind)
        if kinds[-1] is Ellipsis:
            if not value:
                raise ValueError(f"{where} is empty")
            kinds = kinds[:1] * len(value)
        for part, single in zip(value, kinds, strict=True):
            _check(where, single, part)


@dataclass(frozen=True)
class Params:
    """A group of parameters; making one raises ValueError if a field is out of its range."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            _check(f"{type(self).__name__}.{name}", kind, getattr(self, name))
