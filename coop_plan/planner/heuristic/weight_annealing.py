"""Simulated annealing of the weights for one arena: the first use of the remaining time.

Starting from the incumbent's settings, the weights of retention intervals are perturbed, in the
whole program or in a window, one by one or equally in all copies of a repeated block. A run is
judged by its cost and by the excess of its layout over the arena. The layout is not searched but
estimated from the live peak and the outcome of earlier layouts. Kirkpatrick et al., Optimization by
Simulated Annealing, Science 1983.
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


class WeightAnnealing:
    """Improves a portfolio's incumbent until a deadline (a `time.monotonic` value, s).

    `classes` is the result of `interval_classes`.
    """

    def __init__(self, portfolio: Portfolio, classes: Ints, deadline: float) -> None:
        self.portfolio = portfolio
        self.params = portfolio.params.weight_annealing
        self.begin, self.deadline = time.monotonic(), deadline
        self.random = np.random.default_rng(portfolio.request.seed)
        self.classes = classes
        self.use_positions = np.append(portfolio.arrays.uses, portfolio.problem.op_count)
        self.layout_ratio = 1.0  # estimate of layout / live peak
        self.penalty = self.params.penalty
        self.idle_steps = 0
        self.layout_seconds = 0.0

    def run(self, enough: Callable[[], bool]) -> None:
        """Anneal from the incumbent until the deadline or until `enough` returns True."""
        params, portfolio, current = self.params, self.portfolio, self.portfolio.best.found
        assert current is not None
        base_cost = portfolio.problem.base_cost_us
        step = 0
        while (now := time.monotonic()) < self.deadline:
            cooled = ((self.deadline - now) / (self.deadline - self.begin)) ** params.cooling
            increase = cooled * params.temperature * base_cost * self.random.exponential()
            found = self._neighbour(current, self._energy(current) + increase)
            if found is not None:
                current = found
            if step % params.check_steps == 0:
                if enough():
                    return
                portfolio.report(None)
            step += 1

    def _energy(self, found: Candidate) -> float:
        excess = np.log(found.peak * self.layout_ratio / self.portfolio.request.arena_bytes)
        return float(
            found.cost_us + self.penalty * self.portfolio.problem.base_cost_us * max(0.0, excess)
        )

    def _neighbour(self, current: Candidate, limit: float) -> Candidate | None:
        """Perturb a run and offer the result; None if it fails or its energy is above `limit`."""
        params, portfolio, random = self.params, self.portfolio, self.random
        settings, budget = self._perturbed(current), current.budget
        if random.random() < params.budget_chance:
            spread = portfolio.params.perturbation.budget_spread
            budget = int(budget * np.exp(random.normal(0.0, spread)))
        found = portfolio.candidate(budget, settings, limit)
        if found is None:
            self._note_idle(current)
            return None
        worthy = found.cost_us < portfolio.best.cost_us * (1 - params.min_saving)
        if worthy and found.peak * self.layout_ratio <= portfolio.request.arena_bytes:
            self.idle_steps = 0
            self.penalty = max(params.penalty, self.penalty / params.penalty_growth)
            before = portfolio.best.found
            portfolio.offer(found)
            now = time.monotonic()
            spare = params.layout_share * (now - self.begin) - self.layout_seconds
            if portfolio.best.found is before and spare > 0:
                portfolio.place_unplaced(1)
                self.layout_seconds += time.monotonic() - now
            if portfolio.best.found is before:
                self.layout_ratio *= params.layout_ratio_growth
            else:
                self.layout_ratio = max(1.0, self.layout_ratio / params.layout_ratio_decay)
        else:
            self._note_idle(current)
        return found if self._energy(found) < limit else None

    def _note_idle(self, current: Candidate) -> None:
        """Count a run without a layout attempt; after many raise the penalty or lower the ratio."""
        self.idle_steps += 1
        if self.idle_steps > self.params.max_idle_steps:
            self.idle_steps = 0
            if current.peak * self.layout_ratio > self.portfolio.request.arena_bytes:
                self.penalty *= self.params.penalty_growth
            else:
                self.layout_ratio = max(1.0, self.layout_ratio / self.params.layout_ratio_growth)

    def _perturbed(self, current: Candidate) -> Settings:
        random, params, perturbation = self.random, self.params, self.portfolio.params.perturbation
        base = current.settings
        class_of = self.classes
        if random.random() >= params.class_chance:
            class_of = np.arange(class_of.size)
        classes = int(class_of.max()) + 1
        if random.random() < params.few_chance:
            few = random.choice(classes, random.integers(1, params.max_few + 1))
            changed = np.isin(class_of, few)
        else:
            draws = random.random(classes)
            changed = (draws < random.choice(perturbation.perturbed_shares))[class_of]
        if random.random() < params.window_chance:
            n = self.portfolio.problem.op_count
            shortest, longest = params.window_divisors
            length = random.integers(n // shortest + 1, n // longest + 2)
            begin = random.integers(-length, n)
            changed &= (self.use_positions >= begin) & (self.use_positions < begin + length)
        if random.random() < perturbation.correction_chance:
            factor = current.run.corrections(perturbation.max_correction) ** random.random()
        else:
            noise = random.normal(0.0, random.choice(perturbation.spreads), classes)
            factor = np.exp(noise)[class_of]
        weight: Floats = np.where(changed, base.weight * factor, base.weight)
        alpha = base.alpha
        if random.random() < params.exponent_chance:
            alpha = float(random.choice(perturbation.exponents))
        return replace(base, weight=weight, alpha=alpha)


def interval_classes(problem: Problem, arrays: Arrays) -> Ints:
    """Class number per entry of `Settings.weight`, the same for its copies in repeated blocks.

    Two entries are copies if the ops that produce and use their tensors are.
    """
    n = problem.op_count
    copy_of = np.arange(n + 1)
    for run in repetitions(problem):
        for offset in range(run.period):
            copies = run.copies(offset)
            copy_of[copies] = copies[0]
    producer = np.array(problem.producer, dtype=np.int64)
    producers = np.where(producer >= 0, copy_of[producer], -1 - np.arange(producer.size))
    output = np.zeros(producer.size, dtype=np.int64)
    for outputs in problem.makes:
        output[list(outputs)] = np.arange(len(outputs))
    uses = np.diff(arrays.uses_ptr)
    entries = np.stack(
        [np.repeat(producers, uses), np.repeat(output, uses), copy_of[arrays.uses]], axis=1
    )
    numbers = np.unique(entries, axis=0, return_inverse=True)[1].reshape(-1)
    return np.append(numbers, numbers.max(initial=-1) + 1)
