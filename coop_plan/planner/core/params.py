"""Groups of parameters whose field types state unit and valid range, checked at construction."""

import functools
import math
from collections import namedtuple
from dataclasses import dataclass, fields
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints


class Within(NamedTuple):
    """The valid range of a number, both ends included."""

    low: float
    high: float


Share = Annotated[float, Within(0.0, 1.0)]
"""Part of a whole: of the time left, of bytes, of the base cost."""

Ratio = Annotated[float, Within(0.0, math.inf)]
"""Multiple of a quantity, at least 0."""

Seconds = Annotated[float, Within(0.0, math.inf)]
"""Wall-clock time."""

Positive = Annotated[float, Within(math.ulp(0.0), math.inf)]
"""Above 0."""

Count = Annotated[int, Within(1, math.inf)]
"""Number of items, at least 1."""

Size = Annotated[int, Within(0, math.inf)]
"""Number of items or size of a graph, at least 0."""


def _check(field: str, kind: Any, value: Any) -> None:
    """Raise ValueError if a value, or an item of a tuple, is outside the range of its type."""
    if get_origin(kind) is Annotated:
        _, (low, high) = get_args(kind)
        if not low <= value <= high:
            raise ValueError(f"{field} is {value}: give a value from {low} to {high}")
    elif get_origin(kind) is tuple:
        kinds = get_args(kind)
        if kinds[-1] is Ellipsis:
            if not value:
                raise ValueError(f"{field} is empty: give at least one value")
            kinds = kinds[:1] * len(value)
        for item, item_kind in zip(value, kinds, strict=True):
            _check(field, item_kind, item)


@dataclass(frozen=True)
class Params:
    """A group of parameters; construction raises ValueError if a field is outside its range."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            _check(f"{type(self).__name__}.{name}", kind, getattr(self, name))


@functools.cache
def values_class(group: type[Params]) -> Any:
    """Named tuple with the fields of a group `...Params`, for compiled code: `...Values`."""
    name, names = group.__name__.replace("Params", "Values"), [f.name for f in fields(group)]
    return namedtuple(name, names, module=group.__module__)
