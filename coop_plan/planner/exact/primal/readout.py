"""Readout: from residents at the time points to a schedule and its overflows."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.timepoint import TimePointModel
from coop_plan.planner.exact.primal.schedule_builder import ScheduleBuilder


@dataclass
class Residency:
    """Residency outline of a schedule: time points in order, the last one the end of the step.

    `resident` maps a point to the tensors resident while it runs, `inplace_inputs` to the inputs
    whose addresses its outputs take over, `again` to the variants recomputed in the segment that it
    ends. `first` has the variant of each op's first run.
    """

    points: list[int]
    resident: dict[int, set[int]]
    inplace_inputs: dict[int, set[int]]
    first: list[int]
    again: dict[int, set[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: TimePointModel, values: list[float]) -> "Residency":
        """The outline of a solution."""
        found = cls(list(model.points), {}, {}, model.chosen(values))
        for k, point in enumerate(model.points):
            chosen = model.x[k].items()
            found.resident[point] = {t for t, c in chosen if c is None or values[c] > 0.5}
            taken = {source for (_, source), c in model.z[k].items() if values[c] > 0.5}
            found.inplace_inputs[point] = taken
            found.again[point] = {v for v, c in model.y[k].items() if values[c] > 0.5}
        return found


@dataclass(frozen=True)
class Overflow:
    """A run above the capacity: `op` runs for the first run of `position`.

    The two are equal if it is that first run itself. `excess` is in bytes.
    """

    position: int
    op: int
    excess: int


@dataclass(frozen=True)
class Readout:
    """A schedule without addresses, and its overflows in event order; none if it fits."""

    schedule: Schedule
    overflows: list[Overflow]


class NotRecomputableError(Exception):
    """The solution needs a tensor that cannot be recomputed at that point.

    `position` is the op that overwrites an input of the recompute, where a time point makes the
    model aware of it, or the producer itself, which runs once.
    """

    def __init__(self, position: int) -> None:
        super().__init__()
        self.position = position


def read_out(program: Program, residency: Residency, capacity: int) -> Readout:
    """The schedule of a residency outline, and its overflows above `capacity` bytes.

    Within a segment a tensor is recomputed as late as possible, right before its first use, and
    evicted after its last access, unless it is resident at the next time point. It is recomputed in
    the outline's variant, or else in that of the first run, or in the cheapest.

    Raises:
        NotRecomputableError: an input of a recompute has been overwritten.
        NoScheduleError: a run reads a tensor that is not resident.
    """
    built = _Reader(program, residency).read()
    schedule = built.schedule()
    variants, overflows = program.problem.variants, []
    for (variant, position), used in zip(built.runs, schedule.live_bytes().tolist(), strict=True):
        if used > capacity:
            overflows.append(Overflow(position, variants[variant].op, used - capacity))
    return Readout(schedule, overflows)


class _Reader:
    def __init__(self, program: Program, residency: Residency) -> None:
        self.program = program
        self.residency = residency
        self.built = ScheduleBuilder(program)
        self._again: set[int] = set()
        """Variants recomputed in this segment."""
        self._position = 0
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
        self._again = self.residency.again.get(point, set())
        for op in range(start + 1, point):
            first = self.residency.first[op]
            self._compute(program.reads[first], op)
            self.built.run(first, op)
        if point == program.n:
            outputs = set(program.read_by_all[point])
            self._compute(outputs | resident, point)
            self.built.retain(outputs)
            return
        first = self.residency.first[point]
        self._compute({*program.reads[first], *resident}, point)
        self.built.run(first, point)
        stays = {t for t in self.built.resident if program.unconstrained[t]}
        stays = {t for t in stays if program.last_useful[t] > point}
        kept = resident - self.residency.inplace_inputs[point]
        self.built.retain(kept | {*program.makes[first]} | stays)

    def _compute(self, targets: Iterable[int], position: int) -> None:
        """Compute missing targets for `position`, inputs first."""
        program, peaks = self.program, dict[int, int]()
        self._position = position
        while stack := self._missing(targets, peaks):
            while stack:
                top = stack[-1]
                if top in self.built.resident:
                    stack.pop()
                    continue
                variant = self._maker(top)
                if program.until[variant] < position:
                    raise NotRecomputableError(program.until[variant])
                missing = self._missing(program.reads[variant], peaks)
                if missing:
                    stack += missing
                else:
                    self.built.run(variant, position)

    def _maker(self, t: int) -> int:
        """The variant that recomputes t in this segment."""
        program, op = self.program, self.program.problem.producer[t]
        variants, first = program.choices[op], self.residency.first[op]
        if len(variants) == 1:
            return variants[0]

        def rank(v: int) -> tuple[bool, bool, bool]:
            return program.until[v] < self._position, v not in self._again, v != first

        return min((v for v in variants if t in program.makes[v]), key=rank)

    def _missing(self, tensors: Iterable[int], peaks: dict[int, int]) -> list[int]:
        """Tensors not resident, in the order of a stack: the last one is computed first.

        The tensor whose computation peaks highest above its own size is computed first, which is
        optimal for trees: Liu, On the storage requirement in the out-of-core multifrontal method
        for sparse factorization, ACM TOMS 12(3), 1986. Versions that ops overwrite are computed
        last, the later ones first, as computing a later version ends an earlier one. `peaks` caches
        bytes by variant.
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
        """Peak bytes of computing the tensor if every shared input is recomputed for each use."""
        program, resident = self.program, self.built.resident
        size = program.problem.size
        stack = [tensor]
        while stack:
            if stack[-1] in resident or (variant := self._maker(stack[-1])) in peaks:
                stack.pop()
                continue
            inputs = {t: self._maker(t) for t in program.reads[variant] if t not in resident}
            deeper = [t for t, maker in inputs.items() if maker not in peaks]
            stack += deeper
            if not deeper:
                inputs_bytes, peak = 0, program.run_bytes(variant)
                for t in sorted(inputs, key=lambda t: size[t] - peaks[inputs[t]]):
                    peak = max(peak, inputs_bytes + peaks[inputs[t]])
                    inputs_bytes += size[t]
                peaks[variant] = peak
        return peaks.get(self._maker(tensor), 0)
