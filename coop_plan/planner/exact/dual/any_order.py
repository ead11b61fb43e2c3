"""Lower bound for any order of first runs, from models with more and more time points."""

from collections.abc import Callable

from coop_plan.planner.exact.dual.milp_bounds import report_bounds
from coop_plan.planner.exact.model.any_order import AnyOrderModel
from coop_plan.planner.exact.model.point_selection import Ancestry, Chains
from coop_plan.planner.exact.model.program import Program


def bound_any_order(program: Program, capacity: int, report: Callable[[float], None]) -> None:
    """Solve models at one capacity (bytes), each with twice as many time points as the one before.

    Each lower bound (µs) is passed to `report`. Ends once there are no time points to add.
    """
    ancestry = Ancestry(program)
    chains = Chains(ancestry, capacity)
    points: list[int] = []
    count = 1
    while count < 2 * program.n:
        found = chains.points(count)
        if found != points:
            points = found
            model = AnyOrderModel(ancestry, capacity, points)
            report_bounds(model.milp, model.bound_us, report)
        count *= 2
