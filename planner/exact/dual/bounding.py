"""
A bound for hard models: their relaxation with path cuts, at many more time points than they have.

Where blocks repeat, the time points are the same op in every copy: which op is learned from a few
of the copies, then all of them have it. Elsewhere they are spread over the program. This is run as
a process of its own (`planner.exact.dual.background`), and only ends when everything is a time point.
"""

import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from coop_plan.planner.core.blocks import repetitions
from coop_plan.planner.exact.model.milp import INFINITY, Milp, Relaxation, relaxation_job
from coop_plan.planner.exact.model.paths import PathCuts, Relax
from coop_plan.planner.exact.model.points import initial_points, too_full
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.timepoint import TimePointModel
from coop_plan.planner.exact.solver.process import MEMORY_BYTES
from coop_plan.planner.exact.solver.worker import connect
from coop_plan.planner.exact.solver.worker_lp import Relaxations

SPREAD = 10
"""Time points of the first step where nothing repeats; each step has twice as many."""

SAMPLES = 4
"""Copies of a block from which the choice of an op is learned."""

TRIED = 4
"""How many ops are tried beside those that were chosen before."""

WORTH_KEEPING = 2e-3
"""Share by which an op must raise the bound to be a time point from then on."""

MOSTLY = 0.5
"""Blocks are used if so much of where keeping everything does not fit lies in them."""


@dataclass
class Bounding:
    """
    Better and better relaxations at one capacity (bytes).

    `points` are the time points so far; they begin with some that are known to matter. `tell` hears
    of every bound: what recomputes cost at least, in µs.
    """

    program: Program
    capacity: int
    points: set[int]
    tell: Callable[[float], None]
    paths: PathCuts = field(default_factory=PathCuts)
    _spread: int = SPREAD
    _ranked: list[list[int]] = field(default_factory=list)
    _chosen: list[list[int]] = field(default_factory=list)
    _compare: bool = True

    def run(self) -> None:
        """One step after the other, as long as there are time points to add."""
        self._ranked = self._candidates()
        best = -INFINITY
        while len(self.points) <= self.program.n:
            copies = bool(self._ranked)
            found = self._next_copies() if copies else self._next_spread()
            points, paths = self.points.union(found), list(self.paths.paths)
            if points == self.points:
                continue
            if copies and len(self._chosen) == 2:
                # Alone it is solved sooner, and its cuts are of use in what follows.
                alone = PathCuts(quick=True)
                self._relax(set(found), alone)
                paths += alone.paths
            cuts = PathCuts(paths)
            bound = self._relax(points, cuts)
            if copies and bound < best * (1 + WORTH_KEEPING):
                self._chosen.pop()
                self._compare = False
            else:
                self.points, self.paths, best = points, cuts, max(best, bound)

    def _relax(self, points: set[int], paths: PathCuts) -> float:
        chosen = sorted({*points, self.program.n})
        model = TimePointModel(self.program, self.capacity, chosen, ())
        unit = model.cost_unit
        return paths.strengthen(_relaxing(), model, INFINITY, lambda bound: self.tell(bound * unit))

    def _next_spread(self) -> list[int]:
        points = initial_points(self.program, self.capacity, self._spread)
        self._spread *= 2
        if self.points.issuperset(points) and self._spread > self.program.n:
            return list(range(self.program.n + 1))
        return points

    def _next_copies(self) -> list[int]:
        """
        The op of a block that raises the bound most beside those chosen before, by samples.

        After one that did not raise it the one that was next to it.
        """
        if not self._chosen:
            self._rank()
        elif self._compare:
            before = {point for copies in self._chosen for point in _sample(copies)}
            self._ranked[:TRIED] = sorted(
                self._ranked[:TRIED],
                key=lambda copies: (
                    -self._relax(before.union(_sample(copies)), PathCuts(quick=True))
                ),
            )
        self._compare = True
        self._chosen.append(self._ranked.pop(0))
        return self._chosen[-1]

    def _rank(self) -> None:
        """Ops that alone prove most come first, but those next to better ones last."""
        alone = [
            self._relax(set(_sample(copies)), PathCuts(quick=True, rounds=1))
            for copies in self._ranked
        ]
        beside = [-INFINITY, *alone, -INFINITY]
        order = sorted(
            range(len(alone)),
            key=lambda i: (alone[i] < max(beside[i], beside[i + 2]), -alone[i], i),
        )
        self._ranked = [self._ranked[i] for i in order]

    def _candidates(self) -> list[list[int]]:
        """Every op of every repeated block as its copies, where keeping everything is too much."""
        over = set(too_full(self.program, self.capacity))
        classes = []
        for run in repetitions(self.program.problem):
            for offset in range(run.period):
                copies = [op for op in run.copies(offset) if op in over]
                if len(copies) > 1:
                    classes.append(copies)
        if sum(len(copies) for copies in classes) < MOSTLY * len(over):
            return []
        return classes


def _sample(copies: list[int]) -> list[int]:
    """Some of the copies, evenly spread, the first and the last among them."""
    if len(copies) <= SAMPLES:
        return copies
    return [copies[i * (len(copies) - 1) // (SAMPLES - 1)] for i in range(SAMPLES)]


def _relaxing() -> Relax:
    """As `planner.exact.solver.process.SolverProcess.relax`, in this process; for one growing program."""
    relaxations = Relaxations()

    def relax(milp: Milp, deadline: float, accuracy: float, start: Relaxation | None) -> Relaxation:
        job = relaxation_job(milp, accuracy, start) | {"seconds": deadline}  # as good as never
        _, bound, values, multipliers = relaxations.solve(job)
        return Relaxation(bound, values, multipliers)

    return relax


def main() -> None:
    """The process: a program, a capacity and time points come in, bounds go out."""
    send = connect(MEMORY_BYTES)
    program, capacity, points = pickle.load(sys.stdin.buffer)  # noqa: S301  (from our parent)
    try:
        Bounding(program, capacity, points, send).run()
    except MemoryError:
        return
    except Exception as error:
        send(("failure", f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main()
