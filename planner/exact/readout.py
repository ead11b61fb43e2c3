"""From a solution of the time-point model to a schedule, and where that overflows."""

from dataclasses import dataclass

from planner.exact.live import live_bytes
from planner.exact.tape import Tape
from planner.exact.timepoint import TimePointModel
from planner.schedule import Schedule


@dataclass(frozen=True)
class Overflow:
    """
    An event that needs more than the capacity: `op` runs just before the first run of `position`.

    They are equal when it is that first run itself. `excess` is in bytes.
    """

    position: int
    op: int
    excess: int


@dataclass(frozen=True)
class Readout:
    """A schedule without addresses, and its overflows in order (none: it fits logically)."""

    schedule: Schedule
    overflows: list[Overflow]


class UnreadableError(Exception):
    """
    The solution needs something that cannot be computed again when it is needed.

    `position` is the op that overwrites what it would take, if a time point there tells the model;
    None for tensors that are overwritten in the arena, which the model does not follow.
    """

    def __init__(self, position: int | None) -> None:
        super().__init__()
        self.position = position


def read_out(model: TimePointModel, values: list[float]) -> Readout:
    """
    The schedule that a solution stands for.

    Within a segment everything is computed again as late as possible, right before its first need,
    and dropped after its last touch unless it is resident at the next time point.

    Raises:
        UnreadableError: only on graphs with tensors that are overwritten.
    """
    return _Reader(model, values).read()


class _Reader:
    def __init__(self, model: TimePointModel, values: list[float]) -> None:
        self.model = model
        self.program = model.program
        self.values = values
        self.tape = Tape(model.program)

    def read(self) -> Readout:
        for k in range(len(self.model.points)):
            self._segment(k)
        schedule = self.tape.schedule()
        capacity = self.model.capacity
        overflows = [
            Overflow(position, op, used - capacity)
            for (op, position), used in zip(self.tape.runs, live_bytes(schedule), strict=True)
            if used > capacity
        ]
        return Readout(schedule, overflows)

    def _segment(self, k: int) -> None:
        program, point = self.program, self.model.points[k]
        resident = {t for t, c in self.model.x[k].items() if c is None or self.values[c] > 0.5}
        for op in range(self.model.start(k) + 1, point + 1):
            for t in sorted(resident) if op == point else ():
                self._fetch(t, op)
            for t in program.reads[op]:
                self._fetch(t, op)
            if op < program.n:
                self.tape.run(op, op)
        if point == program.n:
            self.tape.close(set(program.reads[point]))
            return
        taken = {
            program.pairs[point][number][1]
            for number, z in self.model.z[k].items()
            if self.values[z] > 0.5
        }
        made = set(program.makes[point])
        self.tape.close(
            (resident - taken) | made | {t for t in self.tape.here if self._held(t, point)}
        )

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
