"""
The joint search: simulated annealing of sequences of runs with marks of what is fetched.

It starts from schedules that only recompute, for the arena and for more, and from the program as it
is; what it returns costs less than it was told. Too much memory is allowed on the way, at a price
that is low at first, so that room is made where it costs least, and rises as long as it is used.
Simulated annealing after Kirkpatrick et al., Optimization by Simulated Annealing, Science 1983.
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
from coop_plan.planner.search.makespan.metropolis import measured, metropolis_search
from coop_plan.planner.search.makespan.params import DEFAULTS, JointParams
from coop_plan.planner.search.makespan.sequence import (
    AHEAD,
    current_sequence,
    set_sequence,
    start,
    to_closed_program,
    to_events,
)


class JointSearch:
    """
    Looks for a schedule that costs less than `limit_us` (µs) and fits the arena and the host.

    Each of `starts`, which are sequences, is annealed for a while, and what is best by then again.
    `request.any_schedule` ends it with the first schedule that fits.
    """

    def __init__(
        self,
        problem: Problem,
        request: Request,
        starts: list[Ints],
        limit_us: float,
        params: JointParams = DEFAULTS,
    ) -> None:
        self.problem, self.request, self.params = problem, request, params
        self.program = to_closed_program(problem)
        self.starts = starts
        self.cost_us = limit_us
        self.placed: PlacedSchedule | None = None
        self.sequence: Ints | None = None
        self.capacity = float(request.arena_bytes)
        self.host = -1 if problem.host_budget is None else problem.host_budget
        self.failed = 0  # layouts of the annealing at hand
        self.seconds = 0.0  # for its layouts
        self.random = np.random.default_rng(request.seed)
        self.events = events = max(1, *(sequence.size for sequence in starts))
        room = params.room_factor * events + params.room
        self.state = start(problem, self.program, room, params.moves)
        self.steps = min(params.events // events, params.steps + params.steps_per_event * events)
        if request.any_schedule:
            self.steps //= params.hurried
        self.chunk = max(1, min(params.chunk_events // events, self.steps // params.chunks))

    def run(self, deadline: float | None, enough: Callable[[], bool]) -> None:
        """
        Look for better schedules until the deadline (a `time.monotonic` value, s) or `enough`.

        Without a deadline, for as many steps as the parameters say. Where there is time for more,
        it is searched several times: where annealings end differs more than by their length.
        """
        if deadline is None:
            self._search(None, enough)
            return
        begin = time.monotonic()
        events = (deadline - begin) * self.params.events_per_second
        times = int(events / max(1, self.steps * self.events))
        count = min(max(1, times), self.params.searches)
        for number in range(count):
            if enough():
                return
            self._search(begin + (number + 1) / count * (deadline - begin), enough, number)

    def _search(self, deadline: float | None, enough: Callable[[], bool], number: int = 0) -> None:
        """
        Anneal each start, by either rule for fetches in turn, and what is best by then again.

        Of several searches each second one is hotter.
        """
        begin, params, turn = time.monotonic(), self.params, self.request.seed + number
        hotter = params.hotter[turn // 2 % len(params.hotter)]
        first, last = len(self.starts), len(params.last_temperatures)
        starts = self.starts * 2 if first == 1 else self.starts
        rounds: list[tuple[Ints | None, float, float]] = [
            *((sequence, params.start_share / len(starts), 1.0) for sequence in starts),
            *(
                (None, (1 - params.start_share) / last, temperature)
                for temperature in params.last_temperatures
            ),
        ]
        ends: list[tuple[float, int, Ints, int]] = []
        spent = 0.0
        for lap, (sequence, share, temperature) in enumerate(rounds):
            spent += share
            until = None if deadline is None else begin + spent * (deadline - begin)
            ahead = (lap + turn) % 2
            if sequence is None:
                *_, sequence, ahead = min(ends, key=lambda end: end[:2])
            self.state.flow[AHEAD] = ahead
            value, end = self._anneal(sequence, share, temperature * hotter, until, enough)
            ends.append((value, lap, end, ahead))
        cost, _, end, ahead = min(ends, key=lambda end: end[:2])
        if cost < self.cost_us and not enough():
            self.state.flow[AHEAD] = ahead
            self._place(end, params.last_work * WORK)

    def _anneal(
        self,
        sequence: Ints,
        share: float,
        temperature: float,
        deadline: float | None,
        enough: Callable[[], bool],
    ) -> tuple[float, Ints]:
        """Cool down from a sequence; the value (µs) and the sequence at which that ends."""
        params, state, begin = self.params, self.state, time.monotonic()
        base = self.problem.base_cost_us or 1.0  # no cost is no scale
        temperature *= params.temperature * base / self.problem.op_count
        penalty_growth = 1.0
        steps = int(share * self.steps)
        done = infeasible_streak = 0
        set_sequence(state, sequence)
        fits: tuple[float, Ints] | None = None
        self.failed, self.seconds = 0, 0.0
        cost, over = measured(self.program, state, int(self.capacity), self.host)
        while not self.at_the_floor() and not enough():
            if deadline is None:
                left = 1.0 - done / max(1, steps)
            else:
                left = (deadline - time.monotonic()) / max(1e-9, deadline - begin)
            firmness = 1.0 if self.request.any_schedule else min(1.0, (1.0 - left) / params.softly)
            penalty = params.soft ** (1.0 - firmness) * params.penalty**firmness * penalty_growth
            if left <= 0 or (self.placed is not None and self.request.any_schedule):
                break
            cost, over = metropolis_search(
                self.program,
                state,
                self.chunk,
                int(self.capacity),
                self.host,
                temperature * left**params.cooling,
                penalty * base,
                int(self.random.integers(1 << 31)),
            )
            done += self.chunk
            if over > 0:
                if firmness == 1.0:
                    penalty_growth *= params.steepest if fits is None else params.penalty_growth
                infeasible_streak += firmness == 1.0
                if infeasible_streak > params.patience and fits is not None:
                    set_sequence(state, fits[1])
                    infeasible_streak = 0
                continue
            infeasible_streak = 0
            penalty_growth = max(1.0, penalty_growth / params.penalty_decay)
            if fits is None or cost < fits[0]:
                fits = cost, current_sequence(state)
            if cost < self.cost_us * (1 - params.worth_placing) and (
                self.failed < params.layouts
                if deadline is None
                else self.seconds <= params.layout_share * (time.monotonic() - begin)
            ):
                self._place(current_sequence(state), WORK)
            self._report()
        if fits is None:
            return cost + params.penalty * base * over, current_sequence(state)
        if fits[0] < self.cost_us:
            self._place(fits[1], WORK)
        return fits

    def at_the_floor(self) -> bool:
        """True if no schedule of default variants costs less: no recompute, no stall."""
        return self.cost_us <= self.problem.base_cost_us * (1 + 1e-9)

    def _place(self, sequence: Ints, work: int) -> None:
        """Keep a sequence if it has a layout, found with so much work; else plan within less."""
        problem, arena, params = self.problem, self.request.arena_bytes, self.params
        begin = time.monotonic()
        set_sequence(self.state, sequence)
        measured(self.program, self.state, int(self.capacity), self.host)
        schedule = Schedule.of_events(problem, *to_events(self.state))
        if schedule.cost_us >= self.cost_us:
            return
        layout = lay_out(schedule, arena, work=0)
        if layout.placed.arena_bytes > arena:
            layout = lay_out(schedule, arena, work=work, order_hint=layout.placement.order)
        fits = layout.placed.arena_bytes <= arena
        if fits and problem.host_budget is not None:
            fits = lay_out_host(schedule, problem.host_budget).arena_bytes <= problem.host_budget
        if fits:
            self.cost_us, self.placed, self.sequence = schedule.cost_us, layout.placed, sequence
            self.capacity = min(self.capacity * params.looser, float(arena))
        else:
            self.failed += 1
            over = layout.placed.arena_bytes / max(1, arena) if self.placed is None else 1.0
            self.capacity /= max(params.tighter, over)
        self.seconds += time.monotonic() - begin

    def _report(self) -> None:
        if self.request.progress is not None and self.placed is not None:
            overhead = self.cost_us / max(self.problem.base_cost_us, 1e-12) - 1
            message = f"recomputes and transfers: overhead {overhead:.2%}"
            self.request.progress(Progress(message, overhead=overhead))


def run_beside(
    searches: Sequence[JointSearch], deadline: float | None, enough: Callable[[], bool]
) -> JointSearch:
    """
    Let searches run in threads of their own; the one whose schedule is the cheapest.

    Only the first asks whether it is `enough`, which is then so for all.
    """
    first, *others = searches
    over = Event()

    def all_enough() -> bool:
        if enough():
            over.set()
        return over.is_set()

    with ThreadPoolExecutor(max(1, len(others))) as pool:
        try:
            running = [pool.submit(search.run, deadline, over.is_set) for search in others]
            first.run(deadline, all_enough)
            if first.at_the_floor():
                over.set()
        except BaseException:
            over.set()
            raise
        for search in running:
            search.result()
    return min(searches, key=lambda search: search.cost_us)
