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
from dataclasses import replace

import numpy as np

from coop_plan.planner.core.arrays import Ints, to_program
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule
from coop_plan.planner.heuristic.portfolio import Candidate, Portfolio
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.placement.layout import WORK, WORK_PER_SECOND, fit
from coop_plan.planner.search.compute.metropolis import metropolis
from coop_plan.planner.search.compute.sequence import (
    add_margin,
    current_sequence,
    new_state,
    set_sequence,
)


class SequenceAnnealing:
    """Improves the incumbent of a portfolio, starting from `sequence`.

    `run` ends at `deadline`, a `time.monotonic` value (s); the other phases end after fixed numbers
    of steps.
    """

    def __init__(self, portfolio: Portfolio, sequence: Ints, deadline: float = math.inf) -> None:
        params = portfolio.params
        self.portfolio, self.params = portfolio, params.sequence_annealing
        self.feasible = sequence  # last sequence within the limit
        self.deadline = deadline
        self.random = np.random.default_rng(portfolio.request.seed)
        max_events = self.params.event_factor * sequence.size + self.params.extra_events
        self.program = to_program(portfolio.arrays)
        moves = params.moves
        if "reorder" in portfolio.request.off:
            moves = replace(moves, first_run_chance=0.0)
        self.state = new_state(portfolio.problem, max_events, moves)
        found = portfolio.best.found
        self.settings = portfolio.settings[0] if found is None else found.settings
        self.pace = self.params.initial_pace  # steps a second
        self.layout_seconds = 0.0
        self.layout_work = WORK
        self.limit = portfolio.request.arena_bytes  # on live bytes

    def run(self, enough: Callable[[], bool]) -> None:
        """Anneal until the deadline or until `enough` returns True."""
        params, portfolio, state = self.params, self.portfolio, self.state
        set_sequence(state, self.feasible)
        base = portfolio.problem.base_cost_us
        temperature = params.temperature * base / portfolio.problem.op_count
        penalty = params.penalty
        chunks = infeasible_streak = 0
        begin = time.monotonic()
        while (now := time.monotonic()) < self.deadline and not (
            chunks % params.check_chunks == 0 and enough()
        ):
            cooled = ((self.deadline - now) / (self.deadline - begin)) ** params.cooling
            steps = max(1, int(params.chunk_seconds * self.pace))
            cost, excess = self._search(steps, temperature * cooled, penalty * base)
            # Steps a second, as a moving average, so that a chunk takes about `chunk_seconds`.
            self.pace += params.pace_share * (steps / max(time.monotonic() - now, 1e-6) - self.pace)
            if excess > 0:
                penalty *= params.penalty_growth
                infeasible_streak += 1
                if infeasible_streak > params.patience:
                    set_sequence(state, self.feasible)
            else:
                infeasible_streak = 0
                self.feasible = current_sequence(state)
                penalty = max(params.penalty, penalty / params.penalty_decay)
                # Layouts take at most a share of the time, less of it while the temperature is
                # high.
                saves = cost < portfolio.best.cost_us * (1 - params.min_saving)
                allowed_seconds = params.layout_share * (1 - cooled) * (time.monotonic() - begin)
                if saves and self.layout_seconds < allowed_seconds:
                    now = time.monotonic()
                    work = int(max(0.0, self.deadline - now) * WORK_PER_SECOND)
                    if not self._place(min(self.layout_work, work)):
                        self.layout_work = min(params.max_layout_work, 2 * self.layout_work)
                    self.layout_seconds += time.monotonic() - now
            if chunks % params.report_chunks == 0:
                portfolio.report(None)
            chunks += 1

    def run_fixed_length(self, divisor: int = 1) -> None:
        """Anneal once, for a number of steps that depends on the events alone, over `divisor`."""
        params, portfolio, state = self.params, self.portfolio, self.state
        set_sequence(state, self.feasible)
        base = portfolio.problem.base_cost_us
        penalty, chunks, events = params.penalty, params.fixed_chunks, max(1, self.feasible.size)
        total, temperature = params.fixed_length(events, divisor)
        steps = -(-total // chunks)
        temperature *= base / portfolio.problem.op_count
        layouts = max(1, min(chunks, params.fixed_layout_events // events))
        for chunk in range(chunks):
            cooled = (1 - chunk / chunks) ** params.cooling
            cost, excess = self._search(steps, temperature * cooled, penalty * base)
            if excess > 0:
                penalty *= params.fixed_penalty_growth
                continue
            self.feasible = current_sequence(state)
            last = chunk + 1 == chunks
            due = last or (chunk + 1) % -(-chunks // layouts) == 0
            due = due and cost < portfolio.best.cost_us * (1 - params.min_saving)
            worth = last and cost < portfolio.best.cost_us * (1 - params.min_search_saving)
            if due and not self._place(WORK if worth else 0):
                self.limit -= int(params.limit_reduction * self.limit)
            if portfolio.request.out_of_time():
                return

    def find_feasible(self) -> None:
        """Search, at zero temperature, for a sequence that fits, from one that does not."""
        params, state, events = self.params, self.state, max(1, self.feasible.size)
        set_sequence(state, self.feasible)
        penalty = params.feasibility_penalty * self.portfolio.problem.base_cost_us
        steps = min(params.feasibility_steps, params.feasibility_steps_per_event * events)
        most_layouts = params.feasibility_layouts
        if self.portfolio.request.larger is not None:
            steps, most_layouts = steps // self.portfolio.params.start_divisor, 1
        layouts = stalled = 0
        least_excess = math.inf
        for _ in range(params.feasibility_chunks):
            _, excess = self._search(-(-steps // params.feasibility_chunks), 0.0, penalty)
            if excess == 0:
                layouts += 1
                if self._place(WORK) or layouts == most_layouts:
                    return
            stalled = 0 if excess < least_excess or excess == 0 else stalled + 1
            least_excess = min(least_excess, excess)
            if stalled == params.feasibility_patience or self.portfolio.request.out_of_time():
                break
        self.portfolio.offer(self._candidate())

    def _search(self, steps: int, temperature: float, penalty: float) -> tuple[float, float]:
        seed = int(self.random.integers(1 << 31))
        return metropolis(self.program, self.state, steps, self.limit, temperature, penalty, seed)

    def _candidate(self) -> Candidate:
        """The stored sequence as a candidate of the portfolio."""
        return self.portfolio.candidate_of(current_sequence(self.state), self.settings)

    def _place(self, work: int) -> bool:
        """Make the stored sequence the incumbent if it has a layout; else add a margin.

        `work` is the layout search effort if the greedy layout does not fit.
        """
        params, portfolio, arena = self.params, self.portfolio, self.portfolio.request.arena_bytes
        found = self._candidate()
        run, blocks = found.run, found.blocks
        lower, upper, size = blocks.lower, blocks.upper, blocks.size
        alignment = portfolio.problem.alignment
        placement = fit(blocks, alignment, arena, work=0)
        if placement.peak > arena and work:
            placement = fit(blocks, alignment, arena, work=work, order_hint=placement.order)
        if placement.peak <= arena:
            portfolio.keep(found, placement.offsets)
            return True
        # Keep memory free at the event with the most live bytes under the highest buffer.
        highest = int((placement.offsets + size).argmax())
        change = np.zeros(run.ops.size + 1, dtype=np.int64)
        np.add.at(change, lower, size)
        np.subtract.at(change, upper, size)
        live = change.cumsum()
        event = int(lower[highest] + live[lower[highest] : upper[highest]].argmax())
        add_margin(self.state, event, int(arena - live[event] + params.margin * arena))
        return False


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
    min_saving = portfolio.params.sequence_annealing.min_saving
    portfolio.best.cost_us = cost_us
    bound = bound_us or (lambda: problem.base_cost_us)
    search = SequenceAnnealing(portfolio, sequence, request.deadline)
    with contextlib.suppress(KeyboardInterrupt):  # returns the best so far
        search.run(lambda: portfolio.best.cost_us * (1 - min_saving) <= bound())
    return None if portfolio.best.found is None else portfolio.solution().placed


def cheaper(problem: Problem, found: Solution, other: PlacedSchedule | None) -> Solution:
    """The cheaper of a solution in program order and a schedule in any order."""
    if other is None or other.cost_us >= found.placed.cost_us:
        return found
    bound, model = found.lower_bound_us, found.bound_model
    if bound is not None and other.cost_us < bound:  # the bound holds for program order only
        bound, model = problem.floor_us, "any"
    return Solution(other, lower_bound_us=bound, bound_model=model)
