"""Annealing of sequences of runs and prefetch markers.

Starts are schedules that only recompute, for the arena and for more memory, and the program itself.
The result costs less than a given limit. The penalty of memory is low at first, so that the
cheapest evictions come first.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule, Schedule
from coop_plan.planner.method import Progress, Request
from coop_plan.planner.placement.layout import WORK, lay_out, lay_out_host
from coop_plan.planner.search.annealing import Annealing
from coop_plan.planner.search.compute.params import MoveParams
from coop_plan.planner.search.makespan.metropolis import evaluate_sequence, metropolis
from coop_plan.planner.search.makespan.sequence import (
    current_sequence,
    new_state,
    set_sequence,
    to_closed_program,
    to_events,
)

MOVES = MoveParams(
    recompute_chance=0.12, prefetch_chance=0.2, convert_chance=0.2, first_run_chance=0.0
)

MAX_SEARCHES = 60
"""Most searches within a time limit, one after another."""


class MakespanSearch(Annealing):
    """Searches for a schedule that costs less than `limit_us` (µs) and fits the arena and the host.

    Anneals each sequence of `starts`, then the best result again. With `request.any_schedule` the
    search ends at the first schedule that fits.
    """

    cost_us = math.inf

    def __init__(
        self, problem: Problem, request: Request, starts: list[Ints], limit_us: float
    ) -> None:
        super().__init__(problem, request)
        self.program = to_closed_program(problem)
        self.starts = starts
        self.cost_us = limit_us
        self.placed: PlacedSchedule | None = None
        self.sequence: Ints | None = None
        self.closest: PlacedSchedule | None = None  # too large for the arena, of least memory
        self.events = events = max(1, *(sequence.size for sequence in starts))
        self.state = new_state(problem, self.program, 3 * events + 2000, MOVES)
        self.length = min(100_000_000 // events, 8_000 + 560 * events)
        if request.any_schedule:
            self.length //= 10
        self.chunk = max(1, min(400_000 // events, self.length // 100))

    def load(self, sequence: Ints) -> None:
        set_sequence(self.state, sequence)

    def stored(self) -> Ints:
        return current_sequence(self.state)

    def steps(self, count: int, temperature: float, penalty: float) -> tuple[float, float]:
        limit, seed = int(self.limit), int(self.random.integers(1 << 31))
        return metropolis(self.program, self.state, count, limit, temperature, penalty, seed)

    def run(self, deadline: float | None, enough: Callable[[], bool]) -> None:
        """Search until the deadline (a `time.monotonic` value, s) or until `enough` returns True.

        Without a deadline there is one search of fixed length. With one there are as many as fit:
        results of independent searches differ more than those of longer ones.
        """
        if deadline is None:
            self._search(None, enough)
            return
        begin = time.monotonic()
        events = (deadline - begin) * 30e6  # that are simulated in this time, about
        times = int(events / max(1, self.length * self.events))
        count = min(max(1, times), MAX_SEARCHES)
        for number in range(count):
            if enough():
                return
            self._search(begin + (number + 1) / count * (deadline - begin), enough, number)

    def _search(self, deadline: float | None, enough: Callable[[], bool], number: int = 0) -> None:
        """Anneal each start, then the best result at lower temperatures; alternates `look_ahead`.

        The temperature factor depends on `number`, the number of the search: the best one depends
        on the graph.
        """
        begin, variation = time.monotonic(), self.request.seed + number
        factor = 0.15 * (1.0, 3.0)[variation // 2 % 2]
        any_schedule = self.request.any_schedule

        def done() -> bool:
            found = any_schedule and self.placed is not None
            return found or self.at_lower_bound() or enough()

        starts = self.starts * 2 if len(self.starts) == 1 else self.starts
        # (sequence or None for the best so far, share of the search, temperature)
        rounds: list[tuple[Ints | None, float, float]] = [
            *((sequence, 0.55 / len(starts), 1.0) for sequence in starts),
            *((None, (1 - 0.55) / 2, temperature) for temperature in (1.0, 0.3)),
        ]
        ends: list[tuple[float, int, Ints, bool]] = []
        part = 0.0
        for index, (sequence, share, temperature) in enumerate(rounds):
            part += share
            until = None if deadline is None else begin + part * (deadline - begin)
            look_ahead = (index + variation) % 2 == 1
            if sequence is None:
                *_, sequence, look_ahead = min(ends, key=lambda end: end[:2])
            self.state.flow.look_ahead = look_ahead
            length, first_penalty = int(share * self.length), 1.0 if any_schedule else 2e-4
            value, end = self.anneal(
                sequence, length, temperature * factor, done, until, first_penalty
            )
            ends.append((value, index, end, look_ahead))
        cost, _, end, look_ahead = min(ends, key=lambda end: end[:2])
        if cost < self.cost_us and not enough():
            self.state.flow.look_ahead = look_ahead
            self.place(end, 10 * WORK)
        if any_schedule and self.placed is None:
            for _, _, end, look_ahead in ends:
                self.state.flow.look_ahead = look_ahead
                self._keep_closest(lay_out(self._schedule(end), work=0).placed)

    def consider(self, sequence: Ints) -> None:
        """Keep a sequence as it is, if it fits and costs less than what was found before."""
        self.place(sequence, WORK)

    def at_lower_bound(self) -> bool:
        """True if each op runs once without a stall: no schedule of default variants costs less."""
        return self.cost_us <= self.problem.base_cost_us * (1 + 1e-9)

    def place(self, sequence: Ints, work: int) -> bool:
        arena = self.request.arena_bytes
        schedule = self._schedule(sequence)
        if schedule.cost_us >= self.cost_us or not schedule.fits(arena):
            return True  # a layout says nothing
        layout = lay_out(schedule, arena, work=work)
        if layout.placed.arena_bytes > arena or not self._fits_host(schedule):
            self._keep_closest(layout.placed)
            return False
        self.cost_us, self.placed, self.sequence = schedule.cost_us, layout.placed, sequence
        return True

    def _schedule(self, sequence: Ints) -> Schedule:
        """The schedule of a sequence, with the transfers that fit the capacity best."""
        set_sequence(self.state, sequence)
        evaluate_sequence(self.program, self.state, int(self.limit))
        return Schedule.of_events(self.problem, *to_events(self.state))

    def _fits_host(self, schedule: Schedule) -> bool:
        budget = self.problem.host_budget
        return budget is None or lay_out_host(schedule, budget).peak <= budget

    def _keep_closest(self, placed: PlacedSchedule) -> None:
        """Keep a schedule that exceeds the arena if it needs less memory than those before."""
        least = np.inf if self.closest is None else self.closest.arena_bytes
        if placed.arena_bytes < least and self._fits_host(placed.schedule):
            self.closest = placed

    def report(self) -> None:
        if self.request.progress is not None and self.placed is not None:
            overhead = self.cost_us / max(self.problem.base_cost_us, 1e-12) - 1
            message = f"recomputes and transfers: overhead {overhead:.2%}"
            self.request.progress(Progress(message, overhead=overhead))


def run_parallel(
    searches: Sequence[MakespanSearch], deadline: float | None, enough: Callable[[], bool]
) -> MakespanSearch:
    """Run searches in threads of their own; returns the one with the cheapest schedule.

    Only the first calls `enough`, which stops all of them.
    """
    first, *others = searches
    stop = Event()

    def stop_if_enough() -> bool:
        if enough():
            stop.set()
        return stop.is_set()

    with ThreadPoolExecutor(max(1, len(others))) as pool:
        try:
            running = [pool.submit(search.run, deadline, stop.is_set) for search in others]
            first.run(deadline, stop_if_enough)
            if first.at_lower_bound():
                stop.set()
        except BaseException:
            stop.set()
            raise
        for search in running:
            search.result()
    return min(searches, key=lambda search: search.cost_us)
