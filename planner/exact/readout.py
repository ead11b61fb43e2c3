"""From what is resident at the time points to a schedule, and where that overflows."""

from dataclasses import dataclass

from planner.exact.live import live_bytes
from planner.exact.program import Program
from planner.exact.tape import Tape
from planner.exact.timepoint import TimePointModel
from planner.schedule import Schedule


@dataclass
class Outline:
    """
    What a schedule is made of: time points in order, the last one the end of the step.

    By point the tensors resident while it runs, and the inputs that its outputs take over in place.
    """

    points: list[int]
    resident: dict[int, set[int]]
    taken: dict[int, set[int]]

    @classmethod
    def of(cls, model: TimePointModel, values: list[float]) -> "Outline":
        """The outline that a solution stands for."""
        resident, taken = {}, {}
        for k, point in enumerate(model.points):
            chosen = model.x[k].items()
            resident[point] = {t for t, c in chosen if c is None or values[c] > 0.5}
            pairs = model.program.pairs[point]
            taken[point] = {pairs[i][1] for i, c in model.z[k].items() if values[c] > 0.5}
        return cls(list(model.points), resident, taken)


@dataclass(frozen=True)
class Overflow:
    """
    An event that needs more than the capacity: `op` runs just before the first run of `position`.

    They are equal when it is that first run itself. `excess` is in bytes.
    """

    position: int
    op: int
    event: int
    excess: int


@dataclass(frozen=True)
class Readout:
    """
    A schedule without addresses, and its overflows in order (none: it fits logically).

    `runs` lists per event its op and the position whose first run it serves.
    """

    schedule: Schedule
    overflows: list[Overflow]
    runs: list[tuple[int, int]]


class UnreadableError(Exception):
    """
    The solution needs something that cannot be computed again when it is needed.

    `position` is the op that overwrites what it would take, if a time point there tells the model;
    None for tensors that are overwritten in the arena, which the model does not follow.
    """

    def __init__(self, position: int | None) -> None:
        super().__init__()
        self.position = position


def read_out(program: Program, outline: Outline, capacity: int) -> Readout:
    """
    The schedule of an outline, and where it needs more than `capacity` bytes.

    Within a segment everything is computed again as late as possible, right before its first need,
    and dropped after its last touch unless it is resident at the next time point.

    Raises:
        UnreadableError: only on graphs with tensors that are overwritten.
    """
    tape = _Reader(program, outline).read()
    schedule = tape.schedule()
    live = live_bytes(schedule)
    overflows = [
        Overflow(position, op, event, used - capacity)
        for event, ((op, position), used) in enumerate(zip(tape.runs, live, strict=True))
        if used > capacity
    ]
    return Readout(schedule, overflows, tape.runs)


class _Reader:
    def __init__(self, program: Program, outline: Outline) -> None:
        self.program = program
        self.outline = outline
        self.tape = Tape(program)

    def read(self) -> Tape:
        start = -1
        for point in self.outline.points:
            self._segment(start, point)
            start = point
        return self.tape

    def _segment(self, start: int, point: int) -> None:
        program, resident = self.program, self.outline.resident[point]
        for op in range(start + 1, point + 1):
            for t in sorted(resident) if op == point else ():
                self._fetch(t, op)
            for t in program.reads[op]:
                self._fetch(t, op)
            if op < program.n:
                self.tape.run(op, op)
        if point == program.n:
            self.tape.close(set(program.reads[point]))
            return
        held = {t for t in self.tape.here if self._held(t, point)}
        self.tape.close((resident - self.outline.taken[point]) | {*program.makes[point]} | held)

    def _held(self, t: int, point: int) -> bool:
        """Whether t stays anyway: it has no bytes, or it is overwritten and has a use to come."""
        if self.program.overwritten[t]:
            return self.program.problem.last_use[t] > point
        return self.program.always[t] and self.program.useful[t] > point

    def _fetch(self, t: int, position: int) -> None:
        """Compute t again for `position` unless it is there, and first what that needs."""
        stack = [t]
        while stack:
            top = stack[-1]
            if top in self.tape.here:
                stack.pop()
                continue
            op = self.program.problem.producer[top]
            if op < 0 or (self.program.until[op] > op and self.program.once(op)):
                raise UnreadableError(None)
            if self.program.until[op] < position:
                raise UnreadableError(self.program.until[op])
            missing = [d for d in self.program.reads[op] if d not in self.tape.here]
            if missing:
                stack.extend(reversed(missing))
            else:
                self.tape.run(op, position)
