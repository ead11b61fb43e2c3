"""`plan`, the entry point of the planner: from graph and options to one verified plan."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from coop_plan.planner.core.build_plan import assemble
from coop_plan.planner.core.errors import (
    DoesNotFitError,
    InfeasibleBudgetError,
    TimeLimitError,
)
from coop_plan.planner.core.memory_bounds import (
    arena_lower_bound,
    budget_lower_bound,
    explain_residents,
    unrecomputable_residents,
    working_set_bound,
    working_sets,
)
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.keep_all import (
    keep_all_solution,
    lay_out_everything,
    reference_layout,
)
from coop_plan.planner.kernels import compile_method
from coop_plan.planner.method import MethodInfo, Progress, Request, Solution
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.placement.layout import lay_out_host
from coop_plan.planner.smallest_budget import Task
from coop_plan.planner.verifier import verify
from coop_plan.planner.warm_start import as_answer, fits, runs_of
from coop_plan.schemas import Graph, Plan


def keep_all_peak(graph: Graph, options: PlanOptions) -> int:
    """Peak of keep-everything in bytes, resident bytes included, of which a share is."""
    graph = options.apply_link(graph)
    problem = Problem.from_graph(graph, options.alignment, options.outputs, options.host_budget)
    return problem.fixed_bytes + lay_out_everything(problem).placed.arena_bytes


def peak_of_order(graph: Graph, ops: Sequence[int]) -> int:
    """Bytes live at the fullest run of these ops in this order, resident bytes included."""
    problem = Problem.from_graph(graph, 1, "arena")
    live = Schedule.of(problem, ops).live_bytes(exact=True)
    return problem.fixed_bytes + int(live.max(initial=0))


def plan(
    graph: Graph,
    budget: PlanOptions | str | int,
    *,
    progress: Callable[[Progress], None] | None = None,
    start: Plan | None = None,
    **fields: Any,
) -> Plan:
    """Plan `graph` within `budget`; the plan has passed the verifier.

    Every method tries keep-everything first, so a budget that it meets costs nothing. A share is of
    keep-everything's peak, resident bytes included. The smallest budget is searched only for `min`
    and with the option `smallest`.

    Args:
        graph: one profiled training step.
        budget: bytes, `"12GiB"`, `"50%"` or `"min"`; or `PlanOptions`, which include the budget.
        progress: called with a `Progress` at intervals.
        start: a plan of this graph to start from. If it fits the request, the answer costs no more
            (for `min`, it needs no more memory).
        fields: fields of `PlanOptions`, as keyword arguments.

    Raises:
        InvalidInputError: an unknown method or switch, a bad budget or alignment.
        InfeasibleBudgetError: the method cannot meet the budget.
        TimeLimitError: no plan was found within the time limit.
        InvalidPlanError: `start` is no valid plan of this graph.
    """
    options = PlanOptions.given(budget, fields)
    if start is None:
        return _planned(graph, options, progress)
    began = time.monotonic()
    verify(graph, start)
    found: Plan | None = None
    limit = start.peak_bytes
    try:
        found = _planned(graph, options, progress, start)
    except (InfeasibleBudgetError, TimeLimitError):
        if options.budget.kind != "min":
            limit = options.budget.resolve(keep_all_peak(graph, options)) or 0
        if not fits(start, options, limit):
            raise
    else:
        worse: tuple[float, float] = (0, found.cost_us)
        known: tuple[float, float] = (0, start.cost_us)
        if options.budget.kind == "min":
            worse, known = (found.peak_bytes, worse[1]), (start.peak_bytes, known[1])
        else:
            limit = found.budget_bytes
        if worse <= known or not fits(start, options, limit):
            return found
    seconds = time.monotonic() - began
    answer = as_answer(start, options, limit, seconds, found)
    verify(graph, answer)
    return answer


def least_at_any_costs(graph: Graph, **fields: Any) -> Plan:
    """A plan within the smallest budget that is found for this graph at any costs of its ops.

    `plan` with the option `smallest` finds a plan within that budget and each larger one, also for
    the graph of the same step on another machine. `fields` are those of `PlanOptions`.
    """
    options = PlanOptions.given("min", fields)
    graph = options.apply_link(graph)
    started = time.monotonic()
    compile_method(options.info.name, linked=graph.device.linked)
    problem = Problem.from_graph(graph, options.alignment, options.outputs, options.host_budget)
    task = Task(problem, options.info, Request(0, options.off, None, options.seed, options.solver))
    known = task.at_any_costs()
    arena = known.placed.arena_bytes
    solution = task.improved(known, arena)
    return verified_plan(graph, solution, options, problem.fixed_bytes + arena, started)


def _planned(
    graph: Graph,
    options: PlanOptions,
    progress: Callable[[Progress], None] | None,
    start: Plan | None = None,
) -> Plan:
    """As `plan`; the method may start from the runs of `start`, a valid plan of the graph."""
    info = options.info
    graph = options.apply_link(graph)
    compile_method(info.name, linked=graph.device.linked, progress=progress)
    started = time.monotonic()
    problem = Problem.from_graph(graph, options.alignment, options.outputs, options.host_budget)
    if info.homes and problem.home_candidates:
        return _planned_with_homes(problem, options, progress, start, started)
    return _planned_without_homes(problem, options, progress, start, started)


def _planned_with_homes(
    problem: Problem,
    options: PlanOptions,
    progress: Callable[[Progress], None] | None,
    start: Plan | None,
    started: float,
) -> Plan:
    """The better of the plans with and without movable residents on the host.

    With a time limit each search has half of it. A process proves a bound during the second one, if
    the method is exact.
    """
    from coop_plan.planner.exact.dual.background import BoundingProcess
    from coop_plan.planner.exact.params import DEFAULTS
    from coop_plan.planner.homes.bound import with_bound
    from coop_plan.planner.homes.online import OnlineHomes
    from coop_plan.planner.homes.search import HomeSearch

    graph, limit = problem.graph, options.time_limit
    alone = options.model_copy(
        {"smallest": False, "time_limit": None if limit is None else limit / 2}
    )
    deadline = None if limit is None else started + limit
    request = Request(0, options.off, deadline, options.seed, progress=progress)
    plans_of = HomeSearch if options.info.homes == "searched" else OnlineHomes
    found: Plan | None = None
    if options.budget.kind == "min":
        least = plans_of(problem, options, request.part(0.5)).smallest(
            keep_all_peak(graph, options)
        )
        if least is not None and least.peak_bytes <= _least_with_all_residents(problem):
            return least
        found = _planned_without_homes(problem, alone, progress, start, time.monotonic())
        plans = [found] if least is None else [found, least]
        return min(plans, key=lambda made: (made.peak_bytes, made.cost_us))
    refusal: InfeasibleBudgetError | TimeLimitError | None = None
    try:
        found = _planned_without_homes(problem, alone, progress, start, started)
    except (InfeasibleBudgetError, TimeLimitError) as error:
        refusal = error
    search = plans_of(problem, options, request)
    if found is not None and found.cost_us <= problem.floor_us and not problem.host_ops:
        return found
    everything = keep_all_peak(graph, options)
    budget = options.budget.resolve(everything)
    if budget is not None:
        with BoundingProcess() as process:
            if options.info.anytime:
                process.begin_with_homes(problem, budget)
            cheaper = search.cheapest(budget, math.inf if found is None else found.cost_us)
            found = cheaper or found
            if found is not None:
                found = with_bound(found, process, deadline or started + DEFAULTS.default_seconds)
                verify(graph, found)
    if found is None and options.smallest and isinstance(refusal, InfeasibleBudgetError):
        least = search.smallest(everything)
        if least is not None and least.peak_bytes <= refusal.budget_bytes:
            return least.model_copy({"budget_bytes": refusal.budget_bytes})
        refusal = refusal.with_smallest(everything if least is None else least.budget_bytes)
    if found is None:
        assert refusal is not None
        raise refusal
    return found


def _least_with_all_residents(problem: Problem) -> int:
    """Bytes that every plan with all residents on the device needs."""
    return problem.fixed_bytes + max(0, working_set_bound(problem).bytes - problem.alignment + 1)


def _planned_without_homes(
    problem: Problem,
    options: PlanOptions,
    progress: Callable[[Progress], None] | None,
    start: Plan | None,
    started: float,
) -> Plan:
    """As `_planned`, with all residents on the device; `started` is a `time.monotonic` value."""
    graph, info = problem.graph, options.info
    deadline = None
    if options.time_limit is not None:
        # For serialising and verifying the plan.
        reserved = min(4e-5 * problem.op_count, options.time_limit / 2)
        deadline = started + options.time_limit - reserved
    request = Request(0, options.off, deadline, options.seed, options.solver, progress=progress)
    if start is not None:
        request = replace(request, start=runs_of(problem, start))
    task = Task(problem, info, request)

    everything, placement = reference_layout(problem, options.budget)
    budget_bytes = options.budget.resolve(problem.fixed_bytes + everything.arena_bytes)

    def finish(solution: Solution, budget: int) -> Plan:
        return verified_plan(graph, solution, options, budget, started)

    if budget_bytes is None:
        smallest = task.smallest(everything)
        solution, arena = smallest.solution, smallest.arena_bytes
        if placement.lower_bound < arena:  # a method that found little: lay out further
            again, _ = lay_out_everything(problem)
            if again.arena_bytes < arena:
                solution, arena = keep_all_solution(again), again.arena_bytes
        met, bound = problem.fixed_bytes + arena, budget_lower_bound(problem)
        return verified_plan(graph, solution, options, met, started, bound)
    limit = budget_bytes - problem.fixed_bytes
    if everything.arena_bytes > limit >= placement.lower_bound:
        # The bound does not exclude this budget: search further.
        again, _ = lay_out_everything(problem, limit)
        everything = min(everything, again, key=lambda placed: placed.arena_bytes)
    fits = everything.arena_bytes <= limit
    if fits and not (info.variants and problem.cheapest != problem.cost):
        return finish(keep_all_solution(everything), budget_bytes)
    try:
        if not fits and _is_proved_infeasible(task, limit):
            raise DoesNotFitError(task.working_set.op)
        found = task.within(limit)
        if fits and everything.cost_us <= found.placed.cost_us:  # no variant was cheaper
            found = replace(found, placed=everything)
        return finish(found, budget_bytes)
    except DoesNotFitError as error:
        if fits:
            return finish(keep_all_solution(everything), budget_bytes)
        blocking = None if limit < 0 else error.op
    least = None
    if options.smallest:
        known = task.at_any_costs()
        if known.placed.arena_bytes <= limit:
            return finish(task.improved(known, limit), budget_bytes)
        smallest = task.smallest(everything)
        if smallest.solution.placed.arena_bytes <= limit:  # the method is not monotone
            return finish(smallest.solution, budget_bytes)
        least = problem.fixed_bytes + smallest.arena_bytes
    met = problem.fixed_bytes + everything.arena_bytes
    raise _refusal(task, budget_bytes, blocking, least, met)


def _is_proved_infeasible(task: Task, arena: int) -> bool:
    """True if the arena is below a lower bound of every schedule."""
    problem, working_set = task.problem, task.working_set.bytes
    size = problem.rounded(max(0, arena))
    if arena < 0 or working_set > size:
        return True
    # Far above the working sets a search rarely finds a higher bound.
    return size < 2 * working_set and arena_lower_bound(problem) > size


def _refusal(
    task: Task, budget_bytes: int, blocking: int | None, least: int | None, met: int
) -> InfeasibleBudgetError:
    """The error for a budget: its bound, and the op (position) that blocks it."""
    problem, info = task.problem, task.method
    graph, limit = problem.graph, budget_bytes - problem.fixed_bytes
    unused = info.unused(problem.beyond_recomputation)
    # Residents explain the refusal if the method only recomputes and each working set alone fits.
    used = set(problem.beyond_recomputation).difference(unused)
    exceeds = task.working_set.bytes > problem.rounded(max(0, limit))
    residents = None
    if blocking is not None and not used and not exceeds:
        residents = unrecomputable_residents(problem, limit)
    if residents is not None:
        blocking = residents.op
    if problem.home_candidates and not info.homes:
        unused = [*unused, "movable residents"]
    return InfeasibleBudgetError(
        info.name,
        budget_bytes,
        least,
        None if blocking is None else graph.ops[blocking].id,
        "" if blocking is None else graph.ops[blocking].name,
        0 if blocking is None else working_sets(problem).first[blocking],
        unused,
        "" if residents is None else explain_residents(problem, residents),
        budget_lower_bound(problem, 1000 if exceeds else 10_000),
        met,
    )


def verified_plan(
    graph: Graph,
    solution: Solution,
    options: PlanOptions,
    budget_bytes: int,
    started: float,
    budget_lower_bound_bytes: int | None = None,
) -> Plan:
    """The plan of a method's solution for `graph`, checked by the verifier.

    `started` is the `time.monotonic` value in seconds at the start of planning.
    """
    problem = solution.placed.problem
    solution = _valid_bound(solution, options.info)
    host = lay_out_host(solution.placed.schedule, problem.host_budget)
    made = assemble(
        solution,
        host_offsets=host.offsets,
        host_arena_bytes=host.peak,
        link_bytes_per_s=options.link,
        method=options.info.name,
        budget_bytes=budget_bytes,
        budget_lower_bound_bytes=budget_lower_bound_bytes,
        solve_seconds=time.monotonic() - started,
    )
    verify(graph, made)
    return made


def _valid_bound(solution: Solution, method: MethodInfo) -> Solution:
    """The solution without a bound that choices of the graph invalidate.

    A schedule with variants that the method ignores, or with movable residents or updates on the
    host, may cost less than its bound.
    """
    problem, cost = solution.placed.problem, solution.placed.cost_us
    ignored = "variants" in method.unused(problem.beyond_recomputation)
    if not problem.home_candidates and (solution.bound_model != "program-order" or not ignored):
        return solution
    if cost <= problem.floor_us and not problem.host_ops:
        return replace(solution, status="optimal", lower_bound_us=cost, bound_model="any")
    return replace(solution, status="feasible", lower_bound_us=None, bound_model=None)
