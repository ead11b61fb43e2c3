"""
Annealing of the sequence itself, from the incumbent on: the end of what coop-offline does.

A random walk (`planner.offline.metropolis`) looks for cheaper sequences that need no more than the arena;
too much memory is allowed on the way, at a price that rises as long as it is used. Simulated
annealing after Kirkpatrick et al., Optimization by Simulated Annealing, Science 1983; in windows,
so that long programs take no longer per step.
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from coop_plan.planner.layout import WORK, WORK_PER_SECOND
from coop_plan.planner.offline.metropolis import excess, walk
from coop_plan.planner.offline.run import Record
from coop_plan.planner.offline.search import Candidate, Search
from coop_plan.planner.offline.sequence import LENGTH, go_to, leave_room, start
from coop_plan.planner.placement import place

HEAT = 0.4
"""Temperature at the beginning, in mean costs of an op."""

ROOM = 2000
"""Events beyond twice as many as the first sequence has that another one may have."""

WHOLE, WINDOW = 1200, 300
"""Up to so many events all of them may be changed, and else so many at a time: steps are faster."""

CHUNK = 0.01
"""Seconds until another window is taken, about."""

STEEP = 5.0
"""What an arena that is too small by a factor e costs at least, in base costs."""

STEEPER, LESS_STEEP = 1.01, 1.007
"""Factors on that, up where a sequence does not fit, down where it does."""

PATIENCE = 50
"""Chunks after which it goes back to the last sequence that fitted."""

LAYOUT_SHARE = 0.3
"""Share of the time for layouts."""

MOST_WORK = 500_000_000
"""Effort of `planner.placement.place` for one layout, at most; twice as much after a failure."""

MARGIN = 1e-3
"""Share of the arena by which less may be live where a layout was fullest that failed."""

WORTH_PLACING = 1e-4
"""Share of the incumbent's cost that a sequence must save before its layout is tried."""


class Resequencing:
    """Improves a search's incumbent until a deadline (a `time.monotonic` value, s)."""

    def __init__(self, search: Search, deadline: float) -> None:
        assert search.best.found is not None
        self.search = search
        self.begin, self.deadline = time.monotonic(), deadline
        self.random = np.random.default_rng(search.request.seed)
        events = search.best.found.run.ops.size
        self.walk = start(search.problem, search.arrays, 2 * events + ROOM)
        self.settings = search.best.found.settings
        self.pace = 1000.0  # steps a second
        self.layouts = 0.0  # seconds
        self.work = WORK

    def run(self, enough: Callable[[], bool]) -> None:
        """Cool down from the incumbent until the deadline or `enough`."""
        search, w = self.search, self.walk
        assert search.best.found is not None
        fits = search.best.found.run.ops
        go_to(w, fits)
        base, arena = search.problem.base_cost_us, search.request.arena_bytes
        heat = HEAT * base / search.problem.op_count
        steep = STEEP
        chunks = astray = 0
        while (now := time.monotonic()) < self.deadline and not (chunks % 64 == 0 and enough()):
            cold = ((self.deadline - now) / (self.deadline - self.begin)) ** 2
            length = int(w.counts[LENGTH])
            window = length if length <= WHOLE else WINDOW
            low = (
                int(self.random.integers(-window // 2, length - window // 2))
                if window < length
                else 0
            )
            steps = max(1, int(CHUNK * self.pace))
            walk(
                search.arrays,
                w,
                max(0, low),
                min(length, low + window),
                steps,
                arena,
                heat * cold,
                steep * base,
                int(self.random.integers(1 << 31)),
            )
            self.pace += 0.2 * (steps / max(time.monotonic() - now, 1e-6) - self.pace)
            cost, too_much = excess(search.arrays, w, arena)
            if too_much > 0:
                steep *= STEEPER
                astray += 1
                if astray > PATIENCE:
                    go_to(w, fits)
            else:
                astray = 0
                fits = w.ops[: w.counts[LENGTH]].copy()
                steep = max(STEEP, steep / LESS_STEEP)
                worth = cost < search.best.cost_us * (1 - WORTH_PLACING)
                spare = LAYOUT_SHARE * (1 - cold) * (time.monotonic() - self.begin)
                if worth and self.layouts < spare:
                    self._place()
            if chunks % 16 == 0:
                search.report(None)
            chunks += 1

    def _place(self) -> None:
        """Make the sequence at hand the incumbent if there is a layout; else ask for more room."""
        search, arena = self.search, self.search.request.arena_bytes
        now = time.monotonic()
        ops = self.walk.ops[: self.walk.counts[LENGTH]].copy()
        run = Record(float(search.arrays.cost[ops].sum()), ops)
        blocks = run.blocks(search.arrays)
        lower, upper, size = blocks.lower, blocks.upper, blocks.size
        fit = partial(place, lower, upper, size, capacity=arena, alignment=search.problem.alignment)
        placement = fit(work=0)
        left = int(max(0.0, self.deadline - now) * WORK_PER_SECOND)
        if placement.peak > arena and left:
            placement = fit(work=min(self.work, left), order_hint=placement.order)
        if placement.peak <= arena:
            search.keep(Candidate(blocks.live, self.settings, run, blocks), placement.offsets)
        else:
            self.work = min(MOST_WORK, 2 * self.work)
            highest = int((placement.offsets + size).argmax())
            change = np.zeros(run.ops.size + 1, dtype=np.int64)
            np.add.at(change, lower, size)
            np.subtract.at(change, upper, size)
            live = change.cumsum()
            event = int(lower[highest] + live[lower[highest] : upper[highest]].argmax())
            leave_room(self.walk, event, int(arena - live[event] + MARGIN * arena))
        self.layouts += time.monotonic() - now
