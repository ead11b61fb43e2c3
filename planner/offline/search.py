"""
coop-offline: plan first with the whole step in view, place second, keep what fits.

A run of the kernel at a logical budget gives a cost and lifetimes; placement gives the arena they
need. Lifetimes end at the last touch, so a run may stay within the arena although its logical
budget is larger, and that is searched for: the portfolio crosses scoring rules with logical budgets
taken from a fixed grid (independent of the arena asked for, so that neighbouring budgets are
answered from the same candidates), then a hill climb perturbs the weights of single retention
intervals around the incumbent. Time that is left goes into annealing
(`planner.offline.anneal`, `planner.offline.resequence`).
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from coop_plan.planner.core.arrays import Arrays, Ints, to_arrays
from coop_plan.planner.core.lifetimes import Blocks
from coop_plan.planner.core.needs import largest_working_set
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.layout import WORK
from coop_plan.planner.method import Progress, Request, Solution
from coop_plan.planner.offline.run import Record, Runner, Settings
from coop_plan.planner.placement import place

GRID_RATIO = 1.015
"""Neighbouring logical budgets of the grid differ by this factor."""

GRID_WINDOWS = ((-8, 8), (-20, -8), (-44, -20))
"""Grid steps around the arena, tried in this order until one of them has a plan."""

SMALL_OPS = 500
BEST_RULES = 3
"""On graphs of more ops than that, only this many rules go over the grid."""

RANK_STEPS = 16
"""Grid steps that share one ranking of the rules for their trails."""

ALPHAS = (0.25, 0.5, 1.0, 2.0)

RULES = tuple((alpha, cap) for alpha in ALPHAS for cap in (False, True))
"""Scoring rules of the portfolio: exponent of the distance, and whether bytes are capped."""

UNPLACED = 4
"""Runs whose layout is searched when the greedy placements have failed."""

TRAIL_SPACING = 2
"""Grid steps between the starts of neighbouring trails."""

SLOPE_STEPS = 3
"""Grid steps to either side over which a trail's start measures what memory is worth."""


@dataclass(frozen=True)
class Candidate:
    """A run that completed, its blocks, the logical budget (bytes) and settings behind it."""

    budget: int
    settings: Settings
    run: Record
    blocks: Blocks

    @property
    def cost_us(self) -> float:
        """Cost of the whole step."""
        return self.run.cost_us

    @property
    def peak(self) -> int:
        """The most bytes that are live at once."""
        return self.blocks.live


