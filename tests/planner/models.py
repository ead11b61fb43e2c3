"""Helpers for tests of the time-point model and of its readout."""

import time

from hypothesis import assume

from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.timepoint import TimePointModel
from coop_plan.planner.exact.primal.readout import NotRecomputableError, Residency, read_out

SECONDS = 20.0


def relaxations(process, problem, arena, chosen, *, variants=False):
    """Answers at chosen time points, and at all of them, each with its bound on the cost, µs."""
    program = Program.of(problem, variants=variants)
    for points in ({p for p in chosen if p < program.n}, range(program.n)):
        model = TimePointModel(program, problem.rounded(arena), sorted({*points, program.n}), ())
        answer = process.solve(model.milp, time.monotonic() + SECONDS)
        yield answer, model.bound_us(answer.bound)


def readout_of(process, program, arena, point):
    """The readout of a solution with one or two time points."""
    model = TimePointModel(program, arena, sorted({min(point, program.n), program.n}))
    answer = process.solve(model.milp, time.monotonic() + SECONDS)
    assume(answer.values is not None)
    try:
        return read_out(program, Residency.of(model, answer.values), arena)
    except NotRecomputableError:
        assume(False)
