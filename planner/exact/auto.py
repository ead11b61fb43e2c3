"""auto: keep everything if that fits; else optimal, from coop-offline on, and other orders."""

import time
from dataclasses import replace

from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.exact.optimal import solve_optimal
from coop_plan.planner.exact.params import DEFAULTS, ExactParams
from coop_plan.planner.keep_all import solve_keep_all
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.offline.resequence import reordered, with_bound


def solve_auto(problem: Problem, request: Request, params: ExactParams = DEFAULTS) -> Solution:
    """
    The best plan seen by the deadline (or in the default time of `optimal`).

    coop-offline, which has coop in its own portfolio, is where `optimal` begins. Its plan is in
    program order, and so is what its bound is of. What is left of the time, a share of it at least,
    but no more than `optimal` took, goes into other orders of first runs; whoever finds a plan
    below that bound has only the one that holds for all: every op once.
    """
    try:
        return solve_keep_all(problem, request)
    except DoesNotFitError:
        pass
    links = "transfers" in problem.beyond_recomputation
    if "reorder" in request.off or request.any_schedule or links:
        return solve_optimal(problem, request, params)
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
    return found if other is None else with_bound(problem, found, other)
