"""Keep-everything: each tensor is resident until its last use; only placement is planned."""

from dataclasses import replace

import numpy as np

from coop_plan.planner.core.arrays import to_arrays
from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.lifetimes import trace
from coop_plan.planner.core.memory_bounds import largest_working_set
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule, Schedule
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.placement.layout import WORK, Layout, lay_out
from coop_plan.schemas.units import Budget

SMALL_PROBLEM_OPS = 100
"""Ops up to which arenas of keep-everything are searched to the last aligned byte."""


def keep_all_schedule(problem: Problem) -> Schedule:
    """The schedule of every op once, in program order and in its default variant."""
    return Schedule.of(problem, range(problem.op_count))


def lay_out_everything(
    problem: Problem,
    capacity: int | None = None,
    *,
    work: int = WORK,
) -> Layout:
    """The layout of keep-everything; arguments as for `lay_out`.

    A block of a pair is harder to place, and ends as high as its first buffer, so the layout
    without pairs may be smaller.
    """
    schedule = keep_all_schedule(problem)
    layout = lay_out(schedule, capacity, work=work)
    for fewer in () if layout.placement.fits else _with_fewer_pairs(schedule):
        apart = lay_out(fewer, capacity, work=work)
        bound = min(layout.placement.lower_bound, apart.placement.lower_bound)
        if apart.placement.peak < layout.placement.peak:
            layout = apart
        layout = layout._replace(placement=replace(layout.placement, lower_bound=bound))
    return layout


def _with_fewer_pairs(schedule: Schedule) -> list[Schedule]:
    """The schedule without the pairs whose output is smaller, and without any, if it has such."""
    problem, arrays = schedule.problem, to_arrays(schedule.problem)
    # A larger problem keeps the pairs of equal sizes: laying it out once more takes too long.
    equal = arrays.size[arrays.shares_out] == arrays.size[arrays.shares_in]
    choices = [] if equal.all() else [equal]
    if equal.any() and problem.op_count <= 2000:
        choices.append(np.zeros(equal.size, dtype=np.bool_))
    found = []
    for kept in choices:
        before = np.append(0, kept.cumsum())
        fewer = arrays._replace(
            shares_ptr=before[arrays.shares_ptr],
            shares_out=arrays.shares_out[kept],
            shares_in=arrays.shares_in[kept],
        )
        lifetimes = trace(fewer, schedule.do, schedule.what)
        found.append(replace(schedule, trace=lifetimes))
    return found


def reference_layout(problem: Problem, budget: Budget) -> Layout:
    """The layout of keep-everything that a budget is held against.

    A share refers to the best one that is found. For a budget in bytes a greedy layout of a larger
    problem is enough: if the budget is near it, the caller searches further.
    """
    exact = budget.kind == "share" or problem.op_count <= SMALL_PROBLEM_OPS
    return lay_out_everything(problem, work=WORK if exact else 0)


def keep_all_solution(placed: PlacedSchedule) -> Solution:
    """Keep-everything as a solution; optimal if no variant is cheaper than its default."""
    cost = placed.cost_us
    if cost > placed.problem.floor_us:
        return Solution(placed)
    return Solution(placed, "optimal", cost, "any")


def solve_keep_all(problem: Problem, request: Request) -> Solution:
    """The placed keep-everything schedule; raises `DoesNotFitError` if it exceeds the arena."""
    placed, _ = lay_out_everything(problem, request.arena_bytes)
    if placed.arena_bytes > request.arena_bytes:
        raise DoesNotFitError(largest_working_set(problem).op)
    return keep_all_solution(placed)
