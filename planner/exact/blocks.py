"""Repeated blocks: stretches of the program in which the same ops come again and again."""

from dataclasses import dataclass

import numpy as np

from planner.exact.program import Program

FEWEST = 5
"""Copies of a block from which on it counts as repeated."""


@dataclass(frozen=True)
class Repetition:
    """
    Ops `start` … `start + length − 1`: copies of a block of `period` ops.

    The last copy may be cut short.
    """

    start: int
    period: int
    length: int

    def copies(self, offset: int) -> list[int]:
        """The ops at an offset, 0 … period − 1, in all the copies."""
        return list(range(self.start + offset, self.start + self.length, self.period))


def repetitions(program: Program) -> list[Repetition]:
    """
    The longest disjoint repetitions, the longest one first.

    Two ops are the same if they touch as many tensors of the same bytes and need the same
    workspace; what they cost was measured and is not compared.
    """
    numbers: dict[object, int] = {}
    kind = np.array([numbers.setdefault(_kind(program, op), op) for op in range(program.n)])
    found = []
    for period in range(1, program.n // FEWEST + 1):
        same = np.zeros(program.n - period + 2, dtype=np.int8)
        same[1:-1] = kind[period:] == kind[:-period]
        steps = np.diff(same)
        for start, end in zip(np.flatnonzero(steps > 0), np.flatnonzero(steps < 0), strict=True):
            if end - start >= (FEWEST - 1) * period:
                found.append(Repetition(int(start), period, int(end - start) + period))
    chosen: list[Repetition] = []
    free = np.ones(program.n, dtype=bool)
    for run in sorted(found, key=lambda run: (-run.length, run.period)):
        if free[run.start : run.start + run.length].all():
            free[run.start : run.start + run.length] = False
            chosen.append(run)
    return chosen


def _kind(program: Program, op: int) -> object:
    size = program.problem.size
    touched = (program.reads[op], program.makes[op])
    return program.workspace(op), *(tuple(size[t] for t in tensors) for tensors in touched)
