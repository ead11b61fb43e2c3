"""`plan`, the entry point of the planner: from graph and options to one verified plan."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from coop_plan.planner.core.build_plan import assemble
from coop_plan.planner.core.errors import DoesNotFitError, InfeasibleBudgetError, TimeLimitError
from coop_plan.planner.core.memory_bounds import (
    WorkingSet,
    bound_with_resident_outputs,
    budget_lower_bound,
    explain_residents,
    largest_working_set,
    unrecomputable_residents,
    working_set_bound,
    working_sets,
)
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule
from coop_plan.planner.exact.model.variants import restore_variants, without_variants
from coop_plan.planner.keep_all import keep_all_schedule, keep_all_solution
from coop_plan.planner.kernels import compile_method
from coop_plan.planner.method import MethodInfo, Progress, Request, Solution
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.placement.layout import WORK, lay_out, lay_out_host
from coop_plan.planner.verifier import verify
from coop_plan.schemas import Graph, Plan

SMALL_PROBLEM_OPS = 100
"""Ops up to which the smallest feasible budget is searched to the last aligned byte."""

COARSE_PROBES = 10
"""Limit of planning runs of that search on larger graphs."""

RESOLUTION = 256
"""The `min` search stops when its interval is below 1/256 of the arena needed without variants."""

FINISH_SECONDS = 4e-5
"""Seconds per op reserved for serialising and verifying the plan."""


@dataclass(frozen=True)
class _Task:
    """A method on a problem, to be solved at several arena sizes."""

    problem: Problem
    method: MethodInfo
    request: Request

    @property
    def working_set(self) -> WorkingSet:
        """Lower bound on the arena of every schedule of the method."""
        return (working_set_bound if self.method.variants else largest_working_set)(self.problem)

    def solve(self, arena: int, *, any_schedule: bool = False) -> Solution:
        """The method's solution within `arena` bytes; raises `DoesNotFitError`."""
        op, working_set = self.working_set
        if arena < 0 or working_set > self.problem.rounded(arena):
            raise DoesNotFitError(op)
        request = replace(self.request, arena_bytes=arena, any_schedule=any_schedule)
        solution = self.method.solve(self.problem, request)
        if solution.placed.arena_bytes > arena:
            raise DoesNotFitError(op)
        host_budget = self.problem.host_budget
        if host_budget is not None:
            host = lay_out_host(solution.placed.schedule, host_budget)
            if host.arena_bytes > host_budget:
                raise DoesNotFitError(op)
        return solution

    def minimum(self, everything: PlacedSchedule) -> Solution:
        """
        The solution in the smallest arena found, at most that of keep-everything.

        A method need not be monotone: it may succeed in a smaller arena, or with fewer choices. So
        the minimum without variants and in-place pairs is computed first, and never exceeded. The
        search does not depend on the requested budget, so all requests get the same answer.
        """
        plain = without_variants(self.problem) if self.method.variants else None
        if plain is None:
            return self._bisected(keep_all_solution(everything))
        plain_task = replace(self, problem=plain, request=self.request.first_half())
        best, without = keep_all_solution(everything), None
        with contextlib.suppress(TimeLimitError):
            without = plain_task.minimum(lay_out(keep_all_schedule(plain), work=0)[0])
            best = min(best, self._from_plain(without), key=lambda s: s.placed.arena_bytes)
        try:
            return self._bisected(best, best.placed.arena_bytes // RESOLUTION)
        except TimeLimitError:
            if without is None:
                raise
            return best

    def within(self, arena: int) -> Solution:
        """As `solve`; if that fails, the solution without variants and in-place pairs."""
        try:
            return self.solve(arena)
        except DoesNotFitError:
            plain = without_variants(self.problem) if self.method.variants else None
            if plain is None:
                raise
        return self._from_plain(replace(self, problem=plain).solve(arena))

    def _from_plain(self, solution: Solution) -> Solution:
        """A solution of the plain problem as one of this, without bounds, which ignore variants."""
        defaults = range(self.problem.op_count)
        return Solution(restore_variants(self.problem, defaults, solution.placed))

    def _bisected(self, best: Solution, tolerance: int = 0) -> Solution:
        """
        The solution in the smallest arena that bisection finds, at most that of `best`.

        On larger graphs it ends when its interval is at most `tolerance` bytes.
        """
        step = self.problem.alignment
        small = self.problem.op_count <= SMALL_PROBLEM_OPS
        # Invariant: the method succeeds in the arena of `best` and fails at `low` bytes.
        low = self.working_set.bytes - step
        guess = max(0, low + step)
        if not small:  # schedules below this are rare
            guess = max(guess, bound_with_resident_outputs(self.problem))
        probes = 64 if small else COARSE_PROBES
        for probe in range(probes):
            high = best.placed.arena_bytes
            if guess >= high or (probe and not small and high - low <= tolerance):
                break
            self.request.check_time()
            if self.request.progress is not None:
                message = "searching the smallest feasible budget"
                self.request.progress(Progress(message, probe / probes))
            try:
                best = self.solve(guess, any_schedule=True)
            except DoesNotFitError:
                low = guess
            guess = max((low + best.placed.arena_bytes) // 2 // step * step, low + step)
        # The probes took the first schedule that fits; a full solve may find a cheaper one.
        with contextlib.suppress(DoesNotFitError):
            if best.status != "optimal":
                found = self.solve(best.placed.arena_bytes)
                best = min(found, best, key=lambda s: s.placed.cost_us)
        return best


def plan(
    graph: Graph,
    budget: PlanOptions | str | int,
    *,
    progress: Callable[[Progress], None] | None = None,
    **fields: Any,
) -> Plan:
    """
    Plan `graph` within `budget`; the plan has passed the verifier.

    Every method tries keep-everything first, so a budget that it meets costs nothing. A share is of
    keep-everything's peak, resident bytes included.

    Args:
        graph: one profiled training step.
        budget: bytes, `"12GiB"`, `"50%"` or `"min"`; or `PlanOptions`, which include the budget.
        progress: called with a `Progress` at intervals.
        fields: fields of `PlanOptions`, as keyword arguments.

    Raises:
        InvalidInputError: an unknown method or switch, a bad budget or alignment.
        InfeasibleBudgetError: the method cannot meet the budget.
        TimeLimitError: no plan was found within the time limit.
    """
    return _plan(graph, PlanOptions.given(budget, fields), progress)


def plan_if_it_fits(graph: Graph, budget: str | int, **fields: Any) -> Plan | None:
    """
    As `plan`, but None if the method fails at this budget; no smaller arenas are tried.

    `plan` searches the smallest budget then. If the method is not monotone, that search may find a
    plan within the requested budget.
    """
    try:
        return _plan(graph, PlanOptions.given(budget, fields), None, search_minimum=False)
    except DoesNotFitError:
        return None


def _plan(
    graph: Graph,
    options: PlanOptions,
    progress: Callable[[Progress], None] | None,
    *,
    search_minimum: bool = True,
) -> Plan:
    """As `plan`; raises `DoesNotFitError` if the method fails and `search_minimum` is false."""
    info = options.info
    graph = options.apply_link(graph)
    compile_method(info.name, linked=graph.device.linked, progress=progress)
    started = time.monotonic()
    problem = Problem.from_graph(graph, options.alignment, options.outputs, options.host_budget)
    deadline = None
    if options.time_limit is not None:
        reserved = min(FINISH_SECONDS * problem.op_count, options.time_limit / 2)
        deadline = started + options.time_limit - reserved
    request = Request(0, options.off, deadline, options.seed, options.solver, progress=progress)
    task = _Task(problem, info, request)

    schedule = keep_all_schedule(problem)
    # A share refers to the best placement; a budget in bytes gets a second try below.
    everything, placement = lay_out(schedule, work=WORK if options.budget.kind == "share" else 0)
    budget_bytes = options.budget.resolve(problem.fixed_bytes + everything.arena_bytes)

    def finish(solution: Solution, budget: int) -> Plan:
        return verified_plan(graph, solution, options, budget, started)

    if budget_bytes is None:
        smallest = task.minimum(everything)
        peak, bound = problem.fixed_bytes + smallest.placed.arena_bytes, budget_lower_bound(problem)
        return verified_plan(graph, smallest, options, peak, started, bound)
    limit = budget_bytes - problem.fixed_bytes
    if everything.arena_bytes > limit >= placement.lower_bound:
        # The bound does not exclude this budget: search further, from the layout found.
        again, _ = lay_out(schedule, limit, order_hint=placement.order)
        everything = min(everything, again, key=lambda placed: placed.arena_bytes)
    fits = everything.arena_bytes <= limit
    if fits and not (info.variants and everything.cost_us > problem.floor_us):
        return finish(keep_all_solution(everything), budget_bytes)
    try:
        found = task.solve(limit)
        if fits and everything.cost_us <= found.placed.cost_us:  # no variant was cheaper
            found = replace(found, placed=everything)
        return finish(found, budget_bytes)
    except DoesNotFitError as error:
        if fits:
            return finish(keep_all_solution(everything), budget_bytes)
        if not search_minimum:
            raise
        blocking = None if limit < 0 else error.op
    smallest = task.minimum(everything)
    if smallest.placed.arena_bytes <= limit:  # the method is not monotone
        return finish(smallest, budget_bytes)
    unused = info.unused(problem.beyond_recomputation)
    # Residents explain the refusal if the method only recomputes and each working set alone fits.
    used = set(problem.beyond_recomputation).difference(unused)
    exceeds = task.working_set.bytes > problem.rounded(max(0, limit))
    residents = None
    if blocking is not None and not used and not exceeds:
        residents = unrecomputable_residents(problem, limit)
    if residents is not None:
        blocking = residents.op
    raise InfeasibleBudgetError(
        info.name,
        budget_bytes,
        problem.fixed_bytes + smallest.placed.arena_bytes,
        None if blocking is None else graph.ops[blocking].id,
        "" if blocking is None else graph.ops[blocking].name,
        0 if blocking is None else working_sets(problem).first[blocking],
        unused,
        "" if residents is None else explain_residents(problem, residents),
        budget_lower_bound(problem),
    )


def verified_plan(
    graph: Graph,
    solution: Solution,
    options: PlanOptions,
    budget_bytes: int,
    started: float,
    budget_lower_bound_bytes: int | None = None,
) -> Plan:
    """
    The plan of a method's solution for `graph`, checked by the verifier.

    `started` is the `time.monotonic` value in seconds at the start of planning.
    """
    problem = solution.placed.problem
    solution = _valid_bound(solution, options.info)
    host = lay_out_host(solution.placed.schedule, problem.host_budget)
    made = assemble(
        solution.placed,
        host_offsets=host.offsets,
        host_arena_bytes=host.arena_bytes,
        link_bytes_per_s=options.link,
        method=options.info.name,
        budget_bytes=budget_bytes,
        status=solution.status,
        lower_bound_us=solution.lower_bound_us,
        lower_bound_model=solution.bound_model,
        eviction_free_ratio=solution.eviction_free_ratio,
        evictions=solution.evictions,
        budget_lower_bound_bytes=budget_lower_bound_bytes,
        solve_seconds=time.monotonic() - started,
    )
    verify(graph, made)
    return made


def _valid_bound(solution: Solution, method: MethodInfo) -> Solution:
    """
    The solution without a bound that variants of the graph invalidate.

    If the method ignores variants, a schedule that uses them may cost less than its bound.
    """
    problem, cost = solution.placed.problem, solution.placed.cost_us
    ignored = "variants" in method.unused(problem.beyond_recomputation)
    if solution.bound_model != "program-order" or not ignored:
        return solution
    if cost <= problem.floor_us:
        return replace(solution, status="optimal", lower_bound_us=cost, bound_model="any")
    return replace(solution, status="feasible", lower_bound_us=None, bound_model=None)
