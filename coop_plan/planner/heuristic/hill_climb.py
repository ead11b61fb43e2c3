"""
The hill climb: from plans about as large as the arena, towards less cost for less memory.

Several climbs, which do not know the arena, perturb the weights of single retention intervals.
"""

from dataclasses import dataclass, replace

import numpy as np

from coop_plan.planner.core.arrays import Floats
from coop_plan.planner.heuristic.eviction_run import Settings
from coop_plan.planner.heuristic.portfolio import Portfolio


def hill_climb(portfolio: Portfolio) -> None:
    """
    Climbs around the arena in turn, each of them as often; their plans go to the portfolio.

    From each start there are two: one perturbs the weights, the other learns, too, from what its
    evictions took. Each has its own steps, so that neither takes from the other.
    """
    params = portfolio.params.hill_climb
    ops = max(1, portfolio.problem.op_count)
    most = min(params.most_steps, params.steps_per_op * ops)
    steps = max(params.fewest_steps, min(most, params.ops // ops))
    starts = _starts(portfolio)
    turns = -(-steps // max(1, len(starts) // 2))
    for done, one in enumerate(starts * turns):
        if portfolio.request.out_of_time():
            return
        if done % params.report_steps == 0:
            portfolio.report(done / (turns * len(starts)))
        one.step(portfolio)


def _starts(portfolio: Portfolio) -> list["HillClimb"]:
    """Climbs from the grid steps whose plans need about as much as there is."""
    assert portfolio.best.found is not None
    params = portfolio.params.hill_climb
    spacing, rank = params.spacing, params.rank_steps
    middle = portfolio.step(portfolio.best.found.budget) // spacing * spacing
    # Ranked at a coarser step, so that neighbouring arenas agree on the rules.
    rules = portfolio.best_rules(middle // rank * rank)
    starts = []
    for number in range(-params.starts_below, params.starts_above + 1):
        one = HillClimb.start(portfolio, middle + number * spacing, rules)
        if one is not None:
            starts.append(one)
    return [*starts, *(one.that_learns(portfolio) for one in starts)]


@dataclass
class HillClimb:
    """
    A hill climb that does not know the arena: from a grid step, towards less cost for less memory.

    Neighbouring arenas make the same climbs and so see the same plans, of which each takes the
    cheapest that fits; that is what keeps overhead from rising with the budget. `slope` is what a
    factor e of memory is worth, in µs, around the start; `correction` the factors by which the
    weights were wrong where it stands, of which a step makes use with `correction_chance`.
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
        """The best of these rules at this grid step; None when none of them completes there."""
        budget = portfolio.budget(step)
        found = portfolio.runs(budget, rules, 1)
        if not found:
            return None
        cost, number, run = found[0]
        settings = portfolio.settings[number]
        ends = []
        slope_steps = portfolio.params.hill_climb.slope_steps
        for side in (-slope_steps, slope_steps):
            at = portfolio.runner(portfolio.budget(step + side), settings)
            if at is not None:
                ends.append((_level(at.blocks(portfolio.arrays).live), at.cost_us))
        slope = 0.0
        if len(ends) == 2 and ends[1][0] > ends[0][0]:
            slope = max(0.0, (ends[0][1] - ends[1][1]) / (ends[1][0] - ends[0][0]))
        value = cost + slope * _level(run.blocks(portfolio.arrays).live)
        seed = max(step, 0)
        random = np.random.default_rng([portfolio.request.seed, seed])
        correction = run.corrections(portfolio.params.perturbation.most_learned)
        return cls(seed, random, settings, budget, value, slope, correction)

    def that_learns(self, portfolio: Portfolio) -> "HillClimb":
        """Another one from the same start, with lessons."""
        random = np.random.default_rng([portfolio.request.seed, self.seed, 1])
        chance = portfolio.params.perturbation.correction_chance
        return replace(self, random=random, correction_chance=chance)

    def step(self, portfolio: Portfolio) -> None:
        """
        Change the weights and the budget; stay where cost and memory together got less.

        Weights are perturbed, or follow what evictions took in the run that is stood upon.
        """
        random, base, params = self.random, self.settings, portfolio.params.perturbation
        if self.correction_chance > 0 and random.random() < self.correction_chance:
            touched = random.random(base.weight.size) < random.choice(params.corrected_shares)
            factor = self.correction ** random.random()
        else:
            spread = random.choice(params.spreads)
            touched = random.random(base.weight.size) < random.choice(params.touched)
            factor = np.exp(random.normal(0.0, spread, base.weight.size))
        chance = portfolio.params.hill_climb.exponent_chance
        settings = replace(
            base,
            weight=np.where(touched, base.weight * factor, base.weight),
            alpha=float(random.choice(params.exponents))
            if random.random() < chance
            else base.alpha,
        )
        budget = int(self.budget * np.exp(random.normal(0.0, params.budget_spread)))
        dearest = max(self.value, portfolio.best.cost_us)  # which neither of the two below takes
        found = portfolio.candidate(budget, settings, dearest)
        if found is None:
            return
        portfolio.offer(found)
        value = found.cost_us + self.slope * _level(found.peak)
        if value < self.value:
            self.settings, self.budget, self.value = settings, budget, value
            self.correction = found.run.corrections(params.most_learned)


def _level(peak: int) -> float:
    """Of bytes, what the slope counts by: their logarithm."""
    return float(np.log(max(1, peak)))
