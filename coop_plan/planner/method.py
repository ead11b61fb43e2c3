"""What a planning method is: a problem and an arena size in, a schedule out."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from coop_plan.planner.core.errors import TimeLimitError
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule
from coop_plan.schemas import BoundModel


@dataclass(frozen=True)
class Progress:
    """
    What a long job says of itself; `fraction` is None when the end is not known.

    `overhead` is that of the best plan so far, `bound` the least that any can have as far as is
    proved, both shares of the base cost; `gap` is the plan's cost over the bound's, minus one.
    """

    message: str
    fraction: float | None = None
    overhead: float | None = None
    bound: float | None = None
    gap: float | None = None


@dataclass(frozen=True)
class Request:
    """
    What a method is asked: arena bytes to stay within, switches turned off, when to stop, a seed,
    the name of a solver.

    `deadline` is a `time.monotonic` value in seconds, or None.
    """

    arena_bytes: int
    off: frozenset[str] = frozenset()
    deadline: float | None = None
    seed: int = 0
    solver: str | None = None
    any_schedule: bool = False
    """Whether the first schedule that fits will do, however dear."""
    progress: Callable[[Progress], None] | None = None

    def check_time(self) -> None:
        """Raise `TimeLimitError` once the deadline has passed."""
        if self.out_of_time():
            raise TimeLimitError("time limit reached before any plan was found")

    def first_half(self) -> "Request":
        """The request for the first half of the time that is left."""
        if self.deadline is None:
            return self
        now = time.monotonic()
        return replace(self, deadline=now + (self.deadline - now) / 2)

    def in_program_order(self) -> "Request":
        """The request for schedules whose first runs are in the program's order."""
        return replace(self, off=self.off | {"reorder"})

    def out_of_time(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() > self.deadline


@dataclass(frozen=True)
class Solution:
    """
    A placed schedule and what the method proved.

    `bound_model` says for which schedules the lower bound (µs) holds: "any", or those in
    "program-order", in whatever variants the method chooses among, which may move to the host what
    the problem lets them.
    """

    placed: PlacedSchedule
    status: Literal["optimal", "feasible"] = "feasible"
    lower_bound_us: float | None = None
    bound_model: BoundModel | None = None
    eviction_free_ratio: float | None = None
    """Mean of free bytes / arena right after forced evictions, for online methods."""
    evictions: int | None = None
    """Tensors that a failed allocation evicted, for online methods."""


class Solve(Protocol):
    """Raises `DoesNotFitError` when the method finds no schedule in `request.arena_bytes`."""

    def __call__(self, problem: Problem, request: Request) -> Solution: ...


@dataclass(frozen=True)
class MethodInfo:
    """An entry of the registry: name, one line of what it does, its source, its switches."""

    name: str
    summary: str
    source: str
    solve: Solve
    anytime: bool = False
    """Whether it runs until the deadline, and so needs one."""
    takes_solver: bool = False
    """Whether the integer-programming solver can be named."""
    transfers: bool = False
    """Whether it moves tensors to the host, where the graph and the request let it."""
    variants: bool = False
    """Whether it chooses among the variants of an op."""
    switches: Mapping[str, str] = field(default_factory=dict)
    """Ablation switches, name → what is lost when it is turned off."""

    def unused(self, offered: Iterable[str]) -> list[str]:
        """Of what is offered beside recomputation, "variants" and "transfers", what it leaves."""
        used = {"variants": self.variants, "transfers": self.transfers}
        return [name for name in offered if not used[name]]
