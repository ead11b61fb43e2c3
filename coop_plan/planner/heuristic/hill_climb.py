"""Hill climbing from plans about as large as the arena, towards less cost for less memory.

Several searches, which ignore the arena, perturb the weights of single retention intervals.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from coop_plan.planner.core.arrays import Floats
from coop_plan.planner.heuristic.eviction_run import Settings
from coop_plan.planner.heuristic.params import EXPONENTS
from coop_plan.planner.heuristic.portfolio import Portfolio

REPORT_STEPS = 16
"""Steps between two progress reports."""

MAX_CORRECTION = 10.0
"""Largest factor of a learned correction, up or down."""


class HillClimbs:
    """Hill climbs around the arena in turn, with equal numbers of steps; offers all their plans.

    From each start one search perturbs the weights and another also applies learned corrections.
    Each has its own steps and random numbers.
    """

    def __init__(self, portfolio: Portfolio) -> None:
        self.portfolio = portfolio
        self.searches = _starts(portfolio)
        self._done = 0

    def run(self) -> None:
        """Make a number of steps that depends on the ops alone."""
        ops = max(1, self.portfolio.problem.op_count)
        steps = max(20, min(500, 4 * ops, self.portfolio.params.hill_climbing_ops // ops))
        total = -(-steps // max(1, len(self.searches) // 2)) * len(self.searches)
        while self._done < total and not self.portfolio.request.out_of_time():
            if self._done % REPORT_STEPS == 0:
                self.portfolio.report(self._done / total)
            self._step()

    def run_until(self, deadline: float, enough: Callable[[], bool]) -> None:
        """Continue until the deadline (`time.monotonic`, s) or until `enough` returns True."""
        while self.searches and time.monotonic() < deadline:
            if self._done % REPORT_STEPS == 0:
                if enough():
                    break
                self.portfolio.report(None)
            self._step()
        self.portfolio.place_unplaced()

    def _step(self) -> None:
        self.searches[self._done % len(self.searches)].step(self.portfolio)
        self._done += 1


def _starts(portfolio: Portfolio) -> list["HillClimb"]:
    """Searches from the grid steps whose plans need about as much memory as the arena has."""
    assert portfolio.best.found is not None
    spacing = 2  # grid steps between neighbouring starts
    middle = portfolio.step(portfolio.best.found.budget) // spacing * spacing
    # Ranked at a coarser step, so that neighbouring arenas agree on the rules.
    rules = portfolio.best_rules(middle // 16 * 16)
    searches = []
    for number in range(-2, 2):  # starts around the incumbent's grid step
        search = HillClimb.start(portfolio, middle + number * spacing, rules)
        if search is not None:
            searches.append(search)
    return [*searches, *(search.with_corrections(portfolio) for search in searches)]


@dataclass
class HillClimb:
    """A hill climb that ignores the arena: from a grid step towards less cost for less memory.

    Neighbouring arenas run the same climbs and see the same plans, of which each takes the cheapest
    that fits. That keeps overhead from rising with the budget. `slope` is the value of memory
    around the start, in µs per unit of log(bytes). `correction` holds the learned corrections of
    the current run; a step applies them with probability `correction_chance`.
    """

    seed: int
    random: np.random.Generator
    settings: Settings
    budget: int
    value: float
    slope: float
    correction: Floats
    correction_chance: float = 0.0

    @classmethod
    def start(cls, portfolio: Portfolio, step: int, rules: list[int]) -> "HillClimb | None":
        """Start from the best of these rules at a grid step; None if none completes there."""
        budget = portfolio.budget(step)
        found = portfolio.runs(budget, rules, 1)
        if not found:
            return None
        cost, number, run = found[0]
        settings = portfolio.settings[number]
        ends = []
        for side in (-3, 3):  # grid steps
            at = portfolio.runner(portfolio.budget(step + side), settings)
            if at is not None:
                ends.append((_log_bytes(at.blocks(portfolio.arrays).live), at.cost_us))
        slope = 0.0
        if len(ends) == 2 and ends[1][0] > ends[0][0]:
            slope = max(0.0, (ends[0][1] - ends[1][1]) / (ends[1][0] - ends[0][0]))
        value = cost + slope * _log_bytes(run.blocks(portfolio.arrays).live)
        seed = max(step, 0)
        random = np.random.default_rng([portfolio.request.seed, seed])
        correction = run.corrections(MAX_CORRECTION)
        return cls(seed, random, settings, budget, value, slope, correction)

    def with_corrections(self, portfolio: Portfolio) -> "HillClimb":
        """Another search from the same start, with learned corrections."""
        random = np.random.default_rng([portfolio.request.seed, self.seed, 1])
        return replace(self, random=random, correction_chance=0.5)

    def step(self, portfolio: Portfolio) -> None:
        """Perturb or correct the settings of the current run; move there if the value falls."""
        random, base = self.random, self.settings
        corrects = self.correction_chance > 0 and random.random() < self.correction_chance
        spread = 0.0 if corrects else random.choice((0.1, 0.3, 1.0))  # of the weights' logarithms
        share = random.choice((0.1, 0.5, 1.0) if corrects else (0.02, 0.1, 0.5))  # of the weights
        changed = np.flatnonzero(random.random(base.weight.size) < share)
        weight = base.weight.copy()
        if corrects:
            weight[changed] *= self.correction[changed] ** random.random()
        else:
            weight[changed] *= np.exp(random.normal(0.0, spread, changed.size))
        settings = replace(
            base,
            weight=weight,
            alpha=float(random.choice(EXPONENTS)) if random.random() < 0.1 else base.alpha,
        )
        budget = int(self.budget * np.exp(random.normal(0.0, 0.01)))
        # Above this cost a run helps neither the portfolio nor this search.
        cost_limit = max(self.value, portfolio.best.cost_us)
        found = portfolio.candidate(budget, settings, cost_limit)
        if found is None:
            return
        portfolio.offer(found)
        value = found.cost_us + self.slope * _log_bytes(found.peak)
        if value < self.value:
            self.settings, self.budget, self.value = settings, budget, value
            self.correction = found.run.corrections(MAX_CORRECTION)


def _log_bytes(peak: int) -> float:
    return float(np.log(max(1, peak)))
