"""Helpers for tests of the time-point model and of fix-and-refine."""

import math
import time

from hypothesis import assume

from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.timepoint import TimePointModel
from coop_plan.planner.exact.primal.fix_and_refine import FixAndRefine
from coop_plan.planner.exact.primal.packing import LayoutConflict
from coop_plan.planner.exact.primal.readout import Residency
from coop_plan.planner.placement.layout import lay_out

SECONDS = 20.0


def relaxations(process, problem, arena, chosen, *, variants=False):
    """Answers at chosen time points, and at all of them, each with its bound on the cost, µs."""
    program = Program.of(problem, variants=variants)
    for points in ({p for p in chosen if p < program.n}, range(program.n)):
        model = TimePointModel(program, problem.rounded(arena), sorted({*points, program.n}), ())
        answer = process.solve(model.milp, time.monotonic() + SECONDS)
        yield answer, model.bound_us(answer.bound)


def fixed_and_refined(process, program, arena, point, room):
    """Plan of fix-and-refine from one or two time points, with layouts of at most `room` bytes."""
    points = sorted({min(point, program.n), program.n})
    model = TimePointModel(program, arena, points, set())
    answer = process.solve(model.milp, time.monotonic() + SECONDS)
    assume(answer.values is not None)

    def place(schedule):
        live = schedule.live_bytes()
        if live.max() > room:
            return LayoutConflict(int(live.argmax()), 1)
        placed = lay_out(schedule, room).placed
        if placed.arena_bytes > room:
            return LayoutConflict(int(live.argmax()), placed.arena_bytes - room)
        return placed

    search = FixAndRefine(program, process, arena, time.monotonic() + 2, place)
    placed = search.run(Residency.of(model, answer.values), math.inf)
    assume(placed is not None)
    return placed
