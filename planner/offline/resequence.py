"""
Annealing of the sequence itself, from the incumbent on: the end of what coop-offline does.

The walk (`planner.orders.walk`) looks for cheaper sequences that need no more than the arena; too
much memory is allowed on the way, at a price that rises as long as it is used. Simulated annealing
after Kirkpatrick et al., Optimization by Simulated Annealing, Science 1983.
"""

import time
from collections.abc import Callable

import numpy as np

from coop_plan.planner.core.arrays import to_program
from coop_plan.planner.layout import WORK, WORK_PER_SECOND, fit
from coop_plan.planner.offline.portfolio import Candidate, Portfolio
from coop_plan.planner.offline.run import Record
from coop_plan.planner.orders.sequence import go_to, here, leave_room, start
from coop_plan.planner.orders.walk import walk


class Resequencing:
    """Improves a portfolio's incumbent until a deadline (a `time.monotonic` value, s)."""

    def __init__(self, portfolio: Portfolio, deadline: float) -> None:
        assert portfolio.best.found is not None
        params = portfolio.params
        self.portfolio, self.params = portfolio, params.resequencing
        self.begin, self.deadline = time.monotonic(), deadline
        self.random = np.random.default_rng(portfolio.request.seed)
        events = portfolio.best.found.run.ops.size
        room = self.params.room_factor * events + self.params.room
        self.program = to_program(portfolio.arrays)
        self.state = start(portfolio.problem, room, params.moves)
        self.settings = portfolio.best.found.settings
        self.pace = self.params.first_pace  # steps a second
        self.layouts = 0.0  # seconds
        self.work = WORK

    def run(self, enough: Callable[[], bool]) -> None:
        """Cool down from the incumbent until the deadline or `enough`."""
        params, portfolio, state = self.params, self.portfolio, self.state
        assert portfolio.best.found is not None
        fits = portfolio.best.found.run.ops
        go_to(state, fits)
        base, arena = portfolio.problem.base_cost_us, portfolio.request.arena_bytes
        heat = params.heat * base / portfolio.problem.op_count
        steep = params.steep
        chunks = astray = 0
        while (now := time.monotonic()) < self.deadline and not (
            chunks % params.check_chunks == 0 and enough()
        ):
            cold = ((self.deadline - now) / (self.deadline - self.begin)) ** params.cooling
            steps = max(1, int(params.chunk_seconds * self.pace))
            cost, too_much = walk(
                self.program,
                state,
                steps,
                arena,
                heat * cold,
                steep * base,
                int(self.random.integers(1 << 31)),
            )
            self.pace += params.pace_share * (steps / max(time.monotonic() - now, 1e-6) - self.pace)
            if too_much > 0:
                steep *= params.steeper
                astray += 1
                if astray > params.patience:
                    go_to(state, fits)
            else:
                astray = 0
                fits = here(state)
                steep = max(params.steep, steep / params.less_steep)
                worth = cost < portfolio.best.cost_us * (1 - params.worth_placing)
                spare = params.layout_share * (1 - cold) * (time.monotonic() - self.begin)
                if worth and self.layouts < spare:
                    self._place()
            if chunks % params.report_chunks == 0:
                portfolio.report(None)
            chunks += 1

    def _place(self) -> None:
        """Make the sequence at hand the incumbent if there is a layout; else ask for more room."""
        params, portfolio, arena = self.params, self.portfolio, self.portfolio.request.arena_bytes
        now = time.monotonic()
        ops = here(self.state)
        run = Record(float(portfolio.arrays.cost[ops].sum()), ops)
        blocks = run.blocks(portfolio.arrays)
        lower, upper, size = blocks.lower, blocks.upper, blocks.size
        alignment = portfolio.problem.alignment
        placement = fit(blocks, alignment, arena, work=0)
        left = int(max(0.0, self.deadline - now) * WORK_PER_SECOND)
        if placement.peak > arena and left:
            work = min(self.work, left)
            placement = fit(blocks, alignment, arena, work=work, order_hint=placement.order)
        if placement.peak <= arena:
            portfolio.keep(Candidate(blocks.live, self.settings, run, blocks), placement.offsets)
        else:
            self.work = min(params.most_work, 2 * self.work)
            highest = int((placement.offsets + size).argmax())
            change = np.zeros(run.ops.size + 1, dtype=np.int64)
            np.add.at(change, lower, size)
            np.subtract.at(change, upper, size)
            live = change.cumsum()
            event = int(lower[highest] + live[lower[highest] : upper[highest]].argmax())
            leave_room(
                self.state,
                event,
                int(arena - live[event] + params.margin * arena),
            )
        self.layouts += time.monotonic() - now
