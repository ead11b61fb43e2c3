"""A schedule as a solution of the program with variants: where the search starts from."""

import numpy as np

from coop_plan.planner.core.lifetimes import RUN
from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.exact.model.variant_timepoint import VariantModel


def lifted(model: VariantModel, schedule: Schedule) -> list[float]:
    """Values of the program's columns; the schedule has no transfers."""
    choices, problem = model.choices, model.choices.problem
    values = [0.0] * len(model.milp.lower)
    variants = schedule.what[schedule.do == RUN].tolist()
    first: dict[int, int] = {}
    for event, v in enumerate(variants):
        first.setdefault(problem.variants[v].op, event)
    for event in first.values():
        v = _listed(model, variants[event])
        if v in model.f:
            values[model.f[v]] = 1.0
    t = schedule.trace
    begin = 0
    for k, point in enumerate(model.points):
        end = first.get(point, len(variants))
        for event in range(begin, end):
            if event != first[problem.variants[variants[event]].op]:
                column = _rerun(model, k, variants[event])
                if column is not None:
                    values[column] = 1.0
        here = np.flatnonzero((t.first < end) & (t.last >= end))
        for tensor in t.tensor[here].tolist():
            column = model.x[k].get(tensor)
            if column is not None:
                values[column] = 1.0
        if point < choices.n:
            for buffer in np.flatnonzero((t.first == end) & (t.shares >= 0)).tolist():
                pair = int(t.tensor[buffer]), int(t.tensor[t.shares[buffer]])
                if pair in model.z[k]:
                    values[model.z[k][pair]] = 1.0
        begin = end + 1
    for k, held in enumerate(model.h):
        for tensor, column in held.items():
            constant, terms = model.before(k, tensor)
            resident = model.x[k][tensor]
            stays = constant + sum(value * values[c] for c, value in terms)
            stays += (1.0 if resident is None else values[resident]) - 1.0
            made = sum(values[c] for c, _ in model.again(k, tensor))
            values[column] = min(1.0, max(0.0, stays - made))
    return values


def _listed(model: VariantModel, variant: int) -> int:
    """The variant of the same op that the model has instead of one that it leaves out."""
    problem, choices = model.choices.problem, model.choices
    asked = problem.variants[variant]
    if variant in choices.of[asked.op]:
        return variant
    same = [v for v in choices.of[asked.op] if set(problem.variants[v].outputs) == {*asked.outputs}]
    return min(same, key=lambda v: problem.variants[v].cost_us)


def _rerun(model: VariantModel, k: int, variant: int) -> int | None:
    """The column of a recompute: of the variant that reads and makes the same, if there is one."""
    problem, choices = model.choices.problem, model.choices
    asked = problem.variants[_listed(model, variant)]
    for v in choices.of[asked.op]:
        same = {*problem.variants[v].outputs} == {*asked.outputs}
        if v in model.y[k] and same and {*problem.variants[v].inputs} == {*asked.inputs}:
            return model.y[k][v]
    return None
