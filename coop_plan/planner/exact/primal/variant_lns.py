"""
Neighbourhoods of a solution of the program with variants: what is set free around it.

Shaw, Using constraint programming and local search methods to solve vehicle routing problems, CP
1998. What is free is one stretch of the program, two of half the length (what is kept in one for
what is kept in the other), or a stretch of segments (what is done there, of all tensors). The share
of the program that is free follows from how the solves end.
"""

import random
from dataclasses import replace

from coop_plan.planner.exact.model.milp import Milp, Outcome
from coop_plan.planner.exact.model.timepoint import ROUNDING
from coop_plan.planner.exact.model.variant_timepoint import VariantModel
from coop_plan.planner.exact.variant_params import VariantParams


class Neighbourhoods:
    """Draws them; each kind has its own share of the program that the next one sets free."""

    def __init__(self, rng: random.Random, params: VariantParams) -> None:
        self.rng, self.params = rng, params
        self.widths = [params.first_width] * 3
        self._kind = 0

    def next(self, model: VariantModel, values: list[float]) -> Milp:
        """The program with what is drawn set free around a solution, values per column."""
        n, segments = model.choices.n, len(model.points)
        self._kind = self.rng.randrange(3)
        width = self.widths[self._kind]
        if self._kind == 0:
            return neighbourhood(model, values, self._stretch(n, width), range(0))
        if self._kind == 1:
            ops = {*self._stretch(n, width / 2), *self._stretch(n, width / 2)}
            return neighbourhood(model, values, ops, range(0))
        return neighbourhood(model, values, range(0), self._stretch(segments, width))

    def near_segment(self, model: VariantModel, values: list[float], k: int) -> Milp:
        """What is done near segment k and what is resident there set free, to fit there."""
        width = self.widths[self._kind]
        near = int(len(model.points) * width / 2) + 1
        segments = range(max(0, k - near), min(len(model.points), k + near + 1))
        columns = model.x[k].items()
        here = (t for t, c in columns if c is None or values[c] > 0.5)
        most = width / self.params.first_width
        ops = {model.choices.problem.producer[t] for t in here if self.rng.random() < most}
        return neighbourhood(model, values, ops, segments, segments)

    def _stretch(self, count: int, share: float) -> range:
        width = int(count * share) + 1
        low = self.rng.randrange(-width // 2, count)
        return range(max(0, low), min(count, low + width))

    def adapt(self, outcome: Outcome) -> None:
        """Wider where the solve came to an end, narrower where it did not."""
        ended = outcome in (Outcome.OPTIMAL, Outcome.INFEASIBLE)
        step = self.params.widen if ended else self.params.narrow
        width = self.widths[self._kind] * step
        self.widths[self._kind] = min(self.params.max_width, max(self.params.min_width, width))


def neighbourhood(
    model: VariantModel,
    values: list[float],
    ops: range | set[int],
    segments: range,
    strict: range = range(0),
) -> Milp:
    """
    The program with all but some ops and segments as it is in a solution.

    Free are the tensors made and the ops first run in `ops`, in all segments, and the variants of the
    ops that read those tensors, as what a forward op makes is decided with its backward; and all
    that is done in `segments`. Rows of memory that the solution breaks are as it has them, but for
    segments that are `strict`.
    """
    choices, problem = model.choices, model.choices.problem
    free = set[int]()
    first = {op for k in segments for op in range(model.start(k) + 1, model.points[k] + 1)}
    for v in model.f:
        op = problem.variants[v].op
        near = any(problem.producer[t] in ops for t in choices.reads[v])
        if near or op in ops or op in first:
            free.add(model.f[v])
    for k, (x, y, z) in enumerate(zip(model.x, model.y, model.z, strict=True)):
        here = k in segments
        kept = x.items()
        free.update(c for t, c in kept if c is not None and (here or problem.producer[t] in ops))
        free.update(c for v, c in y.items() if here or problem.variants[v].op in ops)
        free.update(z.values())
    for held in model.h:
        free.update(held.values())
    lower, upper = list(model.milp.lower), list(model.milp.upper)
    for column, value in enumerate(values):
        if column not in free:
            lower[column] = upper[column] = value
    row_upper = list(model.milp.row_upper)
    for k, rows in enumerate(_row_activity(model, values)):
        for row, amount in rows.items() if k not in strict else ():
            row_upper[row] = max(row_upper[row], amount)
    return replace(model.milp, lower=lower, upper=upper, row_upper=row_upper)


def overfull_segments(model: VariantModel, values: list[float]) -> dict[int, float]:
    """The segments whose rows of memory a solution breaks, and by how much of their room."""
    found = dict[int, float]()
    for k, rows in enumerate(_row_activity(model, values)):
        over = max((used - model.milp.row_upper[row] for row, used in rows.items()), default=0.0)
        if over > ROUNDING:
            found[k] = over
    return found


def _row_activity(model: VariantModel, values: list[float]) -> list[dict[int, float]]:
    """Per segment what a solution uses in the rows of memory, by row."""
    used = {row: 0.0 for rows in model.memory for row in rows}
    for row, column, value in zip(
        model.milp.entry_row, model.milp.entry_column, model.milp.entry_value, strict=True
    ):
        if row in used:
            used[row] += value * values[column]
    return [{row: used[row] for row in rows} for rows in model.memory]
