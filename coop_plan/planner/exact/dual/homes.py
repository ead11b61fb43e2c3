"""Lower bound for plans with homes, from models with more and more time points."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from coop_plan.planner.core.problem import Problem
from coop_plan.planner.exact.dual.milp_bounds import report_bounds
from coop_plan.planner.exact.model.homes import HomesModel, Order
from coop_plan.planner.exact.solver import simplex
from coop_plan.planner.exact.solver.jobs import RelaxMilp


@dataclass
class HomesBounding:
    """Relaxations within one budget (bytes), each with twice as many time points as the one before.

    Each lower bound (µs) is passed to `report`. The last model is solved as a MILP.
    """

    problem: Problem
    budget: int
    report: Callable[[float], None]

    def run(self) -> None:
        """Solve model after model until there are no time points to add."""
        order = Order(self.problem)
        most = len(order.chain())
        count = min(1, most)
        while True:
            model = HomesModel(order, self.budget, order.points(count))
            relaxed = simplex.relax(RelaxMilp(model.milp, 0.0), inf)
            self.report(model.bound_us(relaxed.bound))
            if count == most:
                return report_bounds(model.milp, model.bound_us, self.report)
            count = min(2 * count, most)
