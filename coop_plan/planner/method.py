"""Interface of planning methods: a problem and an arena size in, a placed schedule out."""

import math
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
    """Progress of a planning run; `fraction` is None if the end is unknown.

    `overhead` is that of the best plan so far, `bound` the proved lower bound on it, both fractions
    of the base cost; `gap` is the plan's cost over the bound's, minus one.
    """

    message: str
    fraction: float | None = None
    overhead: float | None = None
    bound: float | None = None
    gap: float | None = None


@dataclass(frozen=True)
class Request:
    """Input of a method: capacity of the arena in bytes, ablation switches, deadline, seed, solver.

    `off` has the switches that are turned off; `deadline` is a `time.monotonic` value in seconds,
    or None; `progress` is called with each `Progress`.
    """

    arena_bytes: int
    off: frozenset[str] = frozenset()
    deadline: float | None = None
    seed: int = 0
    solver: str | None = None
    any_schedule: bool = False
    """True if the first schedule that fits is wanted, at any cost."""
    larger: PlacedSchedule | None = None
    """A schedule to start from; with `any_schedule` it needs a little more memory."""
    progress: Callable[[Progress], None] | None = None
    start: tuple[int, ...] | None = None
    """Ops in the order of a known schedule, to start from."""

    def check_time(self) -> None:
        """Raise `TimeLimitError` once the deadline has passed."""
        if self.out_of_time():
            raise TimeLimitError("time limit reached before any plan was found")

    def part(self, share: float) -> "Request":
        """The request with the first part of the remaining time."""
        if self.deadline is None:
            return self
        now = time.monotonic()
        return replace(self, deadline=now + (self.deadline - now) * share)

    def in_program_order(self) -> "Request":
        """The request restricted to schedules with first runs in program order."""
        return replace(self, off=self.off | {"reorder"})

    @property
    def seconds_left(self) -> float:
        """Time until the deadline, s; infinite without one."""
        return math.inf if self.deadline is None else self.deadline - time.monotonic()

    def out_of_time(self) -> bool:
        """True if the deadline has passed."""
        return self.deadline is not None and time.monotonic() > self.deadline


@dataclass(frozen=True)
class Solution:
    """A placed schedule and a proved lower bound.

    `bound_model` names the schedules for which the lower bound (µs) holds: "any", or
    "program-order", with all variants that the method chooses among and all transfers that the
    problem allows.
    """

    placed: PlacedSchedule
    status: Literal["optimal", "feasible"] = "feasible"
    lower_bound_us: float | None = None
    bound_model: BoundModel | None = None
    eviction_free_ratio: float | None = None
    """Mean of free bytes / arena after forced evictions, for online methods."""
    evictions: int | None = None
    """Number of tensors evicted by failed allocations, for online methods."""


class Solve(Protocol):
    """A method; raises `DoesNotFitError` if it finds no schedule within `request.arena_bytes`."""

    def __call__(self, problem: Problem, request: Request) -> Solution: ...


@dataclass(frozen=True)
class MethodInfo:
    """An entry of the registry: name, summary, source, capabilities and switches."""

    name: str
    summary: str
    source: str
    solve: Solve
    anytime: bool = False
    """True if it runs until the deadline, and so needs one."""
    starts_from: str = ""
    """Name of the method whose plan it starts from, if any."""
    takes_solver: bool = False
    """True if the integer-programming solver can be chosen."""
    transfers: bool = False
    """True if it transfers tensors to the host, if graph and request allow it."""
    homes: Literal["", "all", "searched"] = ""
    """Movable residents that it may keep on the host between their uses."""
    variants: bool = False
    """True if it chooses among the variants of an op."""
    switches: Mapping[str, str] = field(default_factory=dict)
    """Ablation switches: name → effect of turning it off."""

    def unused(self, offered: Iterable[str]) -> list[str]:
        """The choices among `offered`, "variants" and "transfers", that the method ignores."""
        used = {"variants": self.variants, "transfers": self.transfers}
        return [name for name in offered if not used[name]]
