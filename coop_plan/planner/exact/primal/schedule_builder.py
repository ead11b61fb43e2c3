"""A schedule in the making: what runs in order, and what can be read at each moment."""

from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.exact.model.program import Program


class ScheduleBuilder:
    """
    Ops in the order they run; `here` holds the tensors that can be read now.

    That order alone is the schedule (`planner.core.schedule`): what is dropped, and so made again
    before its next use, lives to its last touch.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.resident: set[int] = set()
        self.runs: list[tuple[int, int]] = []
        """(op, position in program order whose first run it serves)."""

    def run(self, op: int, position: int) -> None:
        """Append a run of `op`, whose inputs are here; what it overwrites is not from now on."""
        self.runs.append((op, position))
        self.resident.difference_update(read for _, read in self.program.overwrites[op])
        self.resident.update(self.program.makes[op])

    def retain(self, tensors: set[int]) -> None:
        """End a segment: nothing but `kept` is here from now on."""
        self.resident &= tensors

    def evict(self, tensors: set[int]) -> None:
        """These are not here from now on."""
        self.resident -= tensors

    def schedule(self) -> Schedule:
        """The schedule, without addresses."""
        return Schedule.of(self.program.problem, [op for op, _ in self.runs])
