"""
Large neighbourhood search on a time-point model whose solve ran out of time.

Everything but the tensors and ops of a stretch of the program is fixed to the best solution, and
the small model that is left is solved; stretches are drawn at random. It proves nothing.
"""

import random
import time
from dataclasses import replace

from coop_plan.planner.exact.model.milp import Answer, Outcome
from coop_plan.planner.exact.model.timepoint import TimePointModel
from coop_plan.planner.exact.solver.process import SolverProcess

WIDTHS = (0.1, 0.2, 0.3)
"""Shares of the program that are set free at a time."""

STEP_SECONDS = 3.0

PATIENCE = 12
"""Stretches without success before giving up."""


def polish(
    process: SolverProcess, model: TimePointModel, answer: Answer, deadline: float
) -> Answer:
    """The answer, or one with better values; its bound stays. `deadline` is monotonic, s."""
    assert answer.values is not None
    draw = random.Random(0)  # noqa: S311  (no secret)
    place = _positions(model)
    best = answer
    failures = 0
    while failures < PATIENCE and time.monotonic() < deadline:
        assert best.values is not None
        width = int(model.program.n * draw.choice(WIDTHS)) + 1
        low = draw.randrange(-width // 2, model.program.n)
        lower, upper = list(model.milp.lower), list(model.milp.upper)
        for column, position in place.items():
            if not low <= position < low + width:
                lower[column] = upper[column] = float(round(best.values[column]))
        until = min(deadline, time.monotonic() + STEP_SECONDS)
        found = process.solve(
            replace(model.milp, lower=lower, upper=upper), until, relative_gap=1e-3
        )
        if found.values is None and found.outcome is Outcome.INFEASIBLE:
            return best  # the solution was feasible within tolerances only
        if found.values is not None and found.objective < best.objective - 1e-9:
            best = replace(best, objective=found.objective, values=found.values)
            failures = 0
        else:
            failures += 1
    return best


def _positions(model: TimePointModel) -> dict[int, int]:
    """Where in the program each column's tensor is made, or its op runs first."""
    producer = model.program.problem.producer
    place: dict[int, int] = {}
    for x, y in zip(model.x, model.y, strict=True):
        place |= {column: producer[t] for t, column in x.items() if column is not None}
        place |= {column: op for op, column in y.items()}
    return place
