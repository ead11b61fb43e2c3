"""Keep everything until its last use: no eviction, only placement."""

from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.working_sets import largest_working_set
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule, Schedule
from coop_plan.planner.placement.layout import lay_out
from coop_plan.planner.method import Request, Solution


def keep_all_schedule(problem: Problem) -> Schedule:
    """Program order, every op once in its default variant."""
    return Schedule.of(problem, range(problem.op_count))


def kept(placed: PlacedSchedule) -> Solution:
    """Keep-everything as a solution: without variants no schedule at all costs less."""
    cost = placed.cost_us
    if cost > placed.problem.floor_us:
        return Solution(placed)
    return Solution(placed, "optimal", cost, "any")


def solve_keep_all(problem: Problem, request: Request) -> Solution:
    """The placed keep-everything schedule, when it fits the request."""
    placed, _ = lay_out(keep_all_schedule(problem), request.arena_bytes)
    if placed.arena_bytes > request.arena_bytes:
        raise DoesNotFitError(largest_working_set(problem).op)
    return kept(placed)
