"""Builder of a schedule from runs in order."""

from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.exact.model.program import Program


class ScheduleBuilder:
    """Runs in order; `resident` holds the tensors that can be read now.

    The order of runs determines the schedule (`planner.core.schedule`): a tensor evicted here, and
    so recomputed before its next use, lives until its last access.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.resident: set[int] = set()
        self.runs: list[tuple[int, int]] = []
        """(variant, position in program order whose first run it serves) pairs."""

    def run(self, variant: int, position: int) -> None:
        """Append a run, whose inputs are resident; it ends the versions that its op overwrites."""
        self.runs.append((variant, position))
        op = self.program.problem.variants[variant].op
        self.resident.difference_update(read for _, read in self.program.overwrites[op])
        self.resident.update(self.program.makes[variant])

    def retain(self, tensors: set[int]) -> None:
        """Evict all other tensors, at the end of a segment."""
        self.resident &= tensors

    def schedule(self) -> Schedule:
        """The schedule, without addresses."""
        return Schedule.of(self.program.problem, [variant for variant, _ in self.runs])
