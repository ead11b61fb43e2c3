"""The method coop-offline: portfolio, a climb of fixed length, annealings until the deadline."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.errors import DoesNotFitError, TimeLimitError
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.offline.anneal import Annealing, alike
from coop_plan.planner.offline.resequence import Resequencing
from coop_plan.planner.offline.search import RULES, Search
from coop_plan.planner.online.methods import run_coop
from coop_plan.planner.online.run import OnlineRun

FEWEST_STEPS, MOST_STEPS = 20, 500
CLIMB_OPS = 100_000
"""The climb's length: this many simulated ops in all."""

WEIGHTS_SHARE = 0.25
"""Share of the time for annealing the weights, before the sequence."""


class CoopOffline:
    """The method on one request, for those who ask for more than one plan."""

    def __init__(
        self, problem: Problem, request: Request, rules: Sequence[tuple[float, bool]] = RULES
    ) -> None:
        self.problem = problem
        self.request = request
        self.search = Search(problem, request, rules)
        self._online: OnlineRun | None = None

    def begin(self) -> None:
        """What the method does on its request."""
        search, request = self.search, self.request
        search.portfolio()
        if search.best.found is None:
            search.place_the_unplaced()
        if search.best.found is not None and request.any_schedule:
            return
        with contextlib.suppress(DoesNotFitError, TimeLimitError):
            self._online = run_coop(self.problem, replace(request, progress=None, off=frozenset()))
        if search.best.found is not None:
            steps = CLIMB_OPS // max(1, self.problem.op_count)
            search.climb(min(MOST_STEPS, max(FEWEST_STEPS, steps)))
            search.place_the_unplaced()
        if request.deadline is not None:
            self.improve(request.deadline)

    @cached_property
    def _alike(self) -> Ints:
        return alike(self.problem, self.search.arrays)

    def improve(self, deadline: float, enough: Callable[[], bool] = lambda: False) -> None:
        """
        Look for better plans than the kernel's best, until the deadline or `enough`.

        The deadline is a `time.monotonic` value (s).
        """
        search = self.search
        search.request = replace(search.request, deadline=deadline)

        def done() -> bool:
            return enough() or search.best.cost_us <= self.problem.base_cost_us

        now = time.monotonic()
        if search.best.found is None or now >= deadline or done():
            return
        Annealing(search, self._alike, now + WEIGHTS_SHARE * (deadline - now)).run(done)
        Resequencing(search, deadline).run(done)

    def solution(self) -> Solution:
        """
        The cheapest schedule so far.

        Raises:
            DoesNotFitError: there is none.
        """
        best, online = self.search.best, self._online
        if best.found is not None and (online is None or best.cost_us <= online.cost_us):
            return self.search.solution()
        if online is None:
            raise DoesNotFitError(self.search.failed_op)
        return Solution(online.placed)


def solve_coop_offline(
    problem: Problem, request: Request, rules: Sequence[tuple[float, bool]] = RULES
) -> Solution:
    """The cheapest schedule found that fits; time until `request.deadline` goes into annealing."""
    method = CoopOffline(problem, request, rules)
    method.begin()
    return method.solution()
