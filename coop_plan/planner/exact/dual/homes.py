"""Lower bound for plans with homes, from models with more and more time points."""

from collections.abc import Callable
from math import inf

from coop_plan.planner.core.problem import Problem
from coop_plan.planner.exact.dual.milp_bounds import report_bounds
from coop_plan.planner.exact.model.homes import HomesModel, Order
from coop_plan.planner.exact.solver import simplex
from coop_plan.planner.exact.solver.jobs import RelaxMilp


def bound_homes(problem: Problem, budget: int, report: Callable[[float], None]) -> None:
    """Solve relaxations within a budget (bytes), each with twice as many time points as before.

    Each lower bound (µs) is passed to `report`. With all time points the model is solved as a MILP.
    """
    order = Order(problem)
    most = len(order.chain())
    count = min(1, most)
    while True:
        model = HomesModel(order, budget, order.points(count))
        relaxed = simplex.relax(RelaxMilp(model.milp, 0.0), inf)
        report(model.bound_us(relaxed.bound))
        if count == most:
            return report_bounds(model.milp, model.bound_us, report)
        count = min(2 * count, most)
