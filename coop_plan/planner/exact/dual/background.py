"""Bounding process, run during the search for plans.

It runs `planner.exact.dual.bounding`, for bounds of program order, `planner.exact.dual.any_order`,
or `planner.exact.dual.homes`.
"""

import queue
from dataclasses import dataclass
from math import inf

from coop_plan.planner.core.problem import Problem
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.params import DEFAULTS, ExactParams
from coop_plan.planner.exact.solver.process import Child


@dataclass(frozen=True)
class BoundingJob:
    """Job of the process, with the fields of `Bounding`; without points for bounds of any order."""

    program: Program
    capacity: int
    points: set[int] | None
    params: ExactParams


@dataclass(frozen=True)
class HomesJob:
    """Job of the process for plans with homes, with the arguments of `bound_homes`."""

    problem: Problem
    budget: int


class BoundingProcess(Child):
    """Process for one kind of bounds, which can be polled at any time."""

    def __init__(self, params: ExactParams = DEFAULTS) -> None:
        super().__init__("coop_plan.planner.exact.dual.bounding")
        self._params = params
        self.running = self._started = False
        self.ended = False
        """True if the process ran to its end: there are no more time points to add."""

    def kill(self) -> None:
        """End the process for good."""
        self.running = False
        super().kill()

    def begin(self, program: Program, capacity: int, points: set[int] | None = None) -> None:
        """Start from known time points, or for any order; only the first call has an effect."""
        self._begin(BoundingJob(program, capacity, points, self._params))

    def begin_with_homes(self, problem: Problem, budget: int) -> None:
        """As `begin`, for plans with homes within a budget (bytes), in any order."""
        self._begin(HomesJob(problem, budget))

    def _begin(self, job: BoundingJob | HomesJob) -> None:
        if not self._started:
            self._started = self.running = True
            self.send(job)

    def proved(self, until: float = 0.0) -> float:
        """Returns the best new lower bound on the cost (µs), −∞ if there is none.

        Waits for a bound until then (a `time.monotonic` value, s).

        Raises:
            SolverError: the process raised an exception.
        """
        best = -inf
        while self.running:
            try:
                bound: float | None = self.receive(until if best == -inf else 0.0)
            except queue.Empty:
                break
            if bound is None:
                self.running, self.ended = False, True
            else:
                best = max(best, bound)
        return best
