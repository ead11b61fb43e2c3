"""Keep everything until its last use: no eviction, only placement."""

from planner.errors import DoesNotFitError
from planner.layout import lay_out
from planner.methods.base import Request, Solution
from planner.problem import Problem
from planner.schedule import Schedule


def keep_all_schedule(problem: Problem) -> Schedule:
    """
    Program order, each buffer live from production to last use, in-place pairs used.

    A pair shares its address when the input is read for the last time by the op, and when neither
    side is in another pair that was taken already.
    """
    schedule = Schedule(problem)
    for op in range(problem.op_count):
        schedule.run(op, dying_pairs(problem, op))
        for t in dict.fromkeys(problem.reads[op] + problem.makes[op]):
            if problem.last_use[t] <= op and schedule.holds(t):
                schedule.drop(t)
    schedule.finish()
    return schedule


def dying_pairs(problem: Problem, op: int) -> tuple[tuple[int, int], ...]:
    """The (output, input) pairs of `op` whose input has its last use there, each used once."""
    pairs: list[tuple[int, int]] = []
    taken: set[int] = set()
    for out, source in problem.inplace[op]:
        if problem.last_use[source] == op and out not in taken and source not in taken:
            pairs.append((out, source))
            taken.update((out, source))
    return tuple(pairs)


def solve_keep_all(problem: Problem, request: Request) -> Solution:
    """The placed keep-everything schedule, when it fits the request."""
    schedule = keep_all_schedule(problem)
    placement = lay_out(schedule, request.arena_bytes)
    if placement.peak > request.arena_bytes:
        raise DoesNotFitError(problem.largest_working_set[0])
    return Solution(schedule, status="optimal", lower_bound_us=problem.base_cost_us)
