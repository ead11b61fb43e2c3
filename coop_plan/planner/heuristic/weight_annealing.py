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
from dataclasses import replace

import numpy as np

from coop_plan.planner.core.arrays import Arrays, Floats, Ints
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.repeated_blocks import repetitions
from coop_plan.planner.heuristic.eviction_run import Settings
from coop_plan.planner.heuristic.portfolio import Candidate, Portfolio


class Annealing:
    """
    Improves a portfolio's incumbent until a deadline (a `time.monotonic` value, s).

    `kinds` is what `repeated_groups` returns.
    """

    def __init__(self, portfolio: Portfolio, kinds: Ints, deadline: float) -> None:
        self.portfolio = portfolio
        self.params = portfolio.params.annealing
        self.begin, self.deadline = time.monotonic(), deadline
        self.random = np.random.default_rng(portfolio.request.seed)
        self.kinds = kinds
        self.where = np.append(portfolio.arrays.uses, portfolio.problem.op_count)
        self.over = 1.0  # layout over live peak, as it turned out
        self.penalty = self.params.penalty
        self.idle = 0
        self.layouts = 0.0  # seconds

    def run(self, enough: Callable[[], bool]) -> None:
        """Steps from the incumbent until the deadline or `enough`."""
        params, portfolio, current_sequence = self.params, self.portfolio, self.portfolio.best.found
        assert current_sequence is not None
        base_cost = portfolio.problem.base_cost_us
        step = 0
        while (now := time.monotonic()) < self.deadline:
            temperature = ((self.deadline - now) / (self.deadline - self.begin)) ** params.cooling
            worse = temperature * params.temperature * base_cost * self.random.exponential()
            found = self._neighbour(current_sequence, self._value(current_sequence) + worse)
            if found is not None:
                current_sequence = found
            if step % params.check_steps == 0:
                if enough():
                    return
                portfolio.report(None)
            step += 1

    def _value(self, found: Candidate) -> float:
        excess = np.log(found.peak * self.over / self.portfolio.request.arena_bytes)
        return float(
            found.cost_us + self.penalty * self.portfolio.problem.base_cost_us * max(0.0, excess)
        )

    def _neighbour(self, current_sequence: Candidate, limit: float) -> Candidate | None:
        """Perturb a run and offer what comes of it; None where that fails or is over the limit."""
        params, portfolio, random = self.params, self.portfolio, self.random
        settings, budget = self._perturbed(current_sequence), current_sequence.budget
        if random.random() < params.budget_chance:
            spread = portfolio.params.perturbation.budget_spread
            budget = int(budget * np.exp(random.normal(0.0, spread)))
        found = portfolio.candidate(budget, settings, limit)
        if found is None:
            self._idle(current_sequence)
            return None
        worthy = found.cost_us < portfolio.best.cost_us * (1 - params.worth_placing)
        if worthy and found.peak * self.over <= portfolio.request.arena_bytes:
            self.idle = 0
            self.penalty = max(params.penalty, self.penalty / params.penalty_growth)
            before = portfolio.best.found
            portfolio.offer(found)
            now = time.monotonic()
            spare = params.layout_share * (now - self.begin) - self.layouts
            if portfolio.best.found is before and spare > 0:
                portfolio.place_the_unplaced(1)
                self.layouts += time.monotonic() - now
            if portfolio.best.found is before:
                self.over *= params.tighter
            else:
                self.over = max(1.0, self.over / params.looser)
        else:
            self._idle(current_sequence)
        return found if self._value(found) < limit else None

    def _idle(self, current_sequence: Candidate) -> None:
        """Note a run that was not worth a layout; after some of them, judge them otherwise."""
        self.idle += 1
        if self.idle > self.params.idle_steps:
            self.idle = 0
            if current_sequence.peak * self.over > self.portfolio.request.arena_bytes:
                self.penalty *= self.params.penalty_growth
            else:
                self.over = max(1.0, self.over / self.params.tighter)

    def _perturbed(self, current_sequence: Candidate) -> Settings:
        random, params, perturbation = self.random, self.params, self.portfolio.params.perturbation
        base = current_sequence.settings
        kind = self.kinds if random.random() < params.group_chance else np.arange(self.kinds.size)
        kinds = int(kind.max()) + 1
        if random.random() < params.few_chance:
            touched = np.isin(kind, random.choice(kinds, random.integers(1, params.few + 1)))
        else:
            touched = (random.random(kinds) < random.choice(perturbation.touched))[kind]
        if random.random() < params.stretch_chance:
            n = self.portfolio.problem.op_count
            shortest, longest = params.stretch_divisors
            width = random.integers(n // shortest + 1, n // longest + 2)
            low = random.integers(-width, n)
            touched &= (self.where >= low) & (self.where < low + width)
        if random.random() < perturbation.correction_chance:
            factor = current_sequence.run.corrections(perturbation.most_learned) ** random.random()
        else:
            factor = np.exp(random.normal(0.0, random.choice(perturbation.spreads), kinds))[kind]
        weight: Floats = np.where(touched, base.weight * factor, base.weight)
        alpha = base.alpha
        if random.random() < params.exponent_chance:
            alpha = float(random.choice(perturbation.exponents))
        return replace(base, weight=weight, alpha=alpha)


def repeated_groups(problem: Problem, arrays: Arrays) -> Ints:
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
