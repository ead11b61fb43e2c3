"""auto: keep everything if that fits, else coop-offline at once, then optimal until time is up."""

from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.exact.optimal import solve_optimal
from coop_plan.planner.exact.params import DEFAULTS, ExactParams
from coop_plan.planner.keep_all import solve_keep_all
from coop_plan.planner.method import Request, Solution


def solve_auto(problem: Problem, request: Request, params: ExactParams = DEFAULTS) -> Solution:
    """
    The best plan seen by the deadline (or in the default time of `optimal`).

    coop-offline, which has coop in its own portfolio, is where `optimal` begins.
    """
    try:
        return solve_keep_all(problem, request)
    except DoesNotFitError:
        return solve_optimal(problem, request, params)
