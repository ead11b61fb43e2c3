"""auto: keep-all if it fits; else `optimal`, starting from coop-offline, and other orders."""

import time
from dataclasses import dataclass, replace

from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule
from coop_plan.planner.exact.dual.background import BoundingProcess
from coop_plan.planner.exact.incumbent import Incumbent
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.optimal import TINY_OPS, heuristic_runs_to_end, solve_optimal
from coop_plan.planner.exact.params import DEFAULTS, ExactParams
from coop_plan.planner.heuristic.coop_offline import in_any_order, solve_coop_offline
from coop_plan.planner.keep_all import solve_keep_all
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.search.compute.annealing import cheaper, reordered


def solve_auto(problem: Problem, request: Request, params: ExactParams = DEFAULTS) -> Solution:
    """Returns the best plan found by the deadline (or in the default time of `optimal`).

    `optimal` starts from coop-offline. Its plan and its bound are in program order. A share of the
    time, but not much more than `optimal` took, is for other orders of first runs, and for a bound
    that holds in any order. That bound is published if it proves the plan, if the plan costs less
    than the bound of program order, or if it is the higher one. A time limit in which no model of
    the graph is solved is coop-offline's alone.
    """
    try:
        return solve_keep_all(problem, request)
    except DoesNotFitError:
        pass
    if "reorder" in request.off or request.any_schedule:
        return solve_optimal(problem, request, params)
    # The time in which a model of so many ops may be solved.
    least_seconds = params.seconds_per_op * problem.op_count if problem.op_count > TINY_OPS else 0.0
    if request.seconds_left < least_seconds:
        found = solve_coop_offline(problem, request)
        return Solution(found.placed, "feasible", problem.floor_us, "any")
    transfers = "transfers" in problem.beyond_recomputation
    solve = _other_orders_first if transfers or any(problem.overwritten) else _program_order_first
    with BoundingProcess(params) as process:
        bound = _AnyOrderBound(Incumbent(problem, request.arena_bytes, bound_model="any"), process)
        found, other = solve(problem, request, params, bound)
    for placed in (found.placed, other):
        if placed is not None:
            bound.incumbent.offer(placed)
    of_any, solution = bound.incumbent.answer(), cheaper(problem, found, other)
    higher = (of_any.lower_bound_us or 0.0) >= (solution.lower_bound_us or 0.0)
    return of_any if higher or of_any.status == "optimal" else solution


@dataclass
class _AnyOrderBound:
    """Lower bound on every schedule of default variants without transfers, in any order."""

    incumbent: Incumbent
    process: BoundingProcess

    def begin(self) -> None:
        """Start the bounding process, unless the problem has transfers."""
        if "transfers" not in self.incumbent.problem.beyond_recomputation:
            program = Program.of(self.incumbent.problem)
            self.process.begin(program, program.problem.rounded(self.incumbent.arena))

    def bound_us(self) -> float:
        """The bound proved so far, µs."""
        self.incumbent.prove(self.process.proved())
        return self.incumbent.bound_us


def _other_orders_first(
    problem: Problem, request: Request, params: ExactParams, bound: _AnyOrderBound
) -> tuple[Solution, PlacedSchedule | None]:
    """coop-offline in any order, whose search cannot start from `optimal`, then `optimal`."""
    other = None
    if heuristic_runs_to_end(problem.op_count, request.seconds_left):
        bound.begin()
        other = in_any_order(problem, request)
        bound.bound_us()
        bound.process.kill()
    try:
        return solve_optimal(problem, request, params), other
    except DoesNotFitError:
        if other is None:
            raise
        return Solution(other), None


def _program_order_first(
    problem: Problem, request: Request, params: ExactParams, bound: _AnyOrderBound
) -> tuple[Solution, PlacedSchedule | None]:
    """`optimal`, then the search among other orders from its plan."""
    begin = time.monotonic()
    deadline = request.deadline
    if deadline is None:
        deadline = begin + params.default_seconds
    until = begin + 0.8 * (deadline - begin)
    found = solve_optimal(problem, replace(request, deadline=until), params)
    now = time.monotonic()
    seconds = max(now - begin, params.reorder_seconds)
    rest = replace(request, deadline=min(deadline, now + seconds))
    bound.begin()
    sequence, cost_us = found.placed.schedule.what, found.placed.cost_us
    other = reordered(problem, sequence, cost_us, rest, bound.bound_us)
    bound.bound_us()
    return found, other
