"""Keep-everything: each tensor is resident until its last use; only placement is planned."""

from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.memory_bounds import largest_working_set
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule, Schedule
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.placement.layout import lay_out


def keep_all_schedule(problem: Problem) -> Schedule:
    """The schedule of every op once, in program order and in its default variant."""
    return Schedule.of(problem, range(problem.op_count))


def keep_all_solution(placed: PlacedSchedule) -> Solution:
    """Keep-everything as a solution; optimal if no variant is cheaper than its default."""
    cost = placed.cost_us
    if cost > placed.problem.floor_us:
        return Solution(placed)
    return Solution(placed, "optimal", cost, "any")


def solve_keep_all(problem: Problem, request: Request) -> Solution:
    """The placed keep-everything schedule; raises `DoesNotFitError` if it exceeds the arena."""
    placed, _ = lay_out(keep_all_schedule(problem), request.arena_bytes)
    if placed.arena_bytes > request.arena_bytes:
        raise DoesNotFitError(largest_working_set(problem).op)
    return keep_all_solution(placed)
