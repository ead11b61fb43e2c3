"""Simulated annealing of sequences of runs and prefetch markers.

Starts are schedules that only recompute, for the arena and for more memory, and the program itself.
The result costs less than a given limit. Candidates may exceed the memory at a penalty that is low
at first, so that the cheapest evictions come first, and grows as long as they do. Kirkpatrick et
al., Optimization by Simulated Annealing, Science 1983.
"""

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
from coop_plan.planner.search.compute.annealing import PENALTY
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


class MakespanSearch:
    """Searches for a schedule that costs less than `limit_us` (µs) and fits the arena and the host.

    Anneals each sequence of `starts`, then the best result again. With `request.any_schedule` the
    search ends at the first schedule that fits.
    """

    def __init__(
        self, problem: Problem, request: Request, starts: list[Ints], limit_us: float
    ) -> None:
        self.problem, self.request = problem, request
        self.program = to_closed_program(problem)
        self.starts = starts
        self.cost_us = limit_us
        self.placed: PlacedSchedule | None = None
        self.sequence: Ints | None = None
        self.closest: PlacedSchedule | None = None  # too large for the arena, of least memory
        self.capacity = float(request.arena_bytes)
        self.failed_layouts = 0  # in the current annealing
        self.layout_seconds = 0.0
        self.random = np.random.default_rng(request.seed)
        self.events = events = max(1, *(sequence.size for sequence in starts))
        self.state = new_state(problem, self.program, 3 * events + 2000, MOVES)
        self.steps = min(100_000_000 // events, 8_000 + 560 * events)
        if request.any_schedule:
            self.steps //= 10
        # Steps between two checks of the result.
        self.chunk = max(1, min(400_000 // events, self.steps // 100))

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
        times = int(events / max(1, self.steps * self.events))
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
        factor = (1.0, 3.0)[variation // 2 % 2]
        starts = self.starts * 2 if len(self.starts) == 1 else self.starts
        # (sequence or None for the best so far, share of the search, temperature)
        rounds: list[tuple[Ints | None, float, float]] = [
            *((sequence, 0.55 / len(starts), 1.0) for sequence in starts),
            *((None, (1 - 0.55) / 2, temperature) for temperature in (1.0, 0.3)),
        ]
        ends: list[tuple[float, int, Ints, bool]] = []
        done = 0.0
        for index, (sequence, share, temperature) in enumerate(rounds):
            done += share
            until = None if deadline is None else begin + done * (deadline - begin)
            look_ahead = (index + variation) % 2 == 1
            if sequence is None:
                *_, sequence, look_ahead = min(ends, key=lambda end: end[:2])
            self.state.flow.look_ahead = look_ahead
            value, end = self._anneal(sequence, share, temperature * factor, until, enough)
            ends.append((value, index, end, look_ahead))
        cost, _, end, look_ahead = min(ends, key=lambda end: end[:2])
        if cost < self.cost_us and not enough():
            self.state.flow.look_ahead = look_ahead
            self._place(end, 10 * WORK)
        if self.request.any_schedule and self.placed is None:
            for _, _, end, look_ahead in ends:
                self.state.flow.look_ahead = look_ahead
                self._keep_closest(lay_out(self._schedule(end), work=0).placed)

    def _anneal(
        self,
        sequence: Ints,
        share: float,
        temperature: float,
        deadline: float | None,
        enough: Callable[[], bool],
    ) -> tuple[float, Ints]:
        """Anneal from a sequence; returns the energy (µs) and the sequence of the best end."""
        state, begin = self.state, time.monotonic()
        base = self.problem.base_cost_us or 1.0  # no cost is no scale
        temperature *= 0.15 * base / self.problem.op_count
        penalty_factor = 1.0
        steps = int(share * self.steps)
        done = infeasible_streak = 0
        set_sequence(state, sequence)
        feasible: tuple[float, Ints] | None = None
        self.failed_layouts, self.layout_seconds = 0, 0.0
        cost, excess = evaluate_sequence(self.program, state, int(self.capacity))
        while not self.at_lower_bound() and not enough():
            if deadline is None:
                left = 1.0 - done / max(1, steps)
            else:
                left = (deadline - time.monotonic()) / max(1e-9, deadline - begin)
            # The penalty weight grows geometrically from 1e-3 to `PENALTY` in the first half: only
            # nearly free evictions pay at first. Then it grows with each infeasible chunk.
            ramp = 1.0
            if not self.request.any_schedule:
                ramp = min(1.0, (1.0 - left) / 0.5)
            penalty = 1e-3 ** (1.0 - ramp) * PENALTY**ramp
            penalty *= penalty_factor
            if left <= 0 or (self.placed is not None and self.request.any_schedule):
                break
            at, seed = temperature * left**2, int(self.random.integers(1 << 31))
            cost, excess = metropolis(
                self.program, state, self.chunk, int(self.capacity), at, penalty * base, seed
            )
            done += self.chunk
            if excess > 0:
                if ramp == 1.0:
                    penalty_factor *= 1.01 if feasible is not None else 1.3
                    infeasible_streak += 1
                if infeasible_streak > 50 and feasible is not None:
                    set_sequence(state, feasible[1])
                    infeasible_streak = 0
                continue
            infeasible_streak = 0
            penalty_factor = max(1.0, penalty_factor / 1.007)
            if feasible is None or cost < feasible[0]:
                feasible = cost, current_sequence(state)
            # Layouts are tried for enough saved, in a share of the time or until too many failed.
            if cost < self.cost_us * (1 - 1e-3) and (
                self.failed_layouts < 10
                if deadline is None
                else self.layout_seconds <= 0.2 * (time.monotonic() - begin)
            ):
                self._place(current_sequence(state), WORK)
            self._report()
        if feasible is None:
            return cost + PENALTY * base * excess, current_sequence(state)
        if feasible[0] < self.cost_us:
            self._place(feasible[1], WORK)
        return feasible

    def consider(self, sequence: Ints) -> None:
        """Keep a sequence as it is, if it fits and costs less than what was found before."""
        self._place(sequence, WORK)

    def at_lower_bound(self) -> bool:
        """True if each op runs once without a stall: no schedule of default variants costs less."""
        return self.cost_us <= self.problem.base_cost_us * (1 + 1e-9)

    def _place(self, sequence: Ints, work: int) -> None:
        """Keep a sequence if a layout of effort `work` fits; else reduce the capacity."""
        arena, begin = self.request.arena_bytes, time.monotonic()
        schedule = self._schedule(sequence)
        if schedule.cost_us >= self.cost_us or not schedule.fits(arena):
            return
        layout = lay_out(schedule, arena, work=work)
        if layout.placed.arena_bytes <= arena and self._fits_host(schedule):
            self.cost_us, self.placed, self.sequence = schedule.cost_us, layout.placed, sequence
            self.capacity = min(self.capacity * 1.0005, float(arena))
        else:
            self._keep_closest(layout.placed)
            self.failed_layouts += 1
            self.capacity *= 1 - 4e-3
        self.layout_seconds += time.monotonic() - begin

    def _schedule(self, sequence: Ints) -> Schedule:
        """The schedule of a sequence, with the transfers that fit the capacity best."""
        set_sequence(self.state, sequence)
        evaluate_sequence(self.program, self.state, int(self.capacity))
        return Schedule.of_events(self.problem, *to_events(self.state))

    def _fits_host(self, schedule: Schedule) -> bool:
        budget = self.problem.host_budget
        return budget is None or lay_out_host(schedule, budget).arena_bytes <= budget

    def _keep_closest(self, placed: PlacedSchedule) -> None:
        """Keep a schedule that exceeds the arena if it needs less memory than those before."""
        least = np.inf if self.closest is None else self.closest.arena_bytes
        if placed.arena_bytes < least and self._fits_host(placed.schedule):
            self.closest = placed

    def _report(self) -> None:
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
