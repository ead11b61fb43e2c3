"""Faults of a plan, and the buffers and transfers of its replay."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault of a plan: its code (see `planner.verifier.rules`), JSON pointer and message."""

    code: str
    pointer: str
    message: str

    def __str__(self) -> str:
        return f"{self.pointer or '/'}: {self.message} [{self.code}]"


HOME = -1
"""Source of a prefetch from a home."""

Place = str | tuple["Place | int", ...]
"""A JSON pointer in parts, joined only for a fault."""


def pointer(place: Place | int) -> str:
    """The parts of a place joined to a JSON pointer."""
    return "".join(map(pointer, place)) if isinstance(place, tuple) else str(place)


@dataclass(slots=True)
class Buffer:
    """A live buffer in the arena; `end` is exclusive.

    `indexed` is false for a buffer of 0 bytes or with an overlap fault, which the address index
    omits. `taken_over` is set by an in-place write of the current step.
    """

    tensor: int
    offset: int
    bytes: int
    version: int
    end: int
    indexed: bool = False
    taken_over: bool = False


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy in flight until `end_us`; `source` is the buffer whose host copy a prefetch reads."""

    place: Place
    end_us: float
    source: int | None = None
