"""Numbers of a static graph that depend on the sizes of its inputs.

A graph with such numbers runs at all sizes for which its symbolic trace holds: the code of a plan
reads them from the call.
"""

from typing import Any

Numbers = tuple[int | float, ...]
"""Values of the numbers of a symbolic trace at some sizes, by place."""


class SizedInt(int):
    """An integer at the sizes of the graph, and its place in `Numbers`."""

    place: int


class SizedFloat(float):
    """As `SizedInt`."""

    place: int


def sized(value: int | float, place: int) -> SizedInt | SizedFloat:
    """The number at `place` with its value in the graph."""
    made = SizedInt(value) if isinstance(value, int) else SizedFloat(value)
    made.place = place
    return made


def plain(value: Any) -> Any:
    """A value without its place."""
    if isinstance(value, SizedInt):
        return int(value)
    return float(value) if isinstance(value, SizedFloat) else value


def place_of(value: object) -> int | None:
    """The place of a number; None for another value."""
    return value.place if isinstance(value, SizedInt | SizedFloat) else None
