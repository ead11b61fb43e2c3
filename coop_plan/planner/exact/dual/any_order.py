"""Lower bound for any order of first runs, from models with more and more time points."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from coop_plan.planner.exact.model.any_order import AnyOrderModel
from coop_plan.planner.exact.model.milp import Answer, Outcome
from coop_plan.planner.exact.model.point_selection import Ancestry, Chains
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.solver.jobs import SolveMilp, SolveProgress
from coop_plan.planner.exact.solver.milp_solvers import solve_milp


@dataclass
class AnyOrderBounding:
    """Models at one capacity (bytes), each with twice as many time points as the one before.

    Each lower bound (µs) is passed to `report`.
    """

    program: Program
    capacity: int
    report: Callable[[float], None]

    def run(self) -> None:
        """Solve model after model until there are no time points to add."""
        ancestry = Ancestry(self.program)
        chains = Chains(ancestry, self.capacity)
        points: list[int] = []
        count = 1
        while count < 2 * self.program.n:
            found = chains.points(count)
            if found != points:
                points = found
                self._solve(AnyOrderModel(ancestry, self.capacity, points))
            count *= 2

    def _solve(self, model: AnyOrderModel) -> None:
        def report(progress: SolveProgress | Answer) -> None:
            self.report(model.bound_us(progress.bound))

        answer = solve_milp(SolveMilp(model.milp), inf, report)
        if answer.outcome is not Outcome.INFEASIBLE:
            report(answer)
