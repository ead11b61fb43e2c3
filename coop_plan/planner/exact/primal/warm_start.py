"""Warm start: a schedule as a solution of the program with variants."""

import numpy as np

from coop_plan.planner.core.lifetimes import RUN
from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.exact.model.timepoint import TimePointModel


def warm_start(model: TimePointModel, schedule: Schedule) -> list[float]:
    """Values of the program's columns for a schedule without transfers."""
    program, problem = model.program, model.program.problem
    values = [0.0] * len(model.milp.lower)
    variants = schedule.what[schedule.do == RUN].tolist()
    first: dict[int, int] = {}
    for event, v in enumerate(variants):
        first.setdefault(problem.variants[v].op, event)
    for event in first.values():
        v = _in_model(model, variants[event])
        if v in model.f:
            values[model.f[v]] = 1.0
    t = schedule.trace
    begin = 0
    for k, point in enumerate(model.points):
        end = first.get(point, len(variants))
        for event in range(begin, end):
            if event != first[problem.variants[variants[event]].op]:
                column = _rerun_column(model, k, variants[event])
                if column is not None:
                    values[column] = 1.0
        live = np.flatnonzero((t.first < end) & (t.last >= end))
        for tensor in t.tensor[live].tolist():
            column = model.x[k].get(tensor)
            if column is not None:
                values[column] = 1.0
        if point < program.n:
            for buffer in np.flatnonzero((t.first == end) & (t.shares >= 0)).tolist():
                pair = int(t.tensor[buffer]), int(t.tensor[t.shares[buffer]])
                if pair in model.z[k]:
                    values[model.z[k][pair]] = 1.0
        begin = end + 1
    for k, throughout in enumerate(model.h):
        for tensor, column in throughout.items():
            constant, terms = model.kept(k, tensor)
            resident = model.x[k][tensor]
            stays = constant + sum(value * values[c] for c, value in terms)
            stays += (1.0 if resident is None else values[resident]) - 1.0
            made = sum(values[c] for c, _ in model.recomputed(k, tensor))
            values[column] = min(1.0, max(0.0, stays - made))
    return values


def _in_model(model: TimePointModel, variant: int) -> int:
    """The variant itself, or the model's cheapest one with the same outputs if it is dominated."""
    problem, program = model.program.problem, model.program
    original = problem.variants[variant]
    if variant in program.choices[original.op]:
        return variant
    outputs = set(original.outputs)
    same = [v for v in program.choices[original.op] if set(problem.variants[v].outputs) == outputs]
    return min(same, key=lambda v: problem.variants[v].cost_us)


def _rerun_column(model: TimePointModel, k: int, variant: int) -> int | None:
    """The column of a recompute in a variant of equal inputs and outputs; None without one."""
    problem, program = model.program.problem, model.program
    original = problem.variants[_in_model(model, variant)]
    for v in program.choices[original.op]:
        same = {*problem.variants[v].outputs} == {*original.outputs}
        if v in model.y[k] and same and {*problem.variants[v].inputs} == {*original.inputs}:
            return model.y[k][v]
    return None
