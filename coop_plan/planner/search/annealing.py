"""Simulated annealing of sequences: cooling, penalty and restarts for every objective.

The Metropolis search of an objective looks for cheaper sequences within the memory. Candidates may
exceed it at a penalty, which grows as long as they do. Kirkpatrick et al., Optimization by
Simulated Annealing, Science 1983.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.method import Request
from coop_plan.planner.placement.layout import WORK

PENALTY = 5.0
"""Least penalty weight, in base costs per unit of memory excess."""


class Annealing(ABC):
    """Searches sequences of one problem that cost less than the incumbent and have a layout.

    `deadline` is a `time.monotonic` value (s), or None: the length is then a number of steps.
    """

    chunk = 1000
    """Steps between two checks of the result, with a deadline."""

    few_chunks = False
    """True if layouts take long beside steps: without a deadline they are rare, and greedy."""

    def __init__(self, problem: Problem, request: Request) -> None:
        self.problem = problem
        self.request = request
        self.limit = float(request.arena_bytes)  # on live bytes; less once layouts have failed
        self.random = np.random.default_rng(request.seed)

    @property
    @abstractmethod
    def cost_us(self) -> float:
        """Cost of the incumbent, µs."""

    @abstractmethod
    def load(self, sequence: Ints) -> None:
        """Set the stored sequence of the Metropolis search."""

    @abstractmethod
    def stored(self) -> Ints:
        """Copy of the stored sequence."""

    @abstractmethod
    def steps(self, count: int, temperature: float, penalty: float) -> tuple[float, float]:
        """Make so many Metropolis steps; returns cost and excess of the stored sequence."""

    @abstractmethod
    def place(self, sequence: Ints, work: int) -> bool:
        """Make a sequence the incumbent if a layout of effort `work` fits; returns if one does."""

    @abstractmethod
    def report(self) -> None:
        """Report the incumbent as progress."""

    def anneal(
        self,
        sequence: Ints,
        length: int,
        temperature: float,
        enough: Callable[[], bool],
        deadline: float | None = None,
        first_penalty: float = 1.0,
    ) -> tuple[float, Ints]:
        """Anneal from a sequence for `length` steps, or until the deadline, or until `enough`.

        `temperature` is in mean costs of an op. In the first half the penalty weight grows from
        `first_penalty` times `PENALTY` to that: only nearly free evictions pay at first. Returns
        the energy (µs) and the sequence of the best end.
        """
        self.load(sequence)
        base = self.problem.base_cost_us or 1.0  # no cost is no scale
        temperature *= base / max(1, self.problem.op_count)
        events = max(1, sequence.size)
        few = self.few_chunks and deadline is None
        chunks, growth, work = (40, 1.5, 0) if few else (20, 1.05, WORK)
        count = -(-length // chunks)
        patience = 16  # chunks above the memory until a restart from the best end
        if deadline is not None:
            count, growth, patience = self.chunk, 1.01, 50
        stride = -(-chunks * events // 100_000)  # of layouts, in chunks
        best: tuple[float, Ints] | None = None
        cost = excess = math.inf
        factor, streak, done, layouts = 1.0, 0, 0, 0.0

        def now() -> float:
            return done / chunks if deadline is None else time.monotonic()

        begin, end = now(), 1.0 if deadline is None else deadline
        while (left := (end - now()) / max(1e-9, end - begin)) > 0 and not enough():
            if deadline is None and self.request.out_of_time():
                break
            ramp = 1.0 if first_penalty == 1.0 else min(1.0, 2.0 * (1.0 - left))
            penalty = PENALTY * base * first_penalty ** (1.0 - ramp) * factor
            cost, excess = self.steps(count, temperature * left**2, penalty)
            done += 1
            if excess > 0:
                if ramp == 1.0:
                    factor *= growth if best is not None else max(growth, 1.3)
                    streak += 1
                if streak > patience and best is not None:
                    self.load(best[1])
                    streak = 0
                continue
            streak, factor = 0, max(1.0, factor / growth**0.7)
            if best is None or cost < best[0]:
                best = cost, self.stored()
            # With a deadline layouts take at most 0.3 of the time, less while it is hot.
            started = now()
            due = done % stride == 0 and layouts <= 0.3 * (1.0 - left**2) * (started - begin)
            if due and self._saves(cost, work):
                self._place_or_shrink(self.stored(), work)
                layouts += now() - started
            self.report()
        if best is None:
            return cost + PENALTY * base * excess, self.stored()
        if self._saves(best[0], 0):
            self._place_or_shrink(best[1], WORK if self._saves(best[0], WORK) else 0)
        return best

    def _saves(self, cost_us: float, work: int) -> bool:
        """True if a cost saves enough for a layout of effort `work`, greedy if that is 0."""
        return cost_us < self.cost_us * (1.0 - (1e-3 if work else 1e-4))

    def _place_or_shrink(self, sequence: Ints, work: int) -> None:
        """Make a sequence the incumbent; a failed layout reduces the limit of the live bytes."""
        fits = self.place(sequence, work)
        self.limit *= 1.0005 if fits else 1 - 4e-3
        self.limit = min(self.limit, float(self.request.arena_bytes))
