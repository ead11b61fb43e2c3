"""auto: keep everything if that fits; else optimal, from coop-offline on, and other orders."""

import math
import time
from dataclasses import replace

from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.exact.optimal import solve_optimal
from coop_plan.planner.exact.params import DEFAULTS, ExactParams
from coop_plan.planner.keep_all import solve_keep_all
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.offline.resequence import cheaper, reordered
from coop_plan.planner.offline.solve import in_any_order


def solve_auto(problem: Problem, request: Request, params: ExactParams = DEFAULTS) -> Solution:
    """
    The best plan seen by the deadline (or in the default time of `optimal`).

    coop-offline, which has coop in its own portfolio, is where `optimal` begins. Its plan is in
    program order, and so is what its bound is of. What is left of the time, a share of it at least,
    but no more than `optimal` took, goes into other orders of first runs; whoever finds a plan
    below that bound has only the one that holds for all: every op once. Where that walk cannot go
    on from what `optimal` finds, coop-offline's plan in any order counts instead.
    """
    try:
        return solve_keep_all(problem, request)
    except DoesNotFitError:
        pass
    if "reorder" in request.off or request.any_schedule:
        return solve_optimal(problem, request, params)
    links = "transfers" in problem.beyond_recomputation
    if links or any(problem.overwritten):
        left = math.inf if request.deadline is None else request.deadline - time.monotonic()
        unhurried = params.search.unhurried(problem.op_count, left)
        other = in_any_order(problem, request) if unhurried else None
        try:
            found = solve_optimal(problem, request, params)
        except DoesNotFitError:
            if other is None:
                raise
            return Solution(other)
        return cheaper(problem, found, other)
    begin = time.monotonic()
    deadline = request.deadline
    if deadline is None:
        deadline = begin + params.search.default_seconds
    share = params.search.reorder_share
    until = begin + (1 - share) * (deadline - begin)
    found = solve_optimal(problem, replace(request, deadline=until), params)
    now = time.monotonic()
    rest = replace(request, deadline=min(deadline, 2 * now - begin))
    other = reordered(problem, found.placed.schedule.what, found.placed.cost_us, rest)
    return cheaper(problem, found, other)
