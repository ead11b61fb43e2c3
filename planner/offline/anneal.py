"""
Annealing of weights towards one arena: what coop-offline does first with the time that is left.

From the incumbent's settings the weights of retention intervals are perturbed, all over the program
or in a stretch of it, one by one or, where blocks repeat, alike in every copy. A run is judged by
its cost and by what its layout would need above the arena; that is not searched for each of them
but estimated from the live peak and from how layouts turned out so far. Simulated annealing after
Kirkpatrick et al., Optimization by Simulated Annealing, Science 1983.
"""

import time
from collections.abc import Callable

import numpy as np

from coop_plan.planner.core.arrays import Arrays, Floats, Ints
from coop_plan.planner.core.blocks import repetitions
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.offline.run import Settings
from coop_plan.planner.offline.search import ALPHAS, Candidate, Search

TEMPERATURE = 1e-3
"""By how much a run may be worse and taken on average, at the beginning: share of the base cost."""

STEEP = 5.0
"""What an arena that is too small by a factor e costs at least, in base costs."""

STEEPER = 1.3
"""Factor on that while nothing fits."""

LAYOUT_SHARE = 0.3
"""Share of the time for layouts that the greedy placements do not find."""

LOOSER, TIGHTER = 1.005, 1.001
"""Factors on the estimate of what a layout needs above the live peak."""

IDLE = 200
"""Runs without one whose layout was tried, after which more must fit or less is asked of memory."""

WORTH_PLACING = 1e-4
"""Share of the incumbent's cost that a run must save before its layout is tried."""


class Annealing:
    """
    Improves a search's incumbent until a deadline (a `time.monotonic` value, s).

    `kinds` is what `alike` returns.
    """

    def __init__(self, search: Search, kinds: Ints, deadline: float) -> None:
        self.search = search
        self.begin, self.deadline = time.monotonic(), deadline
        self.random = np.random.default_rng(search.request.seed)
        self.kinds = kinds
        self.where = np.append(search.arrays.uses, search.problem.op_count)
        self.over = 1.0  # layout over live peak, as it turned out
        self.steep = STEEP
        self.idle = 0
        self.layouts = 0.0  # seconds

    def run(self, enough: Callable[[], bool]) -> None:
        """Steps from the incumbent until the deadline or `enough`."""
        search, here = self.search, self.search.best.found
        assert here is not None
        step = 0
        while (now := time.monotonic()) < self.deadline:
            heat = ((self.deadline - now) / (self.deadline - self.begin)) ** 2
            worse = heat * TEMPERATURE * search.problem.base_cost_us * self.random.exponential()
            found = self._neighbour(here, self._value(here) + worse)
            if found is not None:
                here = found
            if step % 64 == 0:
                if enough():
                    return
                search.report(None)
            step += 1

    def _value(self, found: Candidate) -> float:
        excess = np.log(found.peak * self.over / self.search.request.arena_bytes)
        return float(
            found.cost_us + self.steep * self.search.problem.base_cost_us * max(0.0, excess)
        )

    def _neighbour(self, here: Candidate, limit: float) -> Candidate | None:
        """Perturb a run and offer what comes of it; None where that fails or is over the limit."""
        search, random = self.search, self.random
        settings, budget = self._perturbed(here.settings), here.budget
        if random.random() < 0.7:
            budget = int(budget * np.exp(random.normal(0.0, 0.01)))
        found = search.simulate(budget, settings, limit)
        if found is None:
            self._idle(here)
            return None
        worthy = found.cost_us < search.best.cost_us * (1 - WORTH_PLACING)
        if worthy and found.peak * self.over <= search.request.arena_bytes:
            self.idle = 0
            self.steep = max(STEEP, self.steep / STEEPER)
            before = search.best.found
            search.offer(found)
            now = time.monotonic()
            if search.best.found is before and self.layouts < LAYOUT_SHARE * (now - self.begin):
                search.place_the_unplaced(1)
                self.layouts += time.monotonic() - now
            if search.best.found is before:
                self.over *= TIGHTER
            else:
                self.over = max(1.0, self.over / LOOSER)
        else:
            self._idle(here)
        return found if self._value(found) < limit else None

    def _idle(self, here: Candidate) -> None:
        """Note a run that was not worth a layout; after some of them, judge them otherwise."""
        self.idle += 1
        if self.idle > IDLE:
            self.idle = 0
            if here.peak * self.over > self.search.request.arena_bytes:
                self.steep *= STEEPER
            else:
                self.over = max(1.0, self.over / TIGHTER)

    def _perturbed(self, base: Settings) -> Settings:
        random = self.random
        kind = self.kinds if random.random() < 0.5 else np.arange(self.kinds.size)
        kinds = int(kind.max()) + 1
        if random.random() < 0.2:
            touched = np.isin(kind, random.choice(kinds, random.integers(1, 8)))
        else:
            touched = (random.random(kinds) < random.choice([0.02, 0.1, 0.5]))[kind]
        if random.random() < 0.5:
            n = self.search.problem.op_count
            width = random.integers(n // 50 + 1, n // 3 + 2)
            low = random.integers(-width, n)
            touched &= (self.where >= low) & (self.where < low + width)
        factor = np.exp(random.normal(0.0, random.choice([0.1, 0.3, 1.0]), kinds))[kind]
        weight: Floats = np.where(touched, base.weight * factor, base.weight)
        alpha = float(random.choice(ALPHAS)) if random.random() < 0.05 else base.alpha
        return Settings(base.price, weight, alpha, base.cap)


def alike(problem: Problem, arrays: Arrays) -> Ints:
    """
    A number per entry of `Settings.weight`, the same for copies of it in repeated blocks.

    Entries are copies if the ops that make the tensor and that use it are.
    """
    n = problem.op_count
    copy_of = np.arange(n + 1)
    for run in repetitions(problem):
        for offset in range(run.period):
            copies = run.copies(offset)
            copy_of[copies] = copies[0]
    producer = np.array(problem.producer, dtype=np.int64)
    makers = np.where(producer >= 0, copy_of[producer], -1 - np.arange(producer.size))
    output = np.zeros(producer.size, dtype=np.int64)
    for made in problem.makes:
        output[list(made)] = np.arange(len(made))
    uses = np.diff(arrays.uses_ptr)
    entries = np.stack(
        [np.repeat(makers, uses), np.repeat(output, uses), copy_of[arrays.uses]], axis=1
    )
    numbers = np.unique(entries, axis=0, return_inverse=True)[1].reshape(-1)
    return np.append(numbers, numbers.max(initial=-1) + 1)
