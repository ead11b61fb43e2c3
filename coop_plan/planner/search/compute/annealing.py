"""Simulated annealing of the sequence itself: the last phase of coop-offline and auto.

The Metropolis search (`planner.search.compute.metropolis`) looks for cheaper sequences within the
arena. Candidates may exceed it at a penalty, which grows as long as they do. First runs may leave
program order, as in OLLA (Steiner et al., 2022, section 3) and Moccasin (Bartan et al., ICML 2023,
section 2), unless the switch "reorder" is off. Kirkpatrick et al., Optimization by Simulated
Annealing, Science 1983.
"""

import contextlib
import math
import time
from collections.abc import Callable

import numpy as np

from coop_plan.planner.core.arrays import Ints, to_program
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule
from coop_plan.planner.heuristic.portfolio import Candidate, Portfolio
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.placement.layout import WORK, fit
from coop_plan.planner.search.compute.metropolis import metropolis
from coop_plan.planner.search.compute.params import MoveParams
from coop_plan.planner.search.compute.sequence import (
    current_sequence,
    new_state,
    set_sequence,
)

MIN_SAVING = 1e-4
"""Least saving, as a share of the incumbent's cost, for which a layout is tried."""

START_DIVISOR = 3
"""Divisor of the steps of searches that start from a known schedule."""

PENALTY = 5.0
"""Least penalty weight, in base costs per unit of memory excess."""


