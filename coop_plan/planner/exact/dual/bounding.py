"""Lower bound for hard models: relaxations with path cuts, at many more time points.

If blocks repeat, the same op of every copy becomes a time point: the op is chosen on a few copies.
Otherwise time points are spread over the program. This module is the main module of the bounding
process (`planner.exact.dual.background`), which ends once every op is a time point.
"""

import pickle
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from coop_plan.planner.core.repeated_blocks import repetitions
from coop_plan.planner.exact.dual.any_order import AnyOrderBounding
from coop_plan.planner.exact.dual.background import BoundingJob
from coop_plan.planner.exact.model.milp import INFINITY, Milp, Outcome, Relaxation
from coop_plan.planner.exact.model.paths import Path, PathCuts, Relax
from coop_plan.planner.exact.model.point_selection import initial_points, ops_over_capacity
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.timepoint import TimePointModel
from coop_plan.planner.exact.params import DEFAULTS, ExactParams
from coop_plan.planner.exact.solver import simplex
from coop_plan.planner.exact.solver.jobs import Failure, RelaxMilp, SolveMilp
from coop_plan.planner.exact.solver.milp_solvers import solve_milp
from coop_plan.planner.exact.solver.pdlp import Relaxations
from coop_plan.planner.exact.solver.worker import connect


@dataclass
class Bounding:
    """Increasingly tight relaxations at one capacity (bytes).

    `points` are the time points so far, initially some that are known to matter. Each lower bound
    on the cost (µs) is passed to `report`.
    """

    program: Program
    capacity: int
    points: set[int]
    report: Callable[[float], None]
    params: ExactParams = DEFAULTS
    paths: PathCuts = field(init=False)
    _spread_count: int = field(init=False)
    _ranked: list[list[int]] = field(default_factory=list)
    _chosen: list[list[int]] = field(default_factory=list)
    _rerank: bool = True
    _best: float = -INFINITY
    _model: TimePointModel | None = None

    def __post_init__(self) -> None:
        self.paths = self._path_cuts()
        self._spread_count = self.params.first_spread

    def run(self) -> None:
        """Solve relaxation after relaxation until there are no time points to add."""
        if self.program.host_link is not None:
            self._choose_few()
        else:
            self._ranked = self._candidates()
        best = -INFINITY
        while len(self.points) <= self.program.n:
            copies = bool(self._ranked)
            found = self._next_copies() if copies else self._next_spread()
            points, paths = self.points.union(found), list(self.paths.paths)
            if points == self.points:
                continue
            if copies and len(self._chosen) == 2:
                # Its relaxation alone is solved sooner, and its cuts also hold in the larger one.
                alone = self._path_cuts(quick=True)
                self._relax(set(found), alone)
                paths += alone.paths
            cuts = self._path_cuts(paths)
            bound = self._relax(points, cuts)
            if copies and bound < best * (1 + 2e-3):  # the op is not worth a time point
                self._chosen.pop()
                self._rerank = False
            else:
                self.points, self.paths, best = points, cuts, max(best, bound)

    def _path_cuts(
        self, paths: Iterable[Path] = (), *, quick: bool = False, rounds: int | None = None
    ) -> PathCuts:
        return PathCuts(self.params.min_violation, list(paths), quick, rounds)

    def _relax(self, points: set[int], paths: PathCuts) -> float:
        chosen = sorted({*points, self.program.n})
        model = TimePointModel(self.program, self.capacity, chosen)
        bound = paths.strengthen(
            _local_relax(), model, INFINITY, lambda bound: self.report(model.bound_us(bound))
        )
        if model.transfers is not None and not paths.quick and bound > self._best:
            self._best, self._model = bound, model
        return bound

    def _choose_few(self) -> None:
        """Start from the best of a few models, each with time points of its own.

        With transfers the choice of time points matters more than their number. Fractional
        transfers weaken the relaxation more than fractional runs, so the best model is also solved
        as a MILP.
        """
        for count in (4, 8, 20):  # time points
            points = set(initial_points(self.program, self.capacity, count))
            self._relax(points, self._path_cuts())
        self._solve_integral(20.0)
        if self._model is not None:
            self.points = {*self._model.points[:-1]}

    def _solve_integral(self, seconds: float) -> None:
        if self._model is None or len(self._model.milp.lower) > 6000:
            return
        bound_us = self._model.bound_us
        answer = solve_milp(
            SolveMilp(self._model.milp), seconds, lambda p: self.report(bound_us(p.bound))
        )
        if answer.outcome is not Outcome.INFEASIBLE:
            self.report(bound_us(answer.bound))

    def _next_spread(self) -> list[int]:
        points = initial_points(self.program, self.capacity, self._spread_count)
        self._spread_count *= 2
        if self.points.issuperset(points) and self._spread_count > self.program.n:
            return list(range(self.program.n + 1))
        return points

    def _next_copies(self) -> list[int]:
        """The op of a block that raises the bound most with those chosen before, on sampled copies.

        If the last choice did not raise the bound, the next in rank.
        """
        if not self._chosen:
            self._rank()
        elif self._rerank:
            before = {point for copies in self._chosen for point in self._sample(copies)}
            self._ranked[:4] = sorted(
                self._ranked[:4],
                key=lambda copies: (
                    -self._relax(before.union(self._sample(copies)), self._path_cuts(quick=True))
                ),
            )
        self._rerank = True
        self._chosen.append(self._ranked.pop(0))
        return self._chosen[-1]

    def _rank(self) -> None:
        """Sort ops by their bound alone; ops next to better ones come last."""
        alone = [
            self._relax(set(self._sample(copies)), self._path_cuts(quick=True, rounds=1))
            for copies in self._ranked
        ]
        neighbours = [-INFINITY, *alone, -INFINITY]
        order = sorted(
            range(len(alone)),
            key=lambda i: (alone[i] < max(neighbours[i], neighbours[i + 2]), -alone[i], i),
        )
        self._ranked = [self._ranked[i] for i in order]

    def _candidates(self) -> list[list[int]]:
        """The copies over capacity of every op of every repeated block; empty if blocks cover too
        few ops.
        """
        over = set(ops_over_capacity(self.program, self.capacity))
        classes = []
        for run in repetitions(self.program.problem):
            for offset in range(run.period):
                copies = [op for op in run.copies(offset) if op in over]
                if len(copies) > 1:
                    classes.append(copies)
        least = self.params.min_block_share * len(over)
        return [] if sum(map(len, classes)) < least else classes

    def _sample(self, copies: list[int]) -> list[int]:
        """Evenly spaced copies, including the first and the last."""
        count = 4
        if len(copies) <= count:
            return copies
        return [copies[i * (len(copies) - 1) // (count - 1)] for i in range(count)]


def _local_relax() -> Relax:
    """`SolverProcess.relax` in this process, for one growing program."""
    relaxations = Relaxations()

    def relax(milp: Milp, deadline: float, accuracy: float, start: Relaxation | None) -> Relaxation:
        job = RelaxMilp(milp, accuracy, start)
        solve = relaxations.solve if accuracy else simplex.relax
        return solve(job, deadline)

    return relax


def main() -> None:
    """Entry point of the process: one job comes in, bounds go out."""
    send = connect(int(sys.argv[1]))
    job: BoundingJob = pickle.load(sys.stdin.buffer)  # noqa: S301  (from our parent)
    try:
        if job.points is None:
            AnyOrderBounding(job.program, job.capacity, send).run()
        else:
            Bounding(job.program, job.capacity, job.points, send, job.params).run()
    except MemoryError:
        return
    except Exception as error:
        send(Failure(f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main()
