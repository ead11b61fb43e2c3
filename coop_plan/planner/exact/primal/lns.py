"""Large neighbourhood search on a time-point model whose solve timed out.

All tensors and ops outside a random stretch of the program are fixed to the best solution, and the
remaining model is solved. It proves nothing.
"""

import random
import time
from dataclasses import replace

from coop_plan.planner.exact.model.milp import Answer, Outcome
from coop_plan.planner.exact.model.timepoint import TimePointModel
from coop_plan.planner.exact.params import DEFAULTS, LnsParams
from coop_plan.planner.exact.solver.process import SolverProcess


def improve_by_lns(
    process: SolverProcess,
    model: TimePointModel,
    answer: Answer,
    deadline: float,
    params: LnsParams = DEFAULTS.lns,
) -> Answer:
    """The answer or a better one, of the same bound. `deadline` is a `time.monotonic` value, s."""
    assert answer.values is not None
    rng = random.Random(0)  # noqa: S311  (no secret)
    positions = _positions(model)
    best = answer
    failures = 0
    while failures < params.patience and time.monotonic() < deadline:
        assert best.values is not None
        width = int(model.program.n * rng.choice(params.widths)) + 1
        low = rng.randrange(-width // 2, model.program.n)
        lower, upper = list(model.milp.lower), list(model.milp.upper)
        for column, position in positions.items():
            if not low <= position < low + width:
                lower[column] = upper[column] = float(round(best.values[column]))
        until = min(deadline, time.monotonic() + params.step_seconds)
        stretch = replace(model.milp, lower=lower, upper=upper)
        found = process.solve(stretch, until, relative_gap=params.relative_gap)
        if found.values is None and found.outcome is Outcome.INFEASIBLE:
            return best  # the solution was feasible within tolerances only
        if found.values is not None and found.objective < best.objective - 1e-9:
            best = replace(best, objective=found.objective, values=found.values)
            failures = 0
        else:
            failures += 1
    return best


def _positions(model: TimePointModel) -> dict[int, int]:
    """Column → program position of its op, or of its tensor's producer."""
    producer = model.program.problem.producer
    positions: dict[int, int] = {}
    for x, y in zip(model.x, model.y, strict=True):
        positions |= {column: producer[t] for t, column in x.items() if column is not None}
        positions |= {column: op for op, column in y.items()}
    return positions
