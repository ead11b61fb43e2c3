"""Repeated blocks: stretches of the program that repeat the same sequence of ops."""

from dataclasses import dataclass

import numpy as np

from coop_plan.planner.core.problem import Problem

MIN_COPIES = 5
"""Copies of a block that make a repetition."""


@dataclass(frozen=True)
class Repetition:
    """Ops `start` … `start + length − 1`: copies of a block of `period` ops.

    The last copy may be cut short.
    """

    start: int
    period: int
    length: int

    def copies(self, offset: int) -> list[int]:
        """The ops at an offset, 0 … period − 1, in all the copies."""
        return list(range(self.start + offset, self.start + self.length, self.period))


def repetitions(problem: Problem) -> list[Repetition]:
    """The longest disjoint repetitions, the longest one first.

    Two ops are equal if the sizes of their inputs, outputs and workspace are. Costs are measured
    and not compared.
    """
    n = problem.op_count
    numbers: dict[object, int] = {}
    kind = np.array([numbers.setdefault(_kind(problem, op), op) for op in range(n)])
    found = []
    for period in range(1, n // MIN_COPIES + 1):
        same = np.zeros(n - period + 2, dtype=np.int8)
        same[1:-1] = kind[period:] == kind[:-period]
        steps = np.diff(same)
        for start, end in zip(np.flatnonzero(steps > 0), np.flatnonzero(steps < 0), strict=True):
            if end - start >= (MIN_COPIES - 1) * period:
                found.append(Repetition(int(start), period, int(end - start) + period))
    chosen: list[Repetition] = []
    free = np.ones(n, dtype=bool)
    for run in sorted(found, key=lambda run: (-run.length, run.period)):
        if free[run.start : run.start + run.length].all():
            free[run.start : run.start + run.length] = False
            chosen.append(run)
    return chosen


def _kind(problem: Problem, op: int) -> object:
    used = (problem.reads[op], problem.makes[op])
    return problem.workspace[op], *(tuple(problem.size[t] for t in side) for side in used)
