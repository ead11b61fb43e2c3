"""
The method coop-offline: portfolio, hill climbing of fixed length, annealing until the deadline.

Where there is a link to the host, the joint search of recomputes and transfers
(`planner.search.makespan`) goes on from there; what it finds counts only if it costs less.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.errors import DoesNotFitError, TimeLimitError
from coop_plan.planner.core.jit import usable_cpus
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule, Schedule
from coop_plan.planner.heuristic.hill_climb import hill_climb
from coop_plan.planner.heuristic.params import DEFAULTS, CoopOfflineParams
from coop_plan.planner.heuristic.portfolio import Portfolio
from coop_plan.planner.heuristic.weight_annealing import Annealing, repeated_groups
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.online.methods import run_coop
from coop_plan.planner.online.run import OnlineRun, TooDearError
from coop_plan.planner.search.compute.annealing import OrderAnnealing
from coop_plan.planner.search.makespan.annealing import JointSearch, run_beside


class CoopOffline:
    """
    The method on one request, for those who ask for more than one plan.

    `processors` is how many it may use at once.
    """

    def __init__(
        self, problem: Problem, request: Request, params: CoopOfflineParams = DEFAULTS
    ) -> None:
        self.problem = problem
        self.request = request
        self.params = params
        self.portfolio = Portfolio(problem, request, params)
        self.processors = usable_cpus()
        self._online: OnlineRun | None = None
        self._swapped: PlacedSchedule | None = None
        self._links = "transfers" in problem.beyond_recomputation
        self._searches_orders = "walk" not in request.off
        self._sequence: Ints | None = None
        self._joint_searches = 0

    def begin(self) -> None:
        """Run the method on its request: portfolio, hill climbing, annealing until the deadline."""
        portfolio, request = self.portfolio, self.request
        portfolio.sweep()
        if portfolio.best.found is None:
            portfolio.place_the_unplaced()
        if not self._links:
            self._find_feasible()
        if request.any_schedule:
            if portfolio.best.found is None and self._links:
                self._search_jointly(request.deadline)
                self._find_feasible()
            if portfolio.best.found is not None or self._swapped is not None:
                return
        with contextlib.suppress(DoesNotFitError, TimeLimitError, TooDearError):
            quiet = replace(request, progress=None, off=frozenset())
            self._online = run_coop(self.problem, quiet, cost_limit=portfolio.best.cost_us)
        if portfolio.best.found is not None:
            hill_climb(portfolio)
            portfolio.place_the_unplaced()
            if request.deadline is None and self._searches_orders:
                OrderAnnealing(portfolio, portfolio.best.found.run.ops).run_fixed_length()
        if request.deadline is not None:
            self.improve(request.deadline)
        elif self._links:
            self._search_jointly(None)  # a search as well
        if self._links:
            self._find_feasible()

    def _find_feasible(self) -> None:
        """Search a sequence that fits from the run of the lowest peak, if none was found yet."""
        portfolio = self.portfolio
        found = portfolio.best.found is not None or self._swapped is not None
        if found or not self._searches_orders or self.request.out_of_time():
            return
        lean = portfolio.leanest
        ops = np.arange(self.problem.op_count) if lean is None else lean.run.ops
        OrderAnnealing(portfolio, ops).find_feasible()

    @cached_property
    def _repeated_groups(self) -> Ints:
        return repeated_groups(self.problem, self.portfolio.arrays)

    def improve(self, deadline: float, enough: Callable[[], bool] = lambda: False) -> None:
        """
        Look for better plans than the portfolio's and the climb's, until the deadline or `enough`.

        The deadline is a `time.monotonic` value (s).
        """
        portfolio = self.portfolio
        portfolio.request = replace(portfolio.request, deadline=deadline)

        worth = min(self.params.annealing.worth_placing, self.params.order_annealing.worth_placing)

        def done() -> bool:
            # What saves less is not placed, and no run costs less than every op once.
            return enough() or portfolio.best.cost_us * (1 - worth) <= self.problem.base_cost_us

        now = time.monotonic()
        joint = self.params.joint_share if self._links else 0.0
        if portfolio.best.cost_us > self._cost_us * (1 + self.params.hopeless):
            joint = 1.0
        until = now + (1 - joint) * (deadline - now)
        if portfolio.best.found is not None and now < until and not done():
            weights = now + self.params.weights_share * (until - now)
            Annealing(
                portfolio, self._repeated_groups, weights if self._searches_orders else until
            ).run(done)
            if self._searches_orders:
                OrderAnnealing(portfolio, portfolio.best.found.run.ops, until).run(done)
        if self._links and time.monotonic() < deadline and not done():
            self._search_jointly(deadline, enough)

    def _search_jointly(
        self, deadline: float | None, enough: Callable[[], bool] = lambda: False
    ) -> None:
        """
        Look for a schedule with transfers that costs less than the best so far.

        With a deadline on `processors` at once: where searches end differs, the cheapest counts.
        """
        starts = self._starts() + ([] if self._sequence is None else [self._sequence])
        at_once = min(self.processors, self.params.joint.searches)
        searches = [
            JointSearch(
                self.problem,
                replace(self.request, seed=self.request.seed + self._joint_searches + number),
                starts,
                self._cost_us,
                self.params.joint,
            )
            for number in range(1 if deadline is None else at_once)
        ]
        self._joint_searches += len(searches)
        search = run_beside(searches, deadline, enough)
        if search.placed is not None:
            self._swapped, self._sequence = search.placed, search.sequence

    def _starts(self) -> list[Ints]:
        """
        The program, the best sequence that fits, and sequences of recomputes alone in between.

        Those need more than the arena, for the joint search to make room by transfers.
        """
        starts = [np.arange(self.problem.op_count)]
        if self.portfolio.best.found is not None:
            starts.append(self.portfolio.best.found.run.ops)
        return starts + self._between

    @cached_property
    def _between(self) -> list[Ints]:
        portfolio, arena = self.portfolio, self.request.arena_bytes
        everything = Schedule.of(self.problem, np.arange(self.problem.op_count)).blocks().live
        rules = range(len(portfolio.settings))
        found: list[Ints] = []
        for share in self.params.between if everything > arena else ():
            budget = int(arena + share * (everything - arena))
            found += [run.ops for _, _, run in portfolio.runs(budget, rules, 1)]
        return found

    @property
    def _cost_us(self) -> float:
        """The cost of the best schedule so far, µs."""
        costs = [self.portfolio.best.cost_us]
        costs += [] if self._online is None else [self._online.cost_us]
        costs += [] if self._swapped is None else [self._swapped.cost_us]
        return min(costs)

    def solution(self) -> Solution:
        """
        The cheapest schedule so far.

        Raises:
            DoesNotFitError: there is none.
            TimeLimitError: there was no time to find one.
        """
        portfolio, online = self.portfolio, self._online
        best = portfolio.best
        if self._swapped is not None and self._swapped.cost_us <= self._cost_us:
            return Solution(self._swapped)
        if best.found is not None and (online is None or best.cost_us <= online.cost_us):
            return self.portfolio.solution()
        if online is None:
            if portfolio.runner.cut_short:
                self.request.check_time()
            raise DoesNotFitError(self.portfolio.failed_op)
        return Solution(online.placed)


def solve_coop_offline(
    problem: Problem, request: Request, params: CoopOfflineParams = DEFAULTS
) -> Solution:
    """The cheapest schedule found that fits; time until `request.deadline` goes into annealing."""
    method = CoopOffline(problem, request, params)
    method.begin()
    return method.solution()


def in_any_order(problem: Problem, request: Request) -> PlacedSchedule | None:
    """The schedule of recomputes alone, in its own time; None where it finds none that fits."""
    with contextlib.suppress(DoesNotFitError):
        alone, quiet = replace(problem, host_budget=0), replace(request, deadline=None)
        return solve_coop_offline(alone, quiet).placed
    return None
