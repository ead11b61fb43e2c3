"""Keep everything until its last use: no eviction, only placement."""

from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.layout import lay_out
from coop_plan.planner.method import Request, Solution


def keep_all_schedule(problem: Problem) -> Schedule:
    """
    Program order, each buffer live from production to last use, in-place pairs used.

    An input may be taken over by the op that reads it last.
    """
    schedule = Schedule(problem)
    for op in range(problem.op_count):
        schedule.run(op, problem.in_place(_dying_pairs(problem, op)))
        for t in dict.fromkeys(problem.reads[op] + problem.makes[op]):
            if problem.last_use[t] <= op and schedule.holds(t):
                schedule.drop(t)
    schedule.finish()
    return schedule


def _dying_pairs(problem: Problem, op: int) -> list[tuple[int, int]]:
    return [
        (out, source) for out, source in problem.first_inplace(op) if problem.last_use[source] == op
    ]


def solve_keep_all(problem: Problem, request: Request) -> Solution:
    """The placed keep-everything schedule, when it fits the request."""
    schedule = keep_all_schedule(problem)
    placement = lay_out(schedule, request.arena_bytes)
    if placement.peak > request.arena_bytes:
        raise DoesNotFitError(problem.largest_working_set[0])
    return Solution(schedule, status="optimal", lower_bound_us=problem.base_cost_us)
