"""Fix and refine: from a solution of a coarse time-point model to a schedule that fits everywhere.

Residents at the time points stay fixed; overflowing segments are repaired if possible
(`planner.exact.primal.repair`). Otherwise time points are added, and a small model of the window
between two fixed points is solved. If recomputes between two neighbouring first runs overflow, a
row forbids the set of tensors resident during the op from being resident together again:
Checkmate's U, for one op, in the order of the last solution. These rows may cut off better
schedules, so nothing is proved.

A schedule that fits may have a layout conflict. Then a margin is kept free while the op of the
conflict runs, and the search goes on from there.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from coop_plan.planner.core.memory_bounds import working_sets
from coop_plan.planner.core.schedule import PlacedSchedule, Schedule
from coop_plan.planner.exact.model.milp import INFINITY, Outcome, Terms
from coop_plan.planner.exact.model.point_selection import segment_of, worst_of_groups
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.timepoint import COST_SCALE, ROUNDING, TimePointModel
from coop_plan.planner.exact.params import DEFAULTS, ExactParams
from coop_plan.planner.exact.primal.packing import LayoutConflict
from coop_plan.planner.exact.primal.readout import (
    Margins,
    NotRecomputableError,
    Overflow,
    Readout,
    Residency,
)
from coop_plan.planner.exact.primal.repair import Repair
from coop_plan.planner.exact.solver.process import SolverProcess


@dataclass(frozen=True)
class CoResident:
    """A tensor resident during an op that ran between two neighbouring first runs.

    `rerun_op` recomputed it in between (None: resident before). `last_reader` is the op that read
    it last in between (None: it stayed resident).
    """

    tensor: int
    rerun_op: int | None
    last_reader: int | None


@dataclass(frozen=True)
class MemoryConflict:
    """`op`, run for the first run of `position`, does not fit with these residents."""

    position: int
    op: int
    co_residents: tuple[CoResident, ...]


@dataclass
class FixAndRefine:
    """One search within `capacity` bytes, until `deadline` (a `time.monotonic` value, s).

    `place` lays out a schedule, or returns its layout conflict.
    """

    program: Program
    process: SolverProcess
    capacity: int
    deadline: float
    place: Callable[[Schedule], PlacedSchedule | LayoutConflict]
    params: ExactParams = DEFAULTS
    conflicts: list[MemoryConflict] = field(default_factory=list)
    cut_ops: set[int] = field(default_factory=set)
    """Ops whose recomputes overflowed: every window has cuts for them."""
    margins: Margins = field(default_factory=dict)
    """Bytes kept free during runs with layout conflicts."""
    repair: Repair = field(init=False)

    def __post_init__(self) -> None:
        self.repair = Repair(self.program, self.capacity, self.margins, self.params.repair)

    def run(self, residency: Residency, cost_limit_us: float) -> PlacedSchedule | None:
        """A placed schedule that costs less than the limit (µs), starting from an outline."""
        while time.monotonic() < self.deadline:
            try:
                readout = self.repair.read_out(residency, self.deadline)
            except NotRecomputableError:
                return None
            schedule = readout.schedule
            if schedule.cost_us >= cost_limit_us:
                return None
            if not readout.overflows:
                placed = self.place(schedule)
                if isinstance(placed, PlacedSchedule):
                    return placed
                self._add_margin(readout, placed)
                continue
            refined = self._refine(residency, readout)
            if refined is None:
                return None
            residency = refined
        return None

    def _add_margin(self, readout: Readout, conflict: LayoutConflict) -> None:
        """Keep bytes free during the run of a layout conflict."""
        op, position = readout.runs[conflict.event]
        spare = self.capacity - int(readout.schedule.live_bytes()[conflict.event])
        params = self.params.fix_and_refine
        shares = params.margin_share * self.capacity, params.excess_share * conflict.excess
        step = max(self.program.problem.alignment, *map(int, shares))
        self.margins[position, op] = spare + step

    def _refine(self, residency: Residency, readout: Readout) -> Residency | None:
        """Add time points in the worst segment, or memory conflicts if it has no more ops."""
        overflows, points = readout.overflows, set(residency.points)
        first = [o for o in overflows if o.position == o.op and o.position not in points]
        if first:
            low, high = segment_of(residency.points, max(first, key=lambda o: o.excess).position)
            at_once = self.params.fix_and_refine.points_per_window
            inside = [o for o in first if low < o.position <= high]
            worst = worst_of_groups(inside, at_once, key=lambda o: o.excess)
            return self._solve_window(residency, [overflow.position for overflow in worst])
        position = max(overflows, key=lambda o: o.excess).position
        ends = sorted({max(0, position - 1), position})
        if points.issuperset(ends):
            here = [o for o in overflows if o.position == position]
            self.cut_ops |= {o.op for o in here if o.op != position}
            self.conflicts += [_memory_conflict(readout, overflow) for overflow in here]
        return self._solve_window(residency, ends)

    def _solve_window(self, residency: Residency, free: list[int]) -> Residency | None:
        """Solve with these points free; double the window while that is infeasible."""
        params = self.params.fix_and_refine
        points = sorted({*residency.points, *free})
        begin, end = bisect_left(points, free[0]) - 1, bisect_left(points, free[-1]) + 1
        while (now := time.monotonic()) < self.deadline:
            inside = points[max(0, begin) : end + 1]
            cuts = [(point, op) for point in inside for op in self.cut_ops]
            model = TimePointModel(self.program, self.capacity, inside, cuts, self.params.model)
            if begin >= 0:
                _fix(model, 0, residency)
            if end < len(points) - 1:
                _fix(model, -1, residency)
            here = [c for c in self.conflicts if {c.position - 1, c.position} <= {*inside}]
            for k, point in enumerate(inside):
                model.milp.row_upper[model.memory[k][0]] -= (
                    self.margins.get((point, point), 0) / self.capacity
                )
            for c in here:
                _add_conflict(model, c, self.margins.get((c.position, c.op), 0))
            for (position, op), count in Counter((c.position, c.op) for c in here).items():
                reruns = model.y[inside.index(position)]
                if count >= params.max_conflicts and op in reruns:
                    model.milp.upper[reruns[op]] = 0.0
            seconds = max(params.window_seconds, (self.deadline - now) * params.window_share)
            until = min(self.deadline, now + seconds)
            answer = self.process.solve(model.milp, until, gap=params.gap * COST_SCALE)
            if answer.values is not None:
                self.repair.reset(inside[0] if begin >= 0 else -1, inside[-1])
                solved = Residency.of(model, answer.values)
                if end < len(points) - 1:
                    del solved.inplace_inputs[inside[-1]]  # decided by the next segment
                return replace(
                    residency,
                    points=points,
                    resident=residency.resident | solved.resident,
                    inplace_inputs=residency.inplace_inputs | solved.inplace_inputs,
                )
            if answer.outcome is not Outcome.INFEASIBLE or len(inside) == len(points):
                return None
            begin, end = 2 * begin - end, 2 * end - begin
        return None


def _fix(model: TimePointModel, k: int, residency: Residency) -> None:
    """Fix the residents of time point k and drop its memory rows, which round differently."""
    for row in model.memory[k]:
        model.milp.row_upper[row] = INFINITY
    resident = residency.resident[model.points[k]]
    for t, column in model.x[k].items():
        if column is not None:
            model.milp.lower[column] = model.milp.upper[column] = float(t in resident)


def _memory_conflict(readout: Readout, overflow: Overflow) -> MemoryConflict:
    """The op of an overflow and its other residents."""
    schedule, runs, event = readout.schedule, readout.runs, overflow.event
    problem = schedule.problem
    touched = {*problem.reads[overflow.op], *problem.makes[overflow.op]}

    def between(other: int) -> int | None:
        op, position = runs[other]
        return op if position == overflow.position else None

    co_residents = tuple(
        CoResident(t, between(schedule.first[buffer]), between(schedule.last[buffer]))
        for buffer in schedule.live_buffers(event)
        if (t := schedule.tensor[buffer]) not in touched and problem.size[t]
    )
    return MemoryConflict(overflow.position, overflow.op, co_residents)


def _add_conflict(model: TimePointModel, conflict: MemoryConflict, margin: int) -> None:
    """Σ bytes of tensors resident for the conflict's reasons + the op ≤ capacity − margin."""
    program, milp = model.program, model.milp
    op, k = conflict.op, model.points.index(conflict.position)
    first = op == conflict.position
    if not first and op not in model.y[k]:
        return
    runs = [] if first else [model.y[k][op]]
    sets = working_sets(program.problem)
    need = (sets.first if first else sets.rerun)[op]
    terms: Terms = []
    for other in conflict.co_residents:
        certain, reasons = _reasons(model, k, other)
        # [Constraint] P ≥ 1 − Σ (1 − reason), over the reasons and the op's own recompute.
        total = dict.fromkeys(runs, 1.0)
        for column, value in reasons:
            total[column] = total.get(column, 0.0) + value
        present = milp.column(0.0, 1.0, 0.0, integer=False)
        row = [(present, 1.0), *((column, -value) for column, value in total.items())]
        milp.row(row, certain - len(runs) - 1, INFINITY)
        terms.append((present, program.problem.size[other.tensor] / model.capacity))
    load = (need + margin) / model.capacity
    terms += [(column, load) for column in runs]
    milp.row(terms, -INFINITY, 1.0 + ROUNDING - (0.0 if runs else load))


def _reasons(model: TimePointModel, k: int, other: CoResident) -> tuple[int, Terms]:
    """Reasons for the tensor to be resident in segment k as in the conflict, and to stay.

    Returns how many of the two are certain, and the terms of the others.
    """
    t = other.tensor
    certain, reasons = (0, []) if other.rerun_op is not None else model.kept(k, t)
    reasons = list(reasons)
    if other.rerun_op in model.y[k]:
        reasons.append((model.y[k][other.rerun_op], 1.0))
    if other.last_reader is None:
        column = model.x[k].get(t)
        certain += column is None
        reasons += [] if column is None else [(column, 1.0)]
    elif other.last_reader == model.points[k]:
        certain += 1
    elif other.last_reader in model.y[k]:
        reasons.append((model.y[k][other.last_reader], 1.0))
    return certain, reasons
