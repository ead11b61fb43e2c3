"""Lower bounds that a solver proves while it solves a model."""

from collections.abc import Callable
from math import inf

from coop_plan.planner.exact.model.milp import Answer, Milp, Outcome
from coop_plan.planner.exact.solver.jobs import SolveMilp, SolveProgress
from coop_plan.planner.exact.solver.milp_solvers import solve_milp


def report_bounds(
    milp: Milp,
    bound_us: Callable[[float], float],
    report: Callable[[float], None],
    seconds: float = inf,
) -> None:
    """Solve a model within a time limit (s), and pass each lower bound (µs) to `report`.

    `bound_us` converts from the model's units.
    """

    def convert(progress: SolveProgress | Answer) -> None:
        report(bound_us(progress.bound))

    answer = solve_milp(SolveMilp(milp), seconds, convert)
    if answer.outcome is not Outcome.INFEASIBLE:
        convert(answer)
