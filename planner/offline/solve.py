"""The method coop-offline: portfolio, a climb of fixed length, annealings until the deadline."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.errors import DoesNotFitError, TimeLimitError
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.offline.anneal import Annealing, alike
from coop_plan.planner.offline.climb import climb
from coop_plan.planner.offline.params import DEFAULTS, CoopOfflineParams
from coop_plan.planner.offline.portfolio import Portfolio
from coop_plan.planner.offline.resequence import Resequencing
from coop_plan.planner.online.methods import run_coop
from coop_plan.planner.online.run import OnlineRun


class CoopOffline:
    """The method on one request, for those who ask for more than one plan."""

    def __init__(
        self, problem: Problem, request: Request, params: CoopOfflineParams = DEFAULTS
    ) -> None:
        self.problem = problem
        self.request = request
        self.params = params
        self.portfolio = Portfolio(problem, request, params)
        self._online: OnlineRun | None = None

    def begin(self) -> None:
        """What the method does on its request."""
        portfolio, request = self.portfolio, self.request
        portfolio.sweep()
        if portfolio.best.found is None:
            portfolio.place_the_unplaced()
        if portfolio.best.found is not None and request.any_schedule:
            return
        with contextlib.suppress(DoesNotFitError, TimeLimitError):
            self._online = run_coop(self.problem, replace(request, progress=None, off=frozenset()))
        if portfolio.best.found is not None:
            climb(portfolio)
            portfolio.place_the_unplaced()
        if request.deadline is not None:
            self.improve(request.deadline)

    @cached_property
    def _alike(self) -> Ints:
        return alike(self.problem, self.portfolio.arrays)

    def improve(self, deadline: float, enough: Callable[[], bool] = lambda: False) -> None:
        """
        Look for better plans than the portfolio's and the climb's, until the deadline or `enough`.

        The deadline is a `time.monotonic` value (s).
        """
        portfolio = self.portfolio
        portfolio.request = replace(portfolio.request, deadline=deadline)

        worth = min(self.params.annealing.worth_placing, self.params.resequencing.worth_placing)

        def done() -> bool:
            # What saves less is not placed, and no run costs less than every op once.
            return enough() or portfolio.best.cost_us * (1 - worth) <= self.problem.base_cost_us

        now = time.monotonic()
        if portfolio.best.found is None or now >= deadline or done():
            return
        weights = now + self.params.weights_share * (deadline - now)
        Annealing(portfolio, self._alike, weights).run(done)
        Resequencing(portfolio, deadline).run(done)

    def solution(self) -> Solution:
        """
        The cheapest schedule so far.

        Raises:
            DoesNotFitError: there is none.
        """
        best, online = self.portfolio.best, self._online
        if best.found is not None and (online is None or best.cost_us <= online.cost_us):
            return self.portfolio.solution()
        if online is None:
            raise DoesNotFitError(self.portfolio.failed_op)
        return Solution(online.placed)


def solve_coop_offline(
    problem: Problem, request: Request, params: CoopOfflineParams = DEFAULTS
) -> Solution:
    """The cheapest schedule found that fits; time until `request.deadline` goes into annealing."""
    method = CoopOffline(problem, request, params)
    method.begin()
    return method.solution()
