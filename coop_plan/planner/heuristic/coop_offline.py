"""The method coop-offline: portfolio, then annealing of the sequence until the deadline.

With a link to the host, the joint search of recomputes and transfers (`planner.search.makespan`)
continues from there; its result counts only if it costs less.
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
from coop_plan.planner.core.lifetimes import RUN
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule, Schedule
from coop_plan.planner.heuristic.params import DEFAULTS, CoopOfflineParams
from coop_plan.planner.heuristic.portfolio import Portfolio
from coop_plan.planner.keep_all import SMALL_PROBLEM_OPS
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.online.methods import run_coop
from coop_plan.planner.online.run import OnlineRun
from coop_plan.planner.search.compute.annealing import (
    MIN_SAVING,
    START_DIVISOR,
    SequenceAnnealing,
)
from coop_plan.planner.search.makespan.annealing import (
    MAX_SEARCHES,
    MakespanSearch,
    run_parallel,
)
from coop_plan.planner.search.makespan.sequence import to_sequence


class CoopOffline:
    """The method on one request, for callers that need more than one plan.

    `processors` is the number of searches to run at once.
    """

    def __init__(
        self, problem: Problem, request: Request, params: CoopOfflineParams = DEFAULTS
    ) -> None:
        self._has_link = "transfers" in problem.beyond_recomputation
        larger = request.larger
        if larger is not None and not self._has_link and (larger.schedule.do != RUN).any():
            request = replace(request, larger=None)  # `in_any_order` of a problem with transfers
        self.problem = problem
        self.request = request
        self.params = params
        self.portfolio = Portfolio(problem, request, params)
        self.processors = usable_cpus()
        self._online: OnlineRun | None = None
        self._transfer_plan: PlacedSchedule | None = None
        self._closest_transfers: PlacedSchedule | None = None
        self._searches_sequence = "walk" not in request.off
        self._best_sequence: Ints | None = None
        self._makespan_searches = 0

    def begin(self) -> None:
        """Run all phases on the request; with a deadline, improve until then."""
        portfolio, request = self.portfolio, self.request
        self._offer_start()
        self._offer_larger()
        # With a start, the search from there counts most.
        started = request.larger is not None
        if not started or portfolio.best.found is None:
            portfolio.sweep()
        if portfolio.best.found is None:
            portfolio.place_unplaced(1 if started else None)
        if portfolio.best.found is None and self._has_link:
            for _ in range(1 if started else 2):
                if self._transfer_plan is None:
                    self._search_makespan(None, request.out_of_time, any_schedule=True)
        self._find_feasible()
        if request.any_schedule and self._cost_us < np.inf:
            return
        # The whole joint search does not start from the short one, whose plans cost much more.
        short = self._transfer_plan, self._best_sequence
        self._transfer_plan = self._best_sequence = None
        self._makespan_searches = 0
        # Coop's run takes time in proportion to the square of the ops, and is rarely the cheapest.
        if self._cost_us == np.inf or self.problem.op_count <= self.params.coop_ops:
            with contextlib.suppress(DoesNotFitError, TimeLimitError):
                quiet = replace(request, progress=None, off=frozenset())
                self._online = run_coop(self.problem, quiet)
        if request.any_schedule:
            return
        if portfolio.best.found is not None:
            portfolio.place_unplaced(1 if started else None)
            if request.deadline is None and self._searches_sequence:
                self._anneal()
        if request.deadline is not None:
            self.improve(request.deadline)
        elif self._has_link:
            # On tiny graphs some seeds miss the best of few schedules.
            for _ in range(8 if self.problem.op_count <= 12 else 1):
                self._search_makespan(None)
        if short[0] is not None and short[0].cost_us < self._cost_us:
            self._transfer_plan, self._best_sequence = short

    def _anneal(self) -> None:
        """Anneal the incumbent's sequence for a fixed length, shorter with a larger schedule.

        That schedule has hardly free memory, so a step takes as many times longer as it has runs an
        op, and its layouts do, too. With many runs an op a step rarely saves anything.
        """
        found, divisor = self.portfolio.best.found, 1
        assert found is not None
        ops = found.run.ops
        if self.request.larger is not None:
            runs_per_op = max(1, ops.size // self.problem.op_count)
            divisor = START_DIVISOR * runs_per_op**2
        SequenceAnnealing(self.portfolio, ops).run(divisor=divisor)

    def _offer_start(self) -> None:
        """Make the request's start the first incumbent, if it fits and its order is allowed."""
        if self.request.start is None:
            return
        ops = np.array(self.request.start, dtype=np.int64)
        first = np.unique(ops, return_index=True)[1]
        if "reorder" in self.request.off and (np.diff(first) < 0).any():
            return
        self.portfolio.offer(self.portfolio.candidate_of(ops))
        self.portfolio.place_unplaced()

    def _offer_larger(self) -> None:
        """Make the request's larger schedule the first incumbent, if it is no larger after all."""
        known, portfolio = self.request.larger, self.portfolio
        if known is None or known.arena_bytes > self.request.arena_bytes:
            return
        if self._has_link:
            if known.problem is self.problem:
                self._transfer_plan, self._best_sequence = known, to_sequence(known.schedule)
            return
        found = portfolio.candidate_of(to_sequence(known.schedule))
        if found.has_blocks_of(known.schedule):
            offsets = (known.offset, known.workspace_offset[found.blocks.event])
            portfolio.keep(found, np.concatenate(offsets))
        else:  # of an online run, or with pairs that its layout does not use
            portfolio.offer(found)

    def _find_feasible(self) -> None:
        """If nothing fits, search for a feasible sequence from the start or the lowest peak."""
        portfolio = self.portfolio
        found = portfolio.best.found is not None or self._transfer_plan is not None
        if found or not self._searches_sequence or self.request.out_of_time():
            return
        start, run = self.request.larger, portfolio.lowest_peak
        if start is not None:
            if self._has_link:  # the joint search has started from there
                return
            ops = to_sequence(start.schedule)
        else:
            ops = np.arange(self.problem.op_count) if run is None else run.run.ops
        if self.problem.op_count <= SMALL_PROBLEM_OPS and not self._has_link:
            SequenceAnnealing(portfolio, ops, few_repairs=True).find_feasible()
            if self.request.any_schedule or portfolio.best.found is not None:
                return
        SequenceAnnealing(portfolio, ops).find_feasible()

    def improve(self, deadline: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Improve until the deadline (`time.monotonic`, s) or until `enough` returns True."""
        portfolio = self.portfolio
        portfolio.request = replace(portfolio.request, deadline=deadline)

        def done() -> bool:
            # No run costs less than each op once.
            return enough() or portfolio.best.cost_us * (1 - MIN_SAVING) <= self.problem.work_us

        now = time.monotonic()
        makespan_share = 0.75 if self._has_link else 0.0  # of the time
        if self._recompute_us > self._cost_us * 1.03:
            makespan_share = 1.0
        until = now + (1 - makespan_share) * (deadline - now)
        if portfolio.best.found is not None and self._searches_sequence and now < until:
            self._anneal_until(until, done)
        if self._has_link and time.monotonic() < deadline and not done():
            self._search_makespan(deadline, enough)

    def _anneal_until(self, until: float, done: Callable[[], bool]) -> None:
        """Anneal the incumbent's sequence, several times if the time suffices, by other seeds."""
        portfolio, params = self.portfolio, self.params
        found, left = portfolio.best.found, until - time.monotonic()
        assert found is not None
        ops = found.run.ops
        possible = left / (params.annealing_seconds_per_event * max(1, ops.size))
        runs = max(1, min(params.annealings, int(possible)))
        for number in range(runs):
            now = time.monotonic()
            portfolio.request = replace(portfolio.request, seed=self.request.seed + number)
            SequenceAnnealing(portfolio, ops).run(done, now + (until - now) / (runs - number))

    def _search_makespan(
        self,
        deadline: float | None,
        enough: Callable[[], bool] = lambda: False,
        *,
        any_schedule: bool = False,
    ) -> None:
        """Run the joint search from the best sequences; keeps a cheaper schedule with transfers.

        With a deadline, `processors` searches run in parallel and the cheapest result counts. With
        `any_schedule` a short search ends at the first schedule that fits.
        """
        request = replace(self.request, any_schedule=any_schedule)
        starts = self._makespan_starts()
        at_once = min(self.processors, MAX_SEARCHES)
        searches = [
            MakespanSearch(
                self.problem,
                replace(request, seed=request.seed + self._makespan_searches + number),
                starts,
                self._cost_us,
            )
            for number in range(1 if deadline is None else at_once)
        ]
        self._makespan_searches += len(searches)
        search = run_parallel(searches, deadline, enough)
        if search.placed is not None:
            self._transfer_plan, self._best_sequence = search.placed, search.sequence
        elif search.closest is not None:
            self._closest_transfers = search.closest

    def _makespan_starts(self) -> list[Ints]:
        """The program, the best sequences so far, and recompute plans for more than the arena.

        With `any_schedule` the request's larger schedule replaces them.
        """
        if self.request.larger is not None and self.request.any_schedule:
            return [to_sequence(self.request.larger.schedule)]
        starts = [np.arange(self.problem.op_count)]
        if self.portfolio.best.found is not None:
            starts.append(self.portfolio.best.found.run.ops)
        best = [] if self._best_sequence is None else [self._best_sequence]
        return starts + self._recompute_starts + best

    @cached_property
    def _recompute_starts(self) -> list[Ints]:
        """Recompute plans that need more than the arena, for transfers to make room."""
        portfolio, arena = self.portfolio, self.request.arena_bytes
        keep_all = Schedule.of(self.problem, np.arange(self.problem.op_count)).blocks().live
        rules = range(len(portfolio.settings))
        found: list[Ints] = []
        for share in (0.25, 0.5, 0.75) if keep_all > arena else ():
            budget = int(arena + share * (keep_all - arena))
            found += [run.ops for _, _, run in portfolio.runs(budget, rules, 1)]
        return found

    @property
    def _recompute_us(self) -> float:
        """Cost of the portfolio's best, µs: its sum of costs, unless ops may wait for launches."""
        best, device = self.portfolio.best, self.problem.device
        if best.found is None or device.is_host or not device.launch_us:
            return best.cost_us
        return Schedule.of(self.problem, best.found.run.ops).cost_us

    @property
    def _cost_us(self) -> float:
        """Cost of the best schedule so far, µs."""
        costs = [self._recompute_us]
        costs += [] if self._online is None else [self._online.cost_us]
        costs += [] if self._transfer_plan is None else [self._transfer_plan.cost_us]
        return min(costs)

    def solution(self) -> Solution:
        """The cheapest schedule so far.

        Raises:
            DoesNotFitError: no schedule was found.
            TimeLimitError: the deadline ended the search before a schedule was found.
        """
        portfolio, online = self.portfolio, self._online
        best = portfolio.best
        if self._transfer_plan is not None and self._transfer_plan.cost_us <= self._cost_us:
            return Solution(self._transfer_plan)
        if best.found is not None and (online is None or self._recompute_us <= online.cost_us):
            return self.portfolio.solution()
        if online is None:
            if portfolio.runner.timed_out:
                self.request.check_time()
            closest = portfolio.closest(), self._closest_transfers
            least = min(filter(None, closest), key=lambda placed: placed.arena_bytes, default=None)
            raise DoesNotFitError(self.portfolio.failed_op, least)
        return Solution(online.placed)


def solve_coop_offline(
    problem: Problem, request: Request, params: CoopOfflineParams = DEFAULTS
) -> Solution:
    """The cheapest schedule found that fits; searches until `request.deadline` if there is one."""
    method = CoopOffline(problem, request, params)
    method.begin()
    return method.solution()


def in_any_order(problem: Problem, request: Request) -> PlacedSchedule | None:
    """The schedule with recomputes only, without a deadline; None if none fits."""
    with contextlib.suppress(DoesNotFitError):
        alone, quiet = replace(problem, host_budget=0), replace(request, deadline=None)
        return solve_coop_offline(alone, quiet).placed
    return None
