"""
coop-offline: plan first with the whole step in view, place second, keep what fits.

A run of the kernel at a logical budget gives a cost and lifetimes; placement gives the arena they
need. Lifetimes end at the last touch, so a run may stay within the arena although its logical
budget is larger, and that is searched for: the portfolio crosses scoring rules with logical budgets
taken from a fixed grid (independent of the arena asked for, so that neighbouring budgets are
answered from the same candidates), then a hill climb perturbs the weights of single retention
intervals around the incumbent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.arrays import Arrays, Ints, to_arrays
from planner.errors import DoesNotFitError, TimeLimitError
from planner.layout import lay_out
from planner.methods.base import Progress, Request, Solution
from planner.methods.online import run_coop
from planner.offline.lifetimes import lifetimes
from planner.offline.rebuild import rebuild
from planner.offline.run import Run, Runner, Settings
from planner.placement import place
from planner.problem import Problem

GRID_RATIO = 1.015
"""Neighbouring logical budgets of the grid differ by this factor."""

GRID_WINDOWS = ((-8, 8), (-20, -8), (-44, -20))
"""Grid steps around the arena, tried in this order until one of them has a plan."""

SMALL_OPS = 500
BEST_RULES = 3
"""On graphs of more ops than that, only this many rules go over the grid."""

ALPHAS = (0.25, 0.5, 1.0, 2.0)

RULES = tuple((alpha, cap) for alpha in ALPHAS for cap in (False, True))
"""Scoring rules of the portfolio: exponent of the distance, and whether bytes are capped."""

TRAIL_SPACING = 2
"""Grid steps between the starts of neighbouring trails."""

SLOPE_STEPS = 3
"""Grid steps to either side over which a trail's start measures what memory is worth."""

CLIMB_OPS = 100_000
"""The hill climb's default length: this many simulated ops in all."""


@dataclass
class _Incumbent:
    cost_us: float = np.inf
    budget: int = 0
    run: Run | None = None


class Search:
    """The search for one problem and one arena."""

    def __init__(
        self, problem: Problem, request: Request, rules: Sequence[tuple[float, bool]] = RULES
    ) -> None:
        self.problem = problem
        self.request = request
        self.arrays: Arrays = to_arrays(problem)
        self.runner = Runner(self.arrays)
        price = np.arange(problem.op_count + 1, dtype=np.float64)
        weight = np.ones(self.arrays.uses.size + 1)
        self.settings = [Settings(price, weight, alpha, cap) for alpha, cap in rules]
        self.best = _Incumbent()
        self.failed_op = problem.largest_working_set[0]

    def consider(self, budget: int, settings: Settings) -> None:
        """Run at a logical budget; keep it if it is cheaper and its layout fits the arena."""
        run = self.runner(budget, settings, self.best.cost_us)
        if run is not None:
            self.offer(run, lifetimes(self.arrays, run), budget)
        elif self.best.run is None:
            self.failed_op = self.runner.failed_op

    def offer(self, run: Run, lives: tuple[Ints, Ints, Ints, int], budget: int) -> None:
        """Keep a run if it is cheaper than the incumbent and its layout fits the arena."""
        lower, upper, size, peak = lives
        arena = self.request.arena_bytes
        if run.cost_us >= self.best.cost_us or peak > arena:
            return
        placement = place(lower, upper, size, capacity=arena, alignment=self.problem.alignment)
        if placement.peak <= arena:
            self.best = _Incumbent(run.cost_us, budget, run)

    def runs(self, budget: int) -> Iterator[tuple[int, Run]]:
        """What each rule that completes makes of a logical budget, by the rule's number."""
        for number, settings in enumerate(self.settings):
            run = self.runner(budget, settings)
            if run is not None:
                yield number, run

    def portfolio(self) -> None:
        """Every rule at the arena's own size, then the best rules over the grid around it."""
        n = self.problem.op_count
        here = self._step(self.request.arena_bytes)
        cost = {number: run.cost_us for number, run in self.runs(int(GRID_RATIO**here))}
        ranked = sorted(range(len(self.settings)), key=lambda number: cost.get(number, np.inf))
        for low, high in GRID_WINDOWS:
            for step in range(here + high, here + low, -1):
                for number in ranked if n <= SMALL_OPS else ranked[:BEST_RULES]:
                    self.consider(int(GRID_RATIO**step), self.settings[number])
                    if self.best.run is not None and self.request.out_of_time():
                        return
            if self.best.run is not None:
                return
            ranked, n = list(range(len(self.settings))), 0

    def climb(self, steps: int | None) -> None:
        """Trails around the arena in turn; `steps` None means until the deadline."""
        trails = self._trails()
        done = 0
        while trails and (steps is None or done < steps):
            for trail in trails:
                if self.request.out_of_time():
                    return
                if self.request.progress is not None and done % 16 == 0:
                    overhead = self.best.cost_us / max(self.problem.base_cost_us, 1e-12) - 1
                    self.request.progress(
                        Progress(
                            f"improving: overhead {overhead:.2%}", done / steps if steps else None
                        )
                    )
                done += 1
                trail.step(self)

    def _trails(self) -> list["Trail"]:
        """Trails from the grid steps whose plans need about as much as there is."""
        middle = self._step(self.best.budget) // TRAIL_SPACING * TRAIL_SPACING
        trails = []
        for step in range(middle - 2 * TRAIL_SPACING, middle + TRAIL_SPACING + 1, TRAIL_SPACING):
            trail = Trail.start(self, step)
            if trail is not None:
                trails.append(trail)
        return trails

    def _step(self, size: int) -> int:
        return int(np.log(max(size, 2)) / np.log(GRID_RATIO))