@dataclass
class _Incumbent:
    cost_us: float = np.inf
    found: Candidate | None = None
    offsets: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))


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
        self._unplaced: list[tuple[float, int, Candidate, Ints]] = []
        self._counter = itertools.count()
        self.failed_op = largest_working_set(problem).op

    def simulate(
        self, budget: int, settings: Settings, cost_limit: float = np.inf
    ) -> Candidate | None:
        """Run at a logical budget (bytes); None when it fails or costs more than the limit (µs)."""
        run = self.runner(budget, settings, cost_limit)
        if run is None:
            return None
        return Candidate(budget, settings, run, run.blocks(self.arrays))

    def consider(self, budget: int, settings: Settings) -> None:
        """Run at a logical budget; keep it if it is cheaper and its layout fits the arena."""
        found = self.simulate(budget, settings, self.best.cost_us)
        if found is not None:
            self.offer(found)
        elif self.best.found is None:
            self.failed_op = self.runner.failed_op

    def offer(self, found: Candidate, hint: Ints | None = None) -> None:
        """
        Keep a run if it is cheaper than the incumbent and its layout fits the arena.

        With the order of its greedy layout as `hint`, a layout is searched from there.
        """
        blocks, arena = found.blocks, self.request.arena_bytes
        if found.cost_us >= self.best.cost_us or found.peak > self.request.units(
            self.problem.alignment
        ):
            return
        placement = place(
            blocks.lower,
            blocks.upper,
            blocks.size,
            capacity=arena,
            alignment=self.problem.alignment,
            work=0 if hint is None else WORK,
            order_hint=hint,
        )
        if placement.peak <= arena:
            self.keep(found, placement.offsets)
        elif hint is None:
            entry = found.cost_us, next(self._counter), found, placement.order
            self._unplaced.append(entry)
            self._unplaced = sorted(self._unplaced)[:UNPLACED]

    def keep(self, found: Candidate, offsets: Ints) -> None:
        """Make it the incumbent; offsets (bytes) in the order of its blocks."""
        self.best = _Incumbent(found.cost_us, found, offsets)

    def place_the_unplaced(self, most: int = UNPLACED) -> None:
        """Search layouts for the cheapest runs that no greedy one would fit."""
        for _, _, found, order in self._unplaced[:most]:
            if self.request.out_of_time():
                return
            self.offer(found, order)
        self._unplaced.clear()

    def runs(self, budget: int, rules: Iterable[int]) -> Iterator[tuple[int, Record]]:
        """What each of these rules that completes makes of a logical budget, by its number."""
        for number in rules:
            run = self.runner(budget, self.settings[number])
            if run is not None:
                yield number, run

    def solution(self) -> Solution:
        """The incumbent as a placed schedule."""
        assert self.best.found is not None
        found = self.best.found
        schedule = Schedule.of(self.problem, found.run.ops)
        return Solution(schedule.place(self.best.offsets, found.blocks))

    def portfolio(self) -> None:
        """Every rule at the arena's own size, then the best rules over the grid around it."""
        here = self._step(self.request.arena_bytes)
        rules = self.best_rules(here)
        for low, high in GRID_WINDOWS:
            for step in range(here + high, here + low, -1):
                for number in rules:
                    self.consider(int(GRID_RATIO**step), self.settings[number])
                    enough = self.request.any_schedule or self.request.out_of_time()
                    if self.best.found is not None and enough:
                        return
            if self.best.found is not None:
                return
            rules = list(range(len(self.settings)))

    def best_rules(self, step: int) -> list[int]:
        """Numbers of the rules by their cost at a grid step, on large graphs the first few."""
        every = range(len(self.settings))
        cost = {number: run.cost_us for number, run in self.runs(int(GRID_RATIO**step), every)}
        ranked = sorted(every, key=lambda number: cost.get(number, np.inf))
        return ranked if self.problem.op_count <= SMALL_OPS else ranked[:BEST_RULES]

    def climb(self, steps: int) -> None:
        """Trails around the arena in turn, each of them as often, in all so many steps or more."""
        trails = self._trails()
        turns = -(-steps // max(1, len(trails)))
        for done, trail in enumerate(trails * turns):
            if self.request.out_of_time():
                return
            if done % 16 == 0:
                self.report(done / (turns * len(trails)))
            trail.step(self)

    def report(self, fraction: float | None) -> None:
        """The incumbent's overhead as progress."""
        if self.request.progress is not None:
            overhead = self.best.cost_us / max(self.problem.base_cost_us, 1e-12) - 1
            self.request.progress(Progress(f"improving: overhead {overhead:.2%}", fraction))

    def _trails(self) -> list["Trail"]:
        """Trails from the grid steps whose plans need about as much as there is."""
        assert self.best.found is not None
        middle = self._step(self.best.found.budget) // TRAIL_SPACING * TRAIL_SPACING
        # Ranked at a coarser step, so that neighbouring arenas agree on the rules.
        rules = self.best_rules(middle // RANK_STEPS * RANK_STEPS)
        trails = []
        for step in range(middle - 2 * TRAIL_SPACING, middle + TRAIL_SPACING + 1, TRAIL_SPACING):
            trail = Trail.start(self, step, rules)
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
    def start(cls, search: Search, step: int, rules: list[int]) -> "Trail | None":
        """The best of these rules at this grid step; None when none of them completes there."""
        budget = int(GRID_RATIO**step)
        found = [(run.cost_us, number, run) for number, run in search.runs(budget, rules)]
        if not found:
            return None
        cost, number, run = min(found, key=lambda entry: entry[:2])
        settings = search.settings[number]
        ends = []
        for side in (-SLOPE_STEPS, SLOPE_STEPS):
            at = search.runner(int(GRID_RATIO ** (step + side)), settings)
            if at is not None:
                ends.append((np.log(at.blocks(search.arrays).live), at.cost_us))
        slope = 0.0
        if len(ends) == 2 and ends[1][0] > ends[0][0]:
            slope = max(0.0, (ends[0][1] - ends[1][1]) / (ends[1][0] - ends[0][0]))
        value = cost + slope * np.log(run.blocks(search.arrays).live)
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
        found = search.simulate(budget, settings)
        if found is None:
            return
        search.offer(found)
        value = found.cost_us + self.slope * np.log(found.peak)
        if value < self.value:
            self.settings, self.budget, self.value = settings, budget, value
