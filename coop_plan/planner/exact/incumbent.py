"""The best plan and the best bound so far."""

from collections.abc import Callable
from dataclasses import replace

from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.memory_bounds import largest_working_set
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule
from coop_plan.planner.exact.model.milp import INFINITY
from coop_plan.planner.method import Progress, Solution
from coop_plan.schemas import BoundModel

SOLVER_TOLERANCE = 1e-7
"""Share of the base cost that a bound gives away, as solvers compute in floating point."""

PROOF = 1e-6
"""A plan is optimal when its cost is within this share of the bound."""


class Incumbent:
    """
    The best placed plan for one arena (bytes) and the best lower bound, both in µs.

    Tells the caller when they move. `model` says for which schedules the bound holds.
    """

    def __init__(
        self,
        problem: Problem,
        arena: int,
        tell: Callable[[Progress], None] | None = None,
        model: BoundModel = "program-order",
    ) -> None:
        self.problem = problem
        self.arena = arena
        self.model = model
        self.bound_us = problem.base_cost_us
        self.solution: Solution | None = None
        self._tell = tell

    @property
    def cost_us(self) -> float:
        """Cost of the best plan, infinite without one."""
        return float("inf") if self.solution is None else self.solution.placed.cost_us

    @property
    def proved(self) -> bool:
        """Whether the plan is within the tolerance of the bound."""
        return self.cost_us <= self.bound_us * (1 + PROOF)

    @property
    def gap(self) -> float:
        """Cost over bound, minus one."""
        return self.cost_us / max(self.bound_us, 1e-12) - 1

    def raise_bound(self, bound_us: float) -> None:
        """Take a proved lower bound; a worse one changes nothing."""
        self.bound_us = max(self.bound_us, min(bound_us, self.cost_us))
        self.report()

    def prove(self, recomputes_us: float) -> None:
        """Take what recomputes cost at least, as a solver has it; −∞ changes nothing."""
        if recomputes_us > -INFINITY:
            self.raise_bound(self.problem.base_cost_us * (1 - SOLVER_TOLERANCE) + recomputes_us)

    def distrust(self, why: str) -> None:
        """Forget the bounds of a solver that contradicts a plan; every op once remains one."""
        self.bound_us = self.problem.base_cost_us
        if self._tell is not None:
            self._tell(Progress(f"bound given up: {why}"))

    def offer(self, placed: PlacedSchedule) -> None:
        """A schedule with addresses within the arena; the cheapest is kept."""
        if placed.cost_us < self.cost_us:
            self.solution = Solution(placed)
            self.report()

    def report(self, bound_us: float = 0.0) -> None:
        """Incumbent, bound and gap as progress; `bound_us` is one that is still being raised."""
        if self._tell is None:
            return
        base = max(self.problem.base_cost_us, 1e-12)
        bound = min(max(self.bound_us, bound_us), self.cost_us)
        least = bound / base - 1
        if self.solution is None:
            self._tell(Progress(f"no plan yet, overhead at least {least:.2%}", bound=least))
            return
        overhead, gap = self.cost_us / base - 1, self.cost_us / max(bound, 1e-12) - 1
        message = f"overhead {overhead:.2%}, at least {least:.2%}, gap {gap:.2%}"
        self._tell(Progress(message, overhead=overhead, bound=least, gap=gap))

    def answer(self) -> Solution:
        """
        The best plan with its bound.

        Raises:
            DoesNotFitError: there is no plan.
        """
        if self.solution is None:
            raise DoesNotFitError(largest_working_set(self.problem).op)
        return replace(
            self.solution,
            status="optimal" if self.proved else "feasible",
            lower_bound_us=min(self.bound_us, self.cost_us),
            bound_model=self.model,
        )
