"""The door: a graph, a budget and a method in, one verified plan out."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Unpack

from coop_plan.planner.core.assemble import arena_bytes, assemble
from coop_plan.planner.core.errors import DoesNotFitError, InfeasibleBudgetError
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.keep_all import keep_all_schedule
from coop_plan.planner.layout import WORK, lay_out
from coop_plan.planner.method import MethodInfo, Progress, Request, Solution
from coop_plan.planner.options import OptionFields, PlanOptions
from coop_plan.planner.verifier import verify
from coop_plan.schemas import Budget, Graph, Plan

SMALL_PROBLEM_OPS = 100
"""Up to here the smallest feasible budget is searched to the last aligned byte."""

COARSE_PROBES = 10
"""Planning runs that the search may take on larger graphs."""


@dataclass(frozen=True)
class _Task:
    problem: Problem
    method: MethodInfo
    request: Request

    def solve(self, arena: int, *, any_schedule: bool = False) -> Solution:
        """The method's placed schedule within `arena` bytes; raises `DoesNotFitError`."""
        op, need = self.problem.largest_working_set
        if need > arena:
            raise DoesNotFitError(op)
        request = replace(self.request, arena_bytes=arena, any_schedule=any_schedule)
        solution = self.method.solve(self.problem, request)
        schedule = solution.schedule
        if schedule.offset is None:
            lay_out(schedule, arena)
        if arena_bytes(schedule) > arena:
            raise DoesNotFitError(op)
        return solution

    def search_minimum(self, keep_all_arena: int) -> int:
        """
        The smallest arena at which bisection saw `solve` succeed, in bytes.

        Keep-everything is feasible at `keep_all_arena` and above. A method need not be monotone:
        what is returned works, but a smaller arena may work as well.
        """
        step = self.problem.alignment
        low = self.problem.largest_working_set[1] - step
        best = keep_all_arena
        probes = 64 if self.problem.op_count <= SMALL_PROBLEM_OPS else COARSE_PROBES
        guess = low + step
        for probe in range(probes):
            if guess >= best:
                break
            self.request.check_time()
            if self.request.progress is not None:
                message = "searching the smallest feasible budget"
                self.request.progress(Progress(message, probe / probes))
            try:
                self.solve(guess, any_schedule=True)
                best = guess
            except DoesNotFitError:
                low = guess
            guess = max((low + best) // 2 // step * step, low + step)
        return best


def plan(
    graph: Graph,
    budget: PlanOptions | Budget | str | int,
    *,
    progress: Callable[[Progress], None] | None = None,
    **fields: Unpack[OptionFields],
) -> Plan:
    """
    Plan `graph` within `budget`; the plan has passed the verifier.

    Keep-everything is tried first, whatever the method: a budget that needs nothing costs nothing.
    A share is of keep-everything's peak, resident bytes included.

    Args:
        graph: one profiled training step.
        budget: bytes, `"12GiB"`, `"50%"` or `"min"`; or `PlanOptions`, which hold all the rest.
        progress: called with a `Progress` now and then.
        fields: those of `PlanOptions`, one by one.

    Raises:
        InvalidInputError: an unknown method or switch, a bad budget or alignment.
        InfeasibleBudgetError: the method cannot meet the budget.
        TimeLimitError: no plan before the time limit.
    """
    options = (
        budget
        if isinstance(budget, PlanOptions)
        else PlanOptions.of({"budget": budget} | dict(fields))
    )
    with _without_collections():
        return _plan(graph, options, progress)


def _plan(graph: Graph, options: PlanOptions, progress: Callable[[Progress], None] | None) -> Plan:
    started = time.monotonic()
    info, parsed = options.info, options.budget
    problem = Problem.from_graph(graph, options.alignment, options.outputs)
    deadline = None if options.time_limit is None else started + options.time_limit
    request = Request(0, options.off, deadline, options.seed, options.solver, progress=progress)
    task = _Task(problem, info, request)

    everything = keep_all_schedule(problem)
    # Only a share is of the very best placement; in bytes there is a second try below.
    placement = lay_out(everything, work=WORK if parsed.kind == "share" else 0)
    keep_arena = arena_bytes(everything)
    budget_bytes = parsed.resolve(problem.fixed_bytes + keep_arena)

    def finish(solution: Solution, within: int) -> Plan:
        made = assemble(
            solution.schedule,
            method=info.name,
            budget_bytes=within,
            status=solution.status,
            lower_bound_us=solution.lower_bound_us,
            eviction_free_ratio=solution.eviction_free_ratio,
            evictions=solution.evictions,
            solve_seconds=time.monotonic() - started,
        )
        verify(graph, made)
        return made

    if budget_bytes is None:
        arena = task.search_minimum(keep_arena)
        solution = _kept(everything) if arena == keep_arena else task.solve(arena)
        return finish(solution, problem.fixed_bytes + arena)
    limit = budget_bytes - problem.fixed_bytes
    if keep_arena > limit >= placement.lower_bound:
        # Try harder, from the layout that is there: this much is not ruled out.
        placement = lay_out(everything, limit, order_hint=placement.order)
        keep_arena = min(keep_arena, arena_bytes(everything))
    if keep_arena <= limit:
        return finish(_kept(everything), budget_bytes)
    try:
        return finish(task.solve(limit), budget_bytes)
    except DoesNotFitError as error:
        blocking = None if limit < 0 else error.op
    minimum = problem.fixed_bytes + task.search_minimum(keep_arena)
    if minimum <= budget_bytes:  # the method is not monotone: a smaller arena worked
        return finish(task.solve(minimum - problem.fixed_bytes), budget_bytes)
    raise InfeasibleBudgetError(
        info.name,
        budget_bytes,
        minimum,
        None if blocking is None else graph.ops[blocking].id,
        "" if blocking is None else graph.ops[blocking].name,
        0 if blocking is None else problem.working_set(blocking),
    )


def _kept(schedule: Schedule) -> Solution:
    """Keep-everything costs every op once, which is a lower bound by itself."""
    return Solution(schedule, "optimal", schedule.problem.base_cost_us)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """
    Pause the cyclic garbage collector: a plan is tens of thousands of objects and no cycle.

    Full collections would cost a fifth of the planning time, and more in a process that has
    imported much.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
