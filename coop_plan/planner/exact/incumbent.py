"""Incumbent plan and lower bound of one request."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.memory_bounds import largest_working_set
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule
from coop_plan.planner.method import Progress, Solution
from coop_plan.schemas import BoundModel

OPTIMALITY_TOLERANCE = 1e-6
"""A plan is optimal if its cost exceeds the bound by at most this share."""


@dataclass(eq=False)
class Incumbent:
    """Best placed plan for one arena (bytes) and best lower bound, both in µs.

    Changes are reported to `progress`. `bound_model` names the schedules for which the bound holds.
    """

    problem: Problem
    arena: int
    progress: Callable[[Progress], None] | None = None
    bound_model: BoundModel = "program-order"
    solution: Solution | None = None
    bound_us: float = field(init=False)

    def __post_init__(self) -> None:
        self.bound_us = self.problem.floor_us

    @property
    def placed(self) -> PlacedSchedule | None:
        """The best plan's schedule, None without a plan."""
        return None if self.solution is None else self.solution.placed

    @property
    def cost_us(self) -> float:
        """Cost of the best plan, µs; infinite without a plan."""
        return inf if self.placed is None else self.placed.cost_us

    @property
    def proved(self) -> bool:
        """True if the cost is within the tolerance of the bound."""
        return self.cost_us <= self.bound_us * (1 + OPTIMALITY_TOLERANCE)

    @property
    def gap(self) -> float:
        """Optimality gap: cost / bound - 1."""
        return self.cost_us / max(self.bound_us, 1e-12) - 1

    def prove(self, bound_us: float) -> None:
        """Raise the bound to a solver's (µs, no launches, or −∞); a lower one is ignored."""
        if bound_us > -inf:
            # Solvers use floating-point arithmetic.
            proved = bound_us + self._first_launch_us - self.problem.base_cost_us * 1e-7
            self.bound_us = max(self.bound_us, min(proved, self.cost_us))
            self.report()

    @property
    def _first_launch_us(self) -> float:
        """Time before the first run and copy of every schedule, µs: a launch, or 0 if none is due.

        A run of no cost is not launched, and its output may be copied before the first launch ends.
        """
        copies = "transfers" in self.problem.beyond_recomputation
        is_due = (all if copies else any)(self.problem.cheapest)
        return self.problem.device.launch_ahead_us * is_due

    def discard_bounds(self, reason: str) -> None:
        """Reset the bound to the floor, after a solver contradicted a plan."""
        self.bound_us = self.problem.floor_us
        if self.progress is not None:
            self.progress(Progress(f"lower bound discarded: {reason}"))

    def offer(self, placed: PlacedSchedule) -> bool:
        """Keep a schedule if it is cheaper than the incumbent and within the arena."""
        if placed.cost_us >= self.cost_us or placed.arena_bytes > self.arena:
            return False
        self.solution = Solution(placed)
        self.report()
        return True

    def report(self, bound_us: float = 0.0) -> None:
        """Report incumbent, bound and gap; `bound_us` is the bound of a solve still running."""
        if self.progress is None:
            return
        base = max(self.problem.base_cost_us, 1e-12)
        bound = min(max(self.bound_us, bound_us), self.cost_us)
        least = bound / base - 1
        if self.solution is None:
            self.progress(Progress(f"no plan yet, overhead at least {least:.2%}", bound=least))
            return
        overhead, gap = self.cost_us / base - 1, self.cost_us / max(bound, 1e-12) - 1
        message = f"overhead {overhead:.2%}, at least {least:.2%}, gap {gap:.2%}"
        self.progress(Progress(message, overhead=overhead, bound=least, gap=gap))

    def answer(self) -> Solution:
        """Returns the best plan with its bound.

        Raises:
            DoesNotFitError: there is no plan.
        """
        if self.solution is None:
            raise DoesNotFitError(largest_working_set(self.problem).op)
        return replace(
            self.solution,
            status="optimal" if self.proved else "feasible",
            lower_bound_us=min(self.bound_us, self.cost_us),
            bound_model=self.bound_model,
        )
