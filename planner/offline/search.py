"""
coop-offline: plan first with the whole step in view, place second, keep what fits.

A run of the kernel at a logical budget gives a cost and lifetimes; placement gives the arena they
need. Lifetimes end at the last touch, so a run may stay within the arena although its logical
budget is larger, and that is searched for: the portfolio crosses scoring rules with logical budgets
taken from a fixed grid (independent of the arena asked for, so that neighbouring budgets are
answered from the same candidates), then a hill climb perturbs the weights of single retention
intervals around the incumbent.
"""

from dataclasses import dataclass, replace

import numpy as np

from planner.arrays import Arrays, to_arrays
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

CLIMB_OPS = 60_000
"""The hill climb's default length: this many simulated ops in all."""

SEED = 0


@dataclass
class _Incumbent:
    cost_us: float = np.inf
    settings: Settings | None = None
    budget: int = 0
    run: Run | None = None


class Search:
    """The search for one problem and one arena."""

    def __init__(self, problem: Problem, request: Request) -> None:
        self.problem = problem
        self.request = request
        self.arrays: Arrays = to_arrays(problem)
        self.runner = Runner(self.arrays)
        self.best = _Incumbent()
        self.failed_op = problem.largest_working_set[0]

    def consider(self, budget: int, settings: Settings) -> bool:
        """Run at a logical budget; keep it if it is cheaper and its layout fits the arena."""
        arena = self.request.arena_bytes
        run = self.runner(budget, settings, self.best.cost_us)
        if run is None:
            if self.best.run is None:
                self.failed_op = self.runner.failed_op
            return False
        if run.cost_us >= self.best.cost_us:
            return False
        lower, upper, size, peak = lifetimes(self.arrays, run)
        if peak > arena:
            return False
        placement = place(lower, upper, size, capacity=arena, alignment=self.problem.alignment)
        if placement.peak > arena:
            return False
        self.best = _Incumbent(run.cost_us, settings, budget, run)
        return True

    def portfolio(self) -> None:
        """Every rule at the arena's own size, then the best rules over the grid around it."""
        n = self.problem.op_count
        price = np.arange(n + 1, dtype=np.float64)
        weight = np.ones(self.arrays.uses.size + 1)
        rules = [Settings(price, weight, alpha, cap) for alpha in ALPHAS for cap in (False, True)]
        here = int(np.log(max(self.request.arena_bytes, 2)) / np.log(GRID_RATIO))
        cost = {}
        for number, rule in enumerate(rules):
            run = self.runner(int(GRID_RATIO**here), rule)
            cost[number] = np.inf if run is None else run.cost_us
        ranked = sorted(range(len(rules)), key=lambda number: cost[number])
        for low, high in GRID_WINDOWS:
            for step in range(here + high, here + low, -1):
                for number in ranked if n <= SMALL_OPS else ranked[:BEST_RULES]:
                    self.consider(int(GRID_RATIO**step), rules[number])
                    if self.best.run is not None and self.request.out_of_time():
                        return
            if self.best.run is not None:
                return
            ranked, n = list(range(len(rules))), 0

    def climb(self, steps: int | None) -> None:
        """Perturb the incumbent's weights and budget; `steps` None means until the deadline."""
        random = np.random.default_rng(SEED)
        done = 0
        while steps is None or done < steps:
            if self.request.out_of_time():
                return
            if self.request.progress is not None and done % 16 == 0:
                overhead = self.best.cost_us / max(self.problem.base_cost_us, 1e-12) - 1
                self.request.progress(
                    Progress(f"improving: overhead {overhead:.2%}", done / steps if steps else None)
                )
            done += 1
            base = self.best.settings
            assert base is not None
            spread = random.choice([0.1, 0.3, 1.0])
            touched = random.random(base.weight.size) < random.choice([0.02, 0.1, 0.5])
            factor = np.exp(random.normal(0.0, spread, base.weight.size))
            settings = Settings(
                base.price,
                np.where(touched, base.weight * factor, base.weight),
                float(random.choice(ALPHAS)) if random.random() < 0.1 else base.alpha,
                base.cap,
            )
            self.consider(int(self.best.budget * np.exp(random.normal(0.0, 0.01))), settings)


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
