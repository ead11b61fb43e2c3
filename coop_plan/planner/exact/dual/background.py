"""
Bounds from a process beside the search for plans, which runs `planner.exact.dual.bounding`: of
program order, or of any order (`planner.exact.dual.any_order`).
"""

import queue
from dataclasses import dataclass

from coop_plan.planner.exact.model.milp import INFINITY
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.params import DEFAULTS, ExactParams
from coop_plan.planner.exact.solver.process import Child


@dataclass(frozen=True)
class BoundingJob:
    """What the process is sent, as in `Bounding`; without points it is a bound of any order."""

    program: Program
    capacity: int
    points: set[int] | None
    params: ExactParams


class BoundingProcess(Child):
    """A process for one kind of bounds; what it has proved can be asked for at any time."""

    def __init__(self, params: ExactParams = DEFAULTS) -> None:
        super().__init__("coop_plan.planner.exact.dual.bounding", params.solver)
        self._params = params
        self.running = self._started = False
        self.ended = False
        """Whether it ran to its end: it has no more time points to add."""

    def kill(self) -> None:
        """End it for good: there will be no more news."""
        self.running = False
        super().kill()

    def begin(self, program: Program, capacity: int, points: set[int] | None = None) -> None:
        """Start, with time points that are known to matter, or for any order; once only."""
        if not self._started:
            job = BoundingJob(program, capacity, points, self._params)
            self._started = self.running = self.send(job)

    def proved(self, until: float = 0.0) -> float:
        """
        What recomputes cost at least (µs), −∞ if nothing new was proved.

        Waits for news until then (a `time.monotonic` value, s).

        Raises:
            SolverError: the process raised an exception.
        """
        best = -INFINITY
        while self.running:
            try:
                bound: float | None = self.receive(until if best == -INFINITY else 0.0)
            except queue.Empty:
                break
            if bound is None:
                self.running, self.ended = False, True
            else:
                best = max(best, bound)
        return best
