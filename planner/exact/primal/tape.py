"""What runs in order, cut into segments with what is kept after each: a schedule in the making."""

from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.exact.model.program import Program


class Tape:
    """
    Ops in the order they run; tensors are dropped after their last touch in a segment unless kept.

    `here` holds the tensors that can be read now.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.here: set[int] = set()
        self.runs: list[tuple[int, int]] = []
        """(op, position in program order whose first run it serves)."""
        self._drops: list[set[int]] = []
        self._begin = 0

    def run(self, op: int, position: int) -> None:
        """Append a run of `op`, whose inputs are here."""
        self.runs.append((op, position))
        self._drops.append(set())
        self.here.update(self.program.makes[op])

    def drop(self, tensors: set[int]) -> None:
        """Drop those that are here, as early as their last touch in this segment allows."""
        left = tensors & self.here
        self.here -= left
        for entry in range(len(self.runs) - 1, self._begin - 1, -1):
            op, _ = self.runs[entry]
            mine = left.intersection(self.program.reads[op] + self.program.makes[op])
            self._drops[entry] |= mine
            left -= mine
        if self._begin:
            self._drops[self._begin - 1] |= left

    def close(self, kept: set[int]) -> None:
        """End the segment: what is not in `kept` goes after its last touch in it."""
        self.drop(self.here - kept)
        self._begin = len(self.runs)

    def schedule(self) -> Schedule:
        """The schedule, without addresses; in-place pairs are used where the input ends."""
        problem = self.program.problem
        schedule = Schedule(problem)
        for (op, _), ends in zip(self.runs, self._drops, strict=True):
            pairs = [
                (out, source)
                for out, source in problem.inplace[op]
                if source in ends and not (schedule.holds(out) or schedule.leaves(out))
            ]
            schedule.run(op, problem.in_place(pairs))
            for t in problem.reads[op] + problem.makes[op]:
                if t in ends and schedule.holds(t):
                    schedule.drop(t)
            for t in sorted(ends):
                if schedule.holds(t):
                    schedule.drop(t, at_last_touch=True)
        schedule.finish()
        return schedule
