"""auto: keep everything if that fits, else coop-offline at once, then optimal until time is up."""

from planner.errors import DoesNotFitError
from planner.exact.optimal import solve_optimal
from planner.methods.base import Request, Solution
from planner.methods.keep_all import solve_keep_all
from planner.problem import Problem


def solve_auto(problem: Problem, request: Request) -> Solution:
    """
    The best plan seen by the deadline (or in `planner.exact.optimal.DEFAULT_SECONDS`).

    coop-offline, which has coop in its own portfolio, is where `optimal` begins.
    """
    try:
        return solve_keep_all(problem, request)
    except DoesNotFitError:
        return solve_optimal(problem, request)