def fixed_length(events: int, effort: float, divisor: int = 1) -> tuple[int, float]:
    """Steps of an annealing without a deadline, over `divisor`, and its initial temperature.

    A step's time grows with the square root of the events. So the steps times that root are at most
    `effort`. With fewer than 20 steps an event the annealing begins colder, since they would not
    undo the moves of a high temperature. It is in mean costs of an op.
    """
    least, most = min(28_000, 400 * events), int(effort / math.sqrt(events))
    steps = max(1, min(max(least, 25 * events), most) // divisor)
    return steps, 0.4 * min(1.0, steps / events / 20.0)


class SequenceAnnealing:
    """Improves the incumbent of a portfolio, starting from `sequence`.

    `run` ends at `deadline`, a `time.monotonic` value (s); the other phases end after fixed numbers
    of steps. With `few_repairs` of a candidate, as for small graphs: most there cannot be repaired
    at all. On larger graphs it would miss smaller arenas.
    """

    def __init__(
        self,
        portfolio: Portfolio,
        sequence: Ints,
        deadline: float = math.inf,
        *,
        few_repairs: bool = False,
    ) -> None:
        self.portfolio = portfolio
        self.feasible = sequence  # last sequence within the limit
        self.deadline = deadline
        self.random = np.random.default_rng(portfolio.request.seed)
        max_events = 2 * sequence.size + 2000  # of a sequence
        self.program = to_program(portfolio.arrays)
        moves = MoveParams(max_repairs=3) if few_repairs else MoveParams()
        if "reorder" in portfolio.request.off:
            moves = moves._replace(first_run_chance=0.0)
        self.state = new_state(portfolio.problem, max_events, moves)
        self.pace = 1000.0  # steps a second, before a measurement
        self.layout_seconds = 0.0
        self.layout_work = WORK
        self.limit = portfolio.request.arena_bytes  # on live bytes

    def run(self, enough: Callable[[], bool]) -> None:
        """Anneal until the deadline or until `enough` returns True."""
        portfolio, state = self.portfolio, self.state
        set_sequence(state, self.feasible)
        base = portfolio.problem.base_cost_us
        temperature = 0.4 * base / portfolio.problem.op_count
        penalty = PENALTY
        chunks = infeasible_streak = 0
        begin = time.monotonic()
        while (now := time.monotonic()) < self.deadline and not (chunks % 64 == 0 and enough()):
            cooled = ((self.deadline - now) / (self.deadline - begin)) ** 2
            steps = max(1, int(0.01 * self.pace))  # of 10 ms, about
            cost, excess = self._search(steps, temperature * cooled, penalty * base)
            # Steps a second, as a moving average.
            self.pace += 0.2 * (steps / max(time.monotonic() - now, 1e-6) - self.pace)
            if excess > 0:
                penalty *= 1.01
                infeasible_streak += 1
                if infeasible_streak > 50:  # chunks
                    set_sequence(state, self.feasible)
            else:
                infeasible_streak = 0
                self.feasible = current_sequence(state)
                penalty = max(PENALTY, penalty / 1.007)
                # Layouts take at most 0.3 of the time, less while the temperature is high.
                saves = cost < portfolio.best.cost_us * (1 - MIN_SAVING)
                allowed_seconds = 0.3 * (1 - cooled) * (time.monotonic() - begin)
                if saves and self.layout_seconds < allowed_seconds:
                    now = time.monotonic()
                    work = int(max(0.0, self.deadline - now) * 280e6)  # that takes a second, about
                    if not self._place(min(self.layout_work, work)):
                        self.layout_work = min(500_000_000, 2 * self.layout_work)
                    self.layout_seconds += time.monotonic() - now
            if chunks % 16 == 0:
                portfolio.report(None)
            chunks += 1

    def run_fixed_length(self, divisor: int = 1) -> None:
        """Anneal once, for a number of steps that depends on the events alone, over `divisor`."""
        portfolio, state = self.portfolio, self.state
        set_sequence(state, self.feasible)
        base = portfolio.problem.base_cost_us
        penalty, chunks, events = PENALTY, 40, max(1, self.feasible.size)  # checks of the result
        total, temperature = fixed_length(events, portfolio.params.annealing_effort, divisor)
        steps = -(-total // chunks)
        temperature *= base / portfolio.problem.op_count
        infeasible_streak = 0
        layouts = max(1, min(chunks, 100_000 // events))  # besides the last one
        for chunk in range(chunks):
            cooled = (1 - chunk / chunks) ** 2
            cost, excess = self._search(steps, temperature * cooled, penalty * base)
            if excess > 0:
                penalty *= 1.5  # chunks are few
                infeasible_streak += 1
                if infeasible_streak == 16:  # it hardly ever ends after so many
                    return
                continue
            infeasible_streak = 0
            self.feasible = current_sequence(state)
            last = chunk + 1 == chunks
            due = last or (chunk + 1) % -(-chunks // layouts) == 0
            due = due and cost < portfolio.best.cost_us * (1 - MIN_SAVING)
            # A layout is searched for the end, if it saves enough.
            worth = last and cost < portfolio.best.cost_us * (1 - 1e-3)
            if due and not self._place(WORK if worth else 0):
                self.limit -= int(4e-3 * self.limit)
            if portfolio.request.out_of_time():
                return

    def find_feasible(self) -> None:
        """Search, at zero temperature, for a sequence that fits, from one that does not."""
        state, events = self.state, max(1, self.feasible.size)
        set_sequence(state, self.feasible)
        penalty = 50.0 * self.portfolio.problem.base_cost_us  # no cost matters before it fits
        steps, most_layouts, chunks = min(10_000, 100 * events), 3, 20
        if self.portfolio.request.larger is not None:
            steps, most_layouts = steps // START_DIVISOR, 1
        layouts = stalled = 0
        least_excess = math.inf
        for _ in range(chunks):
            _, excess = self._search(-(-steps // chunks), 0.0, penalty)
            if excess == 0:
                layouts += 1
                if self._place(WORK) or layouts == most_layouts:
                    return
            stalled = 0 if excess < least_excess or excess == 0 else stalled + 1
            least_excess = min(least_excess, excess)
            if stalled == 6 or self.portfolio.request.out_of_time():
                break
        self.portfolio.offer(self._candidate())

    def _search(self, steps: int, temperature: float, penalty: float) -> tuple[float, float]:
        seed = int(self.random.integers(1 << 31))
        return metropolis(self.program, self.state, steps, self.limit, temperature, penalty, seed)

    def _candidate(self) -> Candidate:
        """The stored sequence as a candidate of the portfolio."""
        return self.portfolio.candidate_of(current_sequence(self.state))

    def _place(self, work: int) -> bool:
        """Make the stored sequence the incumbent if it has a layout; returns if it has.

        `work` is the layout search effort if the greedy layout does not fit.
        """
        portfolio, arena = self.portfolio, self.portfolio.request.arena_bytes
        found = self._candidate()
        alignment = portfolio.problem.alignment
        placement = fit(found.blocks, alignment, arena, work=work)
        if placement.peak <= arena:
            portfolio.keep(found, placement.offsets)
        return placement.peak <= arena


def reordered(
    problem: Problem,
    sequence: Ints,
    cost_us: float,
    request: Request,
    bound_us: Callable[[], float] | None = None,
) -> PlacedSchedule | None:
    """A schedule of default variants in any order that costs less than `cost_us`; None if none is
    found.

    Starts from `sequence` and ends at the request's deadline, or if the cost reaches the lower
    bound `bound_us` (by default every op once). Returns None, too, if the sequence reruns an op
    that accesses overwritten tensors.
    """
    assert request.deadline is not None
    runs = np.bincount(sequence, minlength=problem.op_count)
    if any(problem.touches_overwritten(op) for op in np.flatnonzero(runs > 1).tolist()):
        return None
    portfolio = Portfolio(problem, request)
    portfolio.best.cost_us = cost_us
    bound = bound_us or (lambda: problem.work_us)
    search = SequenceAnnealing(portfolio, sequence, request.deadline)
    with contextlib.suppress(KeyboardInterrupt):  # returns the best so far
        search.run(lambda: portfolio.best.cost_us * (1 - MIN_SAVING) <= bound())
    return None if portfolio.best.found is None else portfolio.solution().placed


def cheaper(problem: Problem, found: Solution, other: PlacedSchedule | None) -> Solution:
    """The cheaper of a solution in program order and a schedule in any order."""
    if other is None or other.cost_us >= found.placed.cost_us:
        return found
    bound, model = found.lower_bound_us, found.bound_model
    if bound is not None and other.cost_us < bound:  # the bound holds for program order only
        bound, model = problem.floor_us, "any"
    return Solution(other, lower_bound_us=bound, bound_model=model)
