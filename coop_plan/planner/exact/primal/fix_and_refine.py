"""
Fix and refine: from a solution of a coarse time-point model to a schedule that fits everywhere.

What is resident at the time points stays as it is; segments that overflow are repaired if that can
be (`planner.exact.primal.repair`). Where it cannot, time points are added, and a small model of the
window between two fixed ones is solved. Where recomputes between two neighbouring first runs
overflow, the tensors that lay beside the op in question may not all be there again: Checkmate's U,
for one op, in the order of the last solution. So better schedules may be cut off: this proves
nothing.

A schedule that fits logically may find no layout. Then some room is asked for beside the op that
runs where the layout is fullest, and the search goes on from there.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from coop_plan.planner.core.memory_bounds import working_sets
from coop_plan.planner.core.schedule import PlacedSchedule, Schedule
from coop_plan.planner.exact.model.milp import INFINITY, Outcome
from coop_plan.planner.exact.model.points import segment, worst_of_groups
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.timepoint import COST_SCALE, ROUNDING, TimePointModel
from coop_plan.planner.exact.params import DEFAULTS, ExactParams
from coop_plan.planner.exact.primal.packing import Crowded
from coop_plan.planner.exact.primal.readout import (
    Margins,
    Outline,
    Overflow,
    Readout,
    UnreadableError,
)
from coop_plan.planner.exact.primal.repair import Repair
from coop_plan.planner.exact.solver.process import SolverProcess


@dataclass(frozen=True)
class Neighbour:
    """
    A tensor that lay beside an op, which ran between two neighbouring first runs.

    `again`: the op that made it again in between, None if it was there before. `until`: the op that
    read it last in between, None if it stayed.
    """

    tensor: int
    again: int | None
    until: int | None


@dataclass(frozen=True)
class Crowd:
    """`op`, run just before the first run of `position` or in it, did not fit beside these."""

    position: int
    op: int
    beside: tuple[Neighbour, ...]


@dataclass
class FixAndRefine:
    """
    One search within `capacity` bytes, until `deadline` (a `time.monotonic` value, s).

    `place` gives a schedule its offsets, or tells where it does not fit the arena.
    """

    program: Program
    process: SolverProcess
    capacity: int
    deadline: float
    place: Callable[[Schedule], PlacedSchedule | Crowded]
    params: ExactParams = DEFAULTS
    crowds: list[Crowd] = field(default_factory=list)
    large: set[int] = field(default_factory=set)
    """Ops that overflowed as recomputes: every window has cuts for them."""
    margins: Margins = field(default_factory=dict)
    """Where a layout needed more than what is live."""
    repair: Repair = field(init=False)

    def __post_init__(self) -> None:
        self.repair = Repair(self.program, self.capacity, self.margins, self.params.repair)

    def run(self, outline: Outline, cost_limit_us: float) -> PlacedSchedule | None:
        """A placed schedule that costs less than the limit (µs), found from the outline."""
        while time.monotonic() < self.deadline:
            try:
                readout = self.repair.read_out(outline, self.deadline)
            except UnreadableError:
                return None
            schedule = readout.schedule
            if schedule.cost_us >= cost_limit_us:
                return None
            if not readout.overflows:
                placed = self.place(schedule)
                if isinstance(placed, PlacedSchedule):
                    return placed
                self._leave_room(readout, placed)
                continue
            closer = self._look_closer(outline, readout)
            if closer is None:
                return None
            outline = closer
        return None

    def _leave_room(self, readout: Readout, crowded: Crowded) -> None:
        """Ask for less than what is live at the event."""
        op, position = readout.runs[crowded.event]
        spare = self.capacity - int(readout.schedule.live_bytes()[crowded.event])
        params = self.params.fix_and_refine
        shares = params.margin_share * self.capacity, params.excess_share * crowded.excess
        step = max(self.program.problem.alignment, *map(int, shares))
        self.margins[position, op] = spare + step

    def _look_closer(self, outline: Outline, readout: Readout) -> Outline | None:
        """More time points in the worst segment or, where every first run has one, a crowd."""
        overflows, points = readout.overflows, set(outline.points)
        first = [o for o in overflows if o.position == o.op and o.position not in points]
        if first:
            low, high = segment(outline.points, max(first, key=lambda o: o.excess).position)
            at_once = self.params.fix_and_refine.points_at_once
            inside = [o for o in first if low < o.position <= high]
            worst = worst_of_groups(inside, at_once, key=lambda o: o.excess)
            return self._window(outline, [overflow.position for overflow in worst])
        position = max(overflows, key=lambda o: o.excess).position
        ends = sorted({max(0, position - 1), position})
        if points.issuperset(ends):
            here = [o for o in overflows if o.position == position]
            self.large |= {o.op for o in here if o.op != position}
            self.crowds += [_crowd(readout, overflow) for overflow in here]
        return self._window(outline, ends)

    def _window(self, outline: Outline, free: list[int]) -> Outline | None:
        """Solve anew with these points free, and more beside them where that is infeasible."""
        params = self.params.fix_and_refine
        points = sorted({*outline.points, *free})
        begin, end = bisect_left(points, free[0]) - 1, bisect_left(points, free[-1]) + 1
        while (now := time.monotonic()) < self.deadline:
            inside = points[max(0, begin) : end + 1]
            cuts = [(point, op) for point in inside for op in self.large]
            model = TimePointModel(self.program, self.capacity, inside, cuts, self.params.model)
            if begin >= 0:
                _fix(model, 0, outline)
            if end < len(points) - 1:
                _fix(model, -1, outline)
            here = [c for c in self.crowds if {c.position - 1, c.position} <= {*inside}]
            for k, point in enumerate(inside):
                model.milp.row_upper[model.memory[k][0]] -= (
                    self.margins.get((point, point), 0) / self.capacity
                )
            for crowd in here:
                _part(model, crowd, self.margins.get((crowd.position, crowd.op), 0))
            for (position, op), count in Counter((c.position, c.op) for c in here).items():
                again = model.y[inside.index(position)]
                if count >= params.most_crowds and op in again:
                    model.milp.upper[again[op]] = 0.0
            seconds = max(params.window_seconds, (self.deadline - now) * params.window_share)
            until = min(self.deadline, now + seconds)
            answer = self.process.solve(model.milp, until, gap=params.gap * COST_SCALE)
            if answer.values is not None:
                self.repair.forget(inside[0] if begin >= 0 else -1, inside[-1])
                solved = Outline.of(model, answer.values)
                if end < len(points) - 1:
                    del solved.taken[inside[-1]]  # that is up to what follows it
                return Outline(
                    points, outline.resident | solved.resident, outline.taken | solved.taken
                )
            if answer.outcome is not Outcome.INFEASIBLE or len(inside) == len(points):
                return None
            begin, end = 2 * begin - end, 2 * end - begin
        return None


def _fix(model: TimePointModel, k: int, outline: Outline) -> None:
    """Keep what is resident at time point number k, though capacities may be rounded otherwise."""
    for row in model.memory[k]:
        model.milp.row_upper[row] = INFINITY
    resident = outline.resident[model.points[k]]
    for t, column in model.x[k].items():
        if column is not None:
            model.milp.lower[column] = model.milp.upper[column] = float(t in resident)


def _crowd(readout: Readout, overflow: Overflow) -> Crowd:
    """What lay beside the op of an overflow between two neighbouring first runs."""
    schedule, runs, event = readout.schedule, readout.runs, overflow.event
    problem = schedule.problem
    touched = {*problem.reads[overflow.op], *problem.makes[overflow.op]}

    def between(other: int) -> int | None:
        op, position = runs[other]
        return op if position == overflow.position else None

    beside = tuple(
        Neighbour(t, between(schedule.first[buffer]), between(schedule.last[buffer]))
        for buffer in schedule.live_buffers(event)
        if (t := schedule.tensor[buffer]) not in touched and problem.size[t]
    )
    return Crowd(overflow.position, overflow.op, beside)


def _part(model: TimePointModel, crowd: Crowd, margin: int) -> None:
    """Σ bytes of those of the crowd there for the same reasons + the op ≤ capacity − margin."""
    program, milp = model.program, model.milp
    k = model.points.index(crowd.position)
    first = crowd.op == crowd.position
    if not first and crowd.op not in model.y[k]:
        return
    runs = [] if first else [model.y[k][crowd.op]]
    need = working_sets(program.problem).first[crowd.op] if first else program.rerun_need(crowd.op)
    terms: list[tuple[int, float]] = []
    for neighbour in crowd.beside:
        certain, reasons = _reasons(model, k, neighbour)
        # [Constraint] P ≥ 1 − Σ (1 − reason), the op's own run among the reasons.
        total = dict.fromkeys(runs, 1.0)
        for column, value in reasons:
            total[column] = total.get(column, 0.0) + value
        present = milp.column(0.0, 1.0, 0.0, integer=False)
        row = [(present, 1.0), *((column, -value) for column, value in total.items())]
        milp.row(row, certain - len(runs) - 1, INFINITY)
        terms.append((present, program.problem.size[neighbour.tensor] / model.capacity))
    load = (need + margin) / model.capacity
    terms += [(column, load) for column in runs]
    milp.row(terms, -INFINITY, 1.0 + ROUNDING - (0.0 if runs else load))


def _reasons(
    model: TimePointModel, k: int, neighbour: Neighbour
) -> tuple[int, list[tuple[int, float]]]:
    """Why the tensor is there in segment k and stays: how much of 2 is certain, and the rest."""
    t = neighbour.tensor
    certain, reasons = (0, []) if neighbour.again is not None else model.kept(k, t)
    reasons = list(reasons)
    if neighbour.again in model.y[k]:
        reasons.append((model.y[k][neighbour.again], 1.0))
    if neighbour.until is None:
        column = model.x[k].get(t)
        certain += column is None
        reasons += [] if column is None else [(column, 1.0)]
    elif neighbour.until == model.points[k]:
        certain += 1
    elif neighbour.until in model.y[k]:
        reasons.append((model.y[k][neighbour.until], 1.0))
    return certain, reasons
