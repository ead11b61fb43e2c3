"""Lower bound for models with transfers: relaxations with path cuts, at many more time points.

This module is the main module of the bounding process (`planner.exact.dual.background`), which ends
once every op is a time point.
"""

import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from coop_plan.planner.exact.dual.any_order import bound_any_order
from coop_plan.planner.exact.dual.background import BoundingJob, HomesJob
from coop_plan.planner.exact.dual.homes import bound_homes
from coop_plan.planner.exact.dual.milp_bounds import report_bounds
from coop_plan.planner.exact.model.milp import Milp, Relaxation
from coop_plan.planner.exact.model.paths import PathCuts
from coop_plan.planner.exact.model.point_selection import initial_points
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.timepoint import TimePointModel
from coop_plan.planner.exact.params import DEFAULTS, ExactParams
from coop_plan.planner.exact.solver import pdlp, simplex
from coop_plan.planner.exact.solver.jobs import Failure, RelaxMilp
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
    _spread_count: int = field(init=False)
    _best: float = -inf
    _model: TimePointModel | None = None

    def __post_init__(self) -> None:
        self._spread_count = self.params.first_spread

    def run(self) -> None:
        """Solve relaxation after relaxation until there are no time points to add."""
        self._choose_few()
        cuts = PathCuts(self.params.min_violation)
        while len(self.points) <= self.program.n:
            points = self.points.union(self._next_spread())
            if points != self.points:
                self._relax(points, cuts)
                self.points = points

    def _relax(self, points: set[int], paths: PathCuts) -> None:
        """Strengthen the model of these points by the cuts found so far, and by new ones."""
        model = TimePointModel(self.program, self.capacity, sorted({*points, self.program.n}))
        bound = paths.strengthen(
            _relax, model, inf, lambda bound: self.report(model.bound_us(bound))
        )
        if bound > self._best:
            self._best, self._model = bound, model

    def _choose_few(self) -> None:
        """Start from the best of a few models, each with time points of its own.

        With transfers the choice of time points matters more than their number. Fractional
        transfers weaken the relaxation more than fractional runs, so the best model is also solved
        as a MILP.
        """
        for count in (4, 8, 20):  # time points
            points = set(initial_points(self.program, self.capacity, count))
            self._relax(points, PathCuts(self.params.min_violation))
        if self._model is not None:
            if len(self._model.milp.lower) <= 6000:
                report_bounds(self._model.milp, self._model.bound_us, self.report, seconds=20.0)
            self.points = {*self._model.points[:-1]}

    def _next_spread(self) -> list[int]:
        points = initial_points(self.program, self.capacity, self._spread_count)
        self._spread_count *= 2
        if self.points.issuperset(points) and self._spread_count > self.program.n:
            return list(range(self.program.n + 1))
        return points


def _relax(milp: Milp, seconds: float, accuracy: float, start: Relaxation | None) -> Relaxation:
    """`SolverProcess.relax` in this process."""
    job = RelaxMilp(milp, accuracy, start)
    return pdlp.relax(job, seconds) if accuracy else simplex.relax(job, seconds)


def main() -> None:
    """Entry point of the process: one job comes in, bounds go out."""
    send = connect(int(sys.argv[1]))
    job: BoundingJob | HomesJob = pickle.load(sys.stdin.buffer)  # noqa: S301  (from our parent)
    try:
        if isinstance(job, HomesJob):
            bound_homes(job.problem, job.budget, send)
        elif job.points is None:
            bound_any_order(job.program, job.capacity, send)
        else:
            Bounding(job.program, job.capacity, job.points, send, job.params).run()
    except MemoryError:
        return
    except Exception as error:
        send(Failure(f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main()