@dataclass
class Trail:
    """
    A hill climb that does not know the arena: from a grid step, towards less cost for less memory.

    Neighbouring arenas walk the same trails and so see the same plans, of which each takes the
    cheapest that fits; that is what keeps overhead from rising with the budget. `slope` is what a
    factor e of memory is worth, in µs, around the start.
    """

    random: np.random.Generator
    settings: Settings
    budget: int
    value: float
    slope: float

    @classmethod
    def start(cls, search: Search, step: int) -> "Trail | None":
        """The best rule at this step of the grid; None when no rule completes there."""
        budget = int(GRID_RATIO**step)
        found = [(run.cost_us, number, run) for number, run in search.runs(budget)]
        if not found:
            return None
        cost, number, run = min(found, key=lambda entry: entry[:2])
        settings = search.settings[number]
        ends = []
        for side in (-SLOPE_STEPS, SLOPE_STEPS):
            at = search.runner(int(GRID_RATIO ** (step + side)), settings)
            if at is not None:
                ends.append((np.log(lifetimes(search.arrays, at)[3]), at.cost_us))
        slope = 0.0
        if len(ends) == 2 and ends[1][0] > ends[0][0]:
            slope = max(0.0, (ends[0][1] - ends[1][1]) / (ends[1][0] - ends[0][0]))
        value = cost + slope * np.log(lifetimes(search.arrays, run)[3])
        random = np.random.default_rng([search.request.seed, max(step, 0)])
        return cls(random, settings, budget, value, slope)

    def step(self, search: Search) -> None:
        """Perturb the weights and the budget; stay where cost and memory together got less."""
        random, base = self.random, self.settings
        spread = random.choice([0.1, 0.3, 1.0])
        touched = random.random(base.weight.size) < random.choice([0.02, 0.1, 0.5])
        factor = np.exp(random.normal(0.0, spread, base.weight.size))
        settings = Settings(
            base.price,
            np.where(touched, base.weight * factor, base.weight),
            float(random.choice(ALPHAS)) if random.random() < 0.1 else base.alpha,
            base.cap,
        )
        budget = int(self.budget * np.exp(random.normal(0.0, 0.01)))
        run = search.runner(budget, settings)
        if run is None:
            return
        lives = lifetimes(search.arrays, run)
        search.offer(run, lives, budget)
        value = run.cost_us + self.slope * np.log(lives[3])
        if value < self.value:
            self.settings, self.budget, self.value = settings, budget, value


def solve_coop_offline(problem: Problem, request: Request) -> Solution:
    """The cheapest schedule found that fits; `request.deadline` buys a longer climb."""
    search = Search(problem, request)
    search.portfolio()
    try:
        online = run_coop(problem, replace(request, progress=None, off=frozenset()), search.arrays)
    except (DoesNotFitError, TimeLimitError):
        online = None
    if search.best.run is None:
        if online is None:
            raise DoesNotFitError(search.failed_op)
        return Solution(online.schedule(problem))
    steps = max(20, CLIMB_OPS // max(1, problem.op_count))
    search.climb(None if request.deadline is not None else steps)
    assert search.best.run is not None
    if online is not None and online.cost_us < search.best.cost_us:
        return Solution(online.schedule(problem))
    schedule = rebuild(problem, search.best.run)
    lay_out(schedule, request.arena_bytes)
    return Solution(schedule)
