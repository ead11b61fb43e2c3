"""From what is resident at the time points to a schedule, and where that overflows."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.timepoint import TimePointModel
from coop_plan.planner.exact.params import DEFAULTS
from coop_plan.planner.exact.primal.schedule_builder import ScheduleBuilder


@dataclass
class Residency:
    """
    What a schedule is made of: time points in order, the last one the end of the step.

    By point the tensors resident while it runs, and the inputs that its outputs take over in place.
    """

    points: list[int]
    resident: dict[int, set[int]]
    inplace_inputs: dict[int, set[int]]

    @classmethod
    def of(cls, model: TimePointModel, values: list[float]) -> "Residency":
        """The outline that a solution stands for."""
        resident, inplace_inputs = {}, {}
        for k, point in enumerate(model.points):
            chosen = model.x[k].items()
            resident[point] = {t for t, c in chosen if c is None or values[c] > 0.5}
            pairs = model.program.inplace_pairs[point]
            inplace_inputs[point] = {pairs[i][1] for i, c in model.z[k].items() if values[c] > 0.5}
        return cls(list(model.points), resident, inplace_inputs)


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


Evictions = dict[tuple[int, int], set[int]]
"""By (position, op): what goes just before the op runs for that position, to come again later."""

Margins = dict[tuple[int, int], int]
"""By (position, op): bytes to leave free while the op runs for that position."""


class ThrashingError(Exception):
    """Drops that take from each other, at this position."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.position = position


class NotRecomputableError(Exception):
    """
    The solution needs something that cannot be computed again when it is needed.

    `position` is the op that overwrites what it would take, of which a time point there tells the
    model, or the op itself, which runs once.
    """

    def __init__(self, position: int) -> None:
        super().__init__()
        self.position = position


def read_out(
    program: Program,
    residency: Residency,
    capacity: int,
    evictions: Evictions | None = None,
    margins: Margins | None = None,
    max_runs: int = DEFAULTS.repair.max_runs,
) -> Readout:
    """
    The schedule of an outline, and where it needs more than `capacity` bytes, less margins.

    Within a segment everything is computed again as late as possible, right before its first need,
    and dropped after its last touch unless it is resident at the next time point. With `drops` an
    op may run `most_runs` times for the same position.

    Raises:
        UnreadableError: only on graphs with tensors that are overwritten.
        StuckError: only with drops.
    """
    built = _Reader(program, residency, evictions or {}, max_runs).read()
    schedule = built.schedule()
    live = schedule.live_bytes().tolist()
    margins = margins or {}
    overflows = [
        Overflow(position, op, event, excess)
        for event, ((op, position), used) in enumerate(zip(built.runs, live, strict=True))
        if (excess := used - capacity + margins.get((position, op), 0)) > 0
    ]
    return Readout(schedule, overflows, built.runs)


class _Reader:
    def __init__(
        self, program: Program, residency: Residency, evictions: Evictions, max_runs: int
    ) -> None:
        self.program = program
        self.residency = residency
        self.evictions = evictions
        self.max_runs = max_runs
        self.built = ScheduleBuilder(program)
        self._runs: Counter[tuple[int, int]] = Counter()
        self._overwritten = {read for pairs in program.overwrites for _, read in pairs}
        """Versions that end with the op that overwrites them."""

    def read(self) -> ScheduleBuilder:
        start = -1
        for point in self.residency.points:
            self._segment(start, point)
            start = point
        return self.built

    def _segment(self, start: int, point: int) -> None:
        program, resident = self.program, self.residency.resident[point]
        for op in range(start + 1, point + 1):
            self._compute({*program.reads[op], *(resident if op == point else ())}, op)
            if op < program.n:
                self._run(op, op)
        if point == program.n:
            self.built.retain(set(program.reads[point]))
            return
        unconstrained = {
            t
            for t in self.built.resident
            if program.unconstrained[t] and program.last_useful[t] > point
        }
        self.built.retain(
            (resident - self.residency.inplace_inputs[point])
            | {*program.makes[point]}
            | unconstrained
        )

    def _compute(self, targets: Iterable[int], position: int) -> None:
        """Compute for `position` what is wanted and not here, each after what it needs itself."""
        program, peaks = self.program, dict[int, int]()
        while stack := self._missing(targets, peaks):
            while stack:
                top = stack[-1]
                if top in self.built.resident:
                    stack.pop()
                    continue
                op = program.problem.producer[top]
                if program.until[op] < position:
                    raise NotRecomputableError(program.until[op])
                missing = self._missing(program.reads[op], peaks)
                if missing:
                    stack += missing
                else:
                    self._run(op, position)

    def _run(self, op: int, position: int) -> None:
        evicted = self.evictions.get((position, op))
        if evicted:
            self.built.evict(evicted.difference(self.program.reads[op]))
        self.built.run(op, position)
        self._runs[position, op] += 1
        if self.evictions and self._runs[position, op] > self.max_runs:
            raise ThrashingError(position)

    def _missing(self, tensors: Iterable[int], peaks: dict[int, int]) -> list[int]:
        """
        Those that are not here; the last ones need most memory beside themselves and come first.

        What is overwritten on the way to later versions comes after those. For trees that order is
        the best: Liu, On the storage requirement in the out-of-core multifrontal method for sparse
        factorization, ACM TOMS 12(3), 1986. `needs` remembers bytes by op.
        """
        missing = sorted((t for t in tensors if t not in self.built.resident), reverse=True)
        if len(missing) > 1:
            size, producer = self.program.problem.size, self.program.problem.producer
            missing.sort(
                key=lambda t: (
                    (False, producer[t])
                    if t in self._overwritten
                    else (True, self._peak_to_compute(t, peaks) - size[t])
                )
            )
        return missing

    def _peak_to_compute(self, tensor: int, peaks: dict[int, int]) -> int:
        """Bytes that computing the tensor takes, if whatever is used twice is computed twice."""
        program, resident = self.program, self.built.resident
        size, producer = program.problem.size, program.problem.producer
        stack = [tensor]
        while stack:
            op = producer[stack[-1]]
            if op < 0 or op in peaks or stack[-1] in resident:
                stack.pop()
                continue
            inputs = [t for t in program.reads[op] if producer[t] >= 0 and t not in resident]
            deeper = [t for t in inputs if producer[t] not in peaks]
            stack += deeper
            if not deeper:
                inputs_bytes, peak = 0, program.working_set(op)
                for t in sorted(inputs, key=lambda t: size[t] - peaks[producer[t]]):
                    peak = max(peak, inputs_bytes + peaks[producer[t]])
                    inputs_bytes += size[t]
                peaks[op] = peak
        return peaks.get(producer[tensor], 0)
