"""
Simulated annealing of event orders: the last stage of coop-offline and auto.

The Metropolis search (`planner.search.compute.metropolis`) looks for cheaper sequences within the
arena. Candidates may exceed it at a penalty, which grows while they do. First runs may leave
the order of the program, as in OLLA (Steiner et al., 2022, section 3) and Moccasin (Bartan et al.,
ICML 2023, section 2), unless the switch "reorder" is off. Simulated annealing after Kirkpatrick et
al., Optimization by Simulated Annealing, Science 1983.
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
from coop_plan.planner.heuristic.eviction_run import Record
from coop_plan.planner.heuristic.portfolio import Candidate, Portfolio
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.placement.layout import WORK, WORK_PER_SECOND, fit
from coop_plan.planner.search.compute.metropolis import metropolis_search
from coop_plan.planner.search.compute.sequence import (
    current_sequence,
    reserve_margin,
    set_sequence,
    start,
)


class OrderAnnealing:
    """
    Annealing that starts at a `sequence` and offers incumbents to a portfolio.

    `run` ends at a deadline, a `time.monotonic` value, s; all else after so many steps.
    """

    def __init__(self, portfolio: Portfolio, sequence: Ints, deadline: float = math.inf) -> None:
        params = portfolio.params
        self.portfolio, self.params, self.fits = portfolio, params.order_annealing, sequence
        self.deadline = deadline
        self.random = np.random.default_rng(portfolio.request.seed)
        room = self.params.room_factor * sequence.size + self.params.room
        self.program = to_program(portfolio.arrays)
        moves = params.moves
        if "reorder" in portfolio.request.off:
            moves = replace(moves, first_chance=0.0)
        self.state = start(portfolio.problem, room, moves)
        found = portfolio.best.found
        self.settings = portfolio.settings[0] if found is None else found.settings
        self.pace = self.params.first_pace  # steps a second
        self.layouts = 0.0  # seconds
        self.work = WORK
        self.limit = portfolio.request.arena_bytes  # of what is live at once, in bytes

    def run(self, enough: Callable[[], bool]) -> None:
        """Anneal from the start sequence until the deadline or `enough`."""
        params, portfolio, state = self.params, self.portfolio, self.state
        set_sequence(state, self.fits)
        base = portfolio.problem.base_cost_us
        temperature = params.temperature * base / portfolio.problem.op_count
        penalty = params.penalty
        chunks = infeasible_streak = 0
        begin = time.monotonic()
        while (now := time.monotonic()) < self.deadline and not (
            chunks % params.check_chunks == 0 and enough()
        ):
            cold = ((self.deadline - now) / (self.deadline - begin)) ** params.cooling
            steps = max(1, int(params.chunk_seconds * self.pace))
            cost, too_much = self._search(steps, temperature * cold, penalty * base)
            self.pace += params.pace_share * (steps / max(time.monotonic() - now, 1e-6) - self.pace)
            if too_much > 0:
                penalty *= params.penalty_growth
                infeasible_streak += 1
                if infeasible_streak > params.patience:
                    set_sequence(state, self.fits)
            else:
                infeasible_streak = 0
                self.fits = current_sequence(state)
                penalty = max(params.penalty, penalty / params.penalty_decay)
                worth = cost < portfolio.best.cost_us * (1 - params.worth_placing)
                spare = params.layout_share * (1 - cold) * (time.monotonic() - begin)
                if worth and self.layouts < spare:
                    now = time.monotonic()
                    left = int(max(0.0, self.deadline - now) * WORK_PER_SECOND)
                    if not self._place(min(self.work, left)):
                        self.work = min(params.most_work, 2 * self.work)
                    self.layouts += time.monotonic() - now
            if chunks % params.report_chunks == 0:
                portfolio.report(None)
            chunks += 1

    def run_fixed_length(self) -> None:
        """Anneal for a fixed number of steps at each start temperature; the clock is not read."""
        for temperature in self.params.fixed_temperatures:
            self._run_fixed_length_once(temperature)

    def _run_fixed_length_once(self, temperature: float) -> None:
        params, portfolio, state = self.params, self.portfolio, self.state
        set_sequence(state, self.fits)
        base = portfolio.problem.base_cost_us
        temperature *= base / portfolio.problem.op_count
        penalty, chunks, events = params.penalty, params.fixed_chunks, max(1, self.fits.size)
        steps = -(-min(params.fixed_steps, params.fixed_steps_per_event * events) // chunks)
        layouts = max(1, min(chunks, params.fixed_layout_blocks // events))
        for chunk in range(chunks):
            cold = (1 - chunk / chunks) ** params.cooling
            cost, too_much = self._search(steps, temperature * cold, penalty * base)
            if too_much > 0:
                penalty *= params.fixed_penalty_growth
                continue
            self.fits = current_sequence(state)
            due = (chunk + 1) % -(-chunks // layouts) == 0 or chunk + 1 == chunks
            due = due and cost < portfolio.best.cost_us * (1 - params.worth_placing)
            if due and not self._place(WORK if chunk + 1 == chunks else 0):
                self.limit -= int(params.narrower * self.limit)
            if portfolio.request.out_of_time():
                return

    def find_feasible(self) -> None:
        """Walk from a sequence that needs too much to one that fits, as long as it comes nearer."""
        params, state, events = self.params, self.state, max(1, self.fits.size)
        set_sequence(state, self.fits)
        penalty = params.feasibility_penalty * self.portfolio.problem.base_cost_us
        steps = min(params.feasibility_steps, params.feasibility_steps_per_event * events)
        layouts = stale = 0
        least = math.inf
        for _ in range(params.feasibility_chunks):
            _, too_much = self._search(-(-steps // params.feasibility_chunks), 0.0, penalty)
            if too_much == 0:
                layouts += 1
                if self._place(WORK) or layouts == params.feasibility_layouts:
                    return
            stale = 0 if too_much < least or too_much == 0 else stale + 1
            least = min(least, too_much)
            if stale == params.feasibility_patience or self.portfolio.request.out_of_time():
                return

    def _search(self, steps: int, temperature: float, penalty: float) -> tuple[float, float]:
        seed = int(self.random.integers(1 << 31))
        return metropolis_search(
            self.program, self.state, steps, self.limit, temperature, penalty, seed
        )

    def _place(self, work: int) -> bool:
        """
        Make the sequence at hand the incumbent if there is a layout; else ask for more room.

        `work` is the effort for one where a greedy one does not fit.
        """
        params, portfolio, arena = self.params, self.portfolio, self.portfolio.request.arena_bytes
        ops = current_sequence(self.state)
        run = Record(float(portfolio.arrays.cost[ops].sum()), ops)
        blocks = run.blocks(portfolio.arrays)
        lower, upper, size = blocks.lower, blocks.upper, blocks.size
        alignment = portfolio.problem.alignment
        placement = fit(blocks, alignment, arena, work=0)
        if placement.peak > arena and work:
            placement = fit(blocks, alignment, arena, work=work, order_hint=placement.order)
        if placement.peak <= arena:
            portfolio.keep(Candidate(blocks.live, self.settings, run, blocks), placement.offsets)
            return True
        highest = int((placement.offsets + size).argmax())
        change = np.zeros(run.ops.size + 1, dtype=np.int64)
        np.add.at(change, lower, size)
        np.subtract.at(change, upper, size)
        live = change.cumsum()
        event = int(lower[highest] + live[lower[highest] : upper[highest]].argmax())
        reserve_margin(self.state, event, int(arena - live[event] + params.margin * arena))
        return False


def reordered(
    problem: Problem,
    sequence: Ints,
    cost_us: float,
    request: Request,
    least_us: Callable[[], float] | None = None,
) -> PlacedSchedule | None:
    """
    A cheaper schedule of default variants than one that costs `cost_us`, in whatever order.

    It begins at a `sequence` of ops, and ends at the deadline, which the request has, or where what
    it found costs no more than is known to be the least (`least_us`, else every op once); None
    where it finds nothing, or where the sequence runs an op again that accesses what is
    overwritten.
    """
    assert request.deadline is not None
    runs = np.bincount(sequence, minlength=problem.op_count)
    if any(problem.touches_overwritten(op) for op in np.flatnonzero(runs > 1).tolist()):
        return None
    portfolio = Portfolio(problem, request)
    worth = portfolio.params.order_annealing.worth_placing
    portfolio.best.cost_us = cost_us
    least = least_us or (lambda: problem.base_cost_us)
    search = OrderAnnealing(portfolio, sequence, request.deadline)
    with contextlib.suppress(KeyboardInterrupt):  # whoever has seen enough gets the best so far
        search.run(lambda: portfolio.best.cost_us * (1 - worth) <= least())
    return None if portfolio.best.found is None else portfolio.solution().placed


def cheaper(problem: Problem, found: Solution, other: PlacedSchedule | None) -> Solution:
    """The cheaper of a solution in program order and a schedule in any order."""
    if other is None or other.cost_us >= found.placed.cost_us:
        return found
    bound, model = found.lower_bound_us, found.bound_model
    if bound is not None and other.cost_us < bound:  # it holds for program order
        bound, model = problem.floor_us, "any"
    return Solution(other, lower_bound_us=bound, bound_model=model)
