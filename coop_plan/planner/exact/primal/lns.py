"""Large neighbourhood search: most of a solution is fixed, the rest of the program is solved.

Shaw, Using constraint programming and local search methods to solve vehicle routing problems, CP
1998. Free are the tensors of one stretch of the program, those of two stretches of half the length
(to exchange residents of one for residents of the other), or all decisions of a stretch of
segments. The share of the program that is free adapts to how the solves end. It proves nothing.
"""

import random
import time
from dataclasses import replace

from coop_plan.planner.exact.model.milp import Answer, Milp, Outcome
from coop_plan.planner.exact.model.timepoint import TimePointModel
from coop_plan.planner.exact.solver.process import SolverProcess

STEP_SECONDS = 3.0
"""Time limit of one neighbourhood, s."""

RELATIVE_GAP = 1e-3
"""Relative gap to which a neighbourhood is solved."""


class Neighbourhoods:
    """Draws neighbourhoods; each of the three kinds adapts its own width."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)  # noqa: S311  (no secret)
        self.widths = [0.12] * 3  # shares of the program
        self._kind = 0

    def next(self, model: TimePointModel, values: list[float]) -> Milp:
        """The program with a random neighbourhood of a solution free (values per column)."""
        n, segments = model.program.n, len(model.points)
        self._kind = self.rng.randrange(3)
        width = self.widths[self._kind]
        if self._kind == 0:
            return neighbourhood(model, values, self._stretch(n, width), range(0))
        if self._kind == 1:
            ops = {*self._stretch(n, width / 2), *self._stretch(n, width / 2)}
            return neighbourhood(model, values, ops, range(0))
        return neighbourhood(model, values, range(0), self._stretch(segments, width))

    def _stretch(self, count: int, share: float) -> range:
        width = int(count * share) + 1
        low = self.rng.randrange(-width // 2, count)
        return range(max(0, low), min(count, low + width))

    def adapt(self, outcome: Outcome) -> None:
        """Widen if the solve ended by itself, narrow if it hit a limit."""
        ended = outcome in (Outcome.OPTIMAL, Outcome.INFEASIBLE)
        width = self.widths[self._kind] * (1.1 if ended else 0.7)
        self.widths[self._kind] = min(0.7, max(0.04, width))  # shares of the program


def improve_by_lns(
    process: SolverProcess, model: TimePointModel, answer: Answer, deadline: float
) -> Answer:
    """The answer or a better one, of the same bound. `deadline` is a `time.monotonic` value, s.

    Ends after a dozen neighbourhoods without improvement.
    """
    neighbourhoods = Neighbourhoods(0)
    best, failures = answer, 0
    while failures < 12 and time.monotonic() < deadline:
        assert best.values is not None
        part = neighbourhoods.next(model, best.values)
        until = min(deadline, time.monotonic() + STEP_SECONDS)
        found = process.solve(part, until, relative_gap=RELATIVE_GAP)
        neighbourhoods.adapt(found.outcome)
        failures += 1
        if found.values is not None and found.objective < best.objective - 1e-9:
            best, failures = replace(best, objective=found.objective, values=found.values), 0
    return best


def neighbourhood(
    model: TimePointModel,
    values: list[float],
    ops: range | set[int],
    segments: range,
) -> Milp:
    """The program with all but some ops and segments fixed to a solution.

    Free are, in all segments, the tensors made and the ops first run in `ops`, and the variants of
    the ops that read those tensors, as a forward op and its backward choose together; and all
    decisions in `segments`. So are columns other than F, X and Y. Memory rows that the solution
    violates are relaxed to its values.
    """
    program, problem = model.program, model.program.problem
    fixed = list[int]()
    first = {op for k in segments for op in range(model.start(k) + 1, model.points[k] + 1)}
    for v, column in model.f.items():
        op = problem.variants[v].op
        near = any(problem.producer[t] in ops for t in program.reads[v])
        if not (near or op in ops or op in first):
            fixed.append(column)
    for k, (x, y) in enumerate(zip(model.x, model.y, strict=True)):
        if k not in segments:
            kept = x.items()
            fixed += [c for t, c in kept if c is not None and problem.producer[t] not in ops]
            fixed += [c for v, c in y.items() if problem.variants[v].op not in ops]
    lower, upper = list(model.milp.lower), list(model.milp.upper)
    for column in fixed:
        lower[column] = upper[column] = float(round(values[column]))
    row_upper = list(model.milp.row_upper)
    for rows in _row_activity(model, values):
        for row, amount in rows.items():
            row_upper[row] = max(row_upper[row], amount)
    return replace(model.milp, lower=lower, upper=upper, row_upper=row_upper)


def _row_activity(model: TimePointModel, values: list[float]) -> list[dict[int, float]]:
    """Per segment: memory row → its value in a solution."""
    memory = [rows + cuts for rows, cuts in zip(model.memory, model.cut_rows, strict=True)]
    used = {row: 0.0 for rows in memory for row in rows}
    for row, column, value in zip(
        model.milp.entry_row, model.milp.entry_column, model.milp.entry_value, strict=True
    ):
        if row in used:
            used[row] += value * values[column]
    return [{row: used[row] for row in rows} for rows in memory]
