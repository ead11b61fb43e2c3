"""
Annealing of the sequence itself, from a plan's on: the end of what coop-offline and auto do.

The walk (`planner.search.compute.metropolis`) looks for cheaper sequences that need no more than the arena; too
much memory is allowed on the way, at a price that rises as long as it is used. First runs may leave
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
from coop_plan.planner.placement.layout import WORK, WORK_PER_SECOND, fit
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.heuristic.portfolio import Candidate, Portfolio
from coop_plan.planner.heuristic.eviction_run import Record
from coop_plan.planner.search.compute.sequence import go_to, here, leave_room, start
from coop_plan.planner.search.compute.metropolis import walk


class Resequencing:
    """
    Looks for a portfolio's next incumbents, from a `sequence` on.

    `run` ends at a deadline, a `time.monotonic` value, s; all else after so many steps.
    """

    def __init__(self, portfolio: Portfolio, sequence: Ints, deadline: float = math.inf) -> None:
        params = portfolio.params
        self.portfolio, self.params, self.fits = portfolio, params.resequencing, sequence
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
        """Cool down from where it begins until the deadline or `enough`."""
        params, portfolio, state = self.params, self.portfolio, self.state
        go_to(state, self.fits)
        base = portfolio.problem.base_cost_us
        heat = params.heat * base / portfolio.problem.op_count
        steep = params.steep
        chunks = astray = 0
        begin = time.monotonic()
        while (now := time.monotonic()) < self.deadline and not (
            chunks % params.check_chunks == 0 and enough()
        ):
            cold = ((self.deadline - now) / (self.deadline - begin)) ** params.cooling
            steps = max(1, int(params.chunk_seconds * self.pace))
            cost, too_much = self._walk(steps, heat * cold, steep * base)
            self.pace += params.pace_share * (steps / max(time.monotonic() - now, 1e-6) - self.pace)
            if too_much > 0:
                steep *= params.steeper
                astray += 1
                if astray > params.patience:
                    go_to(state, self.fits)
            else:
                astray = 0
                self.fits = here(state)
                steep = max(params.steep, steep / params.less_steep)
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

    def settle(self) -> None:
        """Cool down, and again from hotter, in so many steps, whatever time that takes."""
        for heat in self.params.settling_heats:
            self._settle_once(heat)

    def _settle_once(self, heat: float) -> None:
        params, portfolio, state = self.params, self.portfolio, self.state
        go_to(state, self.fits)
        base = portfolio.problem.base_cost_us
        heat *= base / portfolio.problem.op_count
        steep, chunks, events = params.steep, params.settling_chunks, max(1, self.fits.size)
        steps = -(-min(params.settling_steps, params.settling_steps_per_event * events) // chunks)
        layouts = max(1, min(chunks, params.settling_blocks // events))
        for chunk in range(chunks):
            cold = (1 - chunk / chunks) ** params.cooling
            cost, too_much = self._walk(steps, heat * cold, steep * base)
            if too_much > 0:
                steep *= params.settling_steeper
                continue
            self.fits = here(state)
            due = (chunk + 1) % -(-chunks // layouts) == 0 or chunk + 1 == chunks
            due = due and cost < portfolio.best.cost_us * (1 - params.worth_placing)
            if due and not self._place(WORK if chunk + 1 == chunks else 0):
                self.limit -= int(params.narrower * self.limit)
            if portfolio.request.out_of_time():
                return

    def squeeze(self) -> None:
        """Walk from a sequence that needs too much to one that fits, as long as it comes nearer."""
        params, state, events = self.params, self.state, max(1, self.fits.size)
        go_to(state, self.fits)
        steep = params.squeezing_steep * self.portfolio.problem.base_cost_us
        steps = min(params.squeezing_steps, params.squeezing_steps_per_event * events)
        layouts = stale = 0
        least = math.inf
        for _ in range(params.squeezing_chunks):
            _, too_much = self._walk(-(-steps // params.squeezing_chunks), 0.0, steep)
            if too_much == 0:
                layouts += 1
                if self._place(WORK) or layouts == params.squeezing_layouts:
                    return
            stale = 0 if too_much < least or too_much == 0 else stale + 1
            least = min(least, too_much)
            if stale == params.squeezing_patience or self.portfolio.request.out_of_time():
                return

    def _walk(self, steps: int, heat: float, steep: float) -> tuple[float, float]:
        seed = int(self.random.integers(1 << 31))
        return walk(self.program, self.state, steps, self.limit, heat, steep, seed)

    def _place(self, work: int) -> bool:
        """
        Make the sequence at hand the incumbent if there is a layout; else ask for more room.

        `work` is the effort for one where a greedy one does not fit.
        """
        params, portfolio, arena = self.params, self.portfolio, self.portfolio.request.arena_bytes
        ops = here(self.state)
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
        leave_room(self.state, event, int(arena - live[event] + params.margin * arena))
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
    where it finds nothing, or where the sequence runs an op again that touches what is overwritten.
    """
    assert request.deadline is not None
    runs = np.bincount(sequence, minlength=problem.op_count)
    if any(problem.touches_overwritten(op) for op in np.flatnonzero(runs > 1).tolist()):
        return None
    portfolio = Portfolio(problem, request)
    worth = portfolio.params.resequencing.worth_placing
    portfolio.best.cost_us = cost_us
    least = least_us or (lambda: problem.base_cost_us)
    search = Resequencing(portfolio, sequence, request.deadline)
    with contextlib.suppress(KeyboardInterrupt):  # whoever has seen enough gets the best so far
        search.run(lambda: portfolio.best.cost_us * (1 - worth) <= least())
    return None if portfolio.best.found is None else portfolio.solution().placed


def cheaper(problem: Problem, found: Solution, other: PlacedSchedule | None) -> Solution:
    """What was found in program order, maybe with a bound; or a schedule in any that costs less."""
    if other is None or other.cost_us >= found.placed.cost_us:
        return found
    bound, model = found.lower_bound_us, found.bound_model
    if bound is not None and other.cost_us < bound:  # it holds for program order
        bound, model = problem.floor_us, "any"
    return Solution(other, lower_bound_us=bound, bound_model=model)
