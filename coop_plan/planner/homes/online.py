"""Plans of an online method with movable residents on the host: all of them have homes.

The method executes the lowered graph (`planner.homes.lower.lowered_online`). Updates run on the
device.
"""

import time
from functools import cached_property

from coop_plan.planner.core.errors import DoesNotFitError, TimeLimitError
from coop_plan.planner.core.memory_bounds import budget_lower_bound
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.homes.lower import lowered_online
from coop_plan.planner.homes.restore import assembled
from coop_plan.planner.homes.search import by_uses
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.smallest_budget import Task
from coop_plan.schemas import Plan


class OnlineHomes:
    """Plans with homes for one graph, as those of `planner.homes.search.HomeSearch`."""

    def __init__(self, problem: Problem, options: PlanOptions, request: Request) -> None:
        self.problem, self.options = problem, options
        self.low = lowered_online(problem, by_uses(problem))
        self.task = Task(self.low.form.problem, options.info, request)
        self.began = time.monotonic()

    def cheapest(self, budget: int, limit_us: float) -> Plan | None:
        """The plan within a budget (bytes), if there is one that costs less than a limit (µs)."""
        arena = budget - self.task.problem.fixed_bytes
        try:
            solution = self._without_evictions
            if solution.placed.arena_bytes > arena:
                solution = self.task.within(arena)
        except (DoesNotFitError, TimeLimitError):
            return None
        found = self._plan(solution, budget)
        return found if found is not None and found.cost_us < limit_us else None

    def smallest(self, budget: int) -> Plan | None:
        """The plan of least memory that is found, below a budget (bytes) that another meets."""
        try:
            smallest = self.task.smallest(self._without_evictions.placed)
        except (DoesNotFitError, TimeLimitError):
            return None
        met = self.task.problem.fixed_bytes + smallest.arena_bytes
        found = self._plan(smallest.solution, met) if met < budget else None
        if found is None:
            return None
        bound = budget_lower_bound(self.problem)
        return found.model_copy({"budget_lower_bound_bytes": bound})

    @cached_property
    def _without_evictions(self) -> Solution:
        """The solution in an arena with room for all tensors, and as much again."""
        problem = self.task.problem
        return self.task.solve(2 * sum(problem.size) + 2 * sum(problem.workspace))

    def _plan(self, solution: Solution, budget: int) -> Plan | None:
        return assembled(self.problem, self.low, solution, self.options, budget, self.began)
