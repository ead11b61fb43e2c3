"""The door: a graph and what is asked in, one verified plan out."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from coop_plan.planner.core.build_plan import assemble
from coop_plan.planner.core.errors import DoesNotFitError, InfeasibleBudgetError, TimeLimitError
from coop_plan.planner.core.unrecomputable import least_with_outputs, most_held, reason
from coop_plan.planner.core.memory_bounds import least_budget
from coop_plan.planner.core.working_sets import WorkingSet, largest_working_set, least_working_set, needs
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule
from coop_plan.planner.keep_all import keep_all_schedule, kept
from coop_plan.planner.placement.layout import WORK, lay_out, lay_out_host
from coop_plan.planner.method import MethodInfo, Progress, Request, Solution
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.exact.model.fix_variants import carried_back, plainest
from coop_plan.planner.verifier import verify
from coop_plan.schemas import Graph, Plan

SMALL_PROBLEM_OPS = 100
"""Up to here the smallest feasible budget is searched to the last aligned byte."""

COARSE_PROBES = 10
"""Planning runs that the search may take on larger graphs."""

RESOLUTION = 256
"""Part of what the step needs without its choices to which the search below that goes."""

FINISH_SECONDS = 4e-5
"""What of a time limit is kept for each op: a plan is still written down and verified."""


@dataclass(frozen=True)
class _Task:
    """A method on a problem, at whatever arena."""

    problem: Problem
    method: MethodInfo
    request: Request

    @property
    def least(self) -> WorkingSet:
        """What no schedule of the method's is without."""
        return (least_working_set if self.method.variants else largest_working_set)(self.problem)

    def solve(self, arena: int, *, any_schedule: bool = False) -> Solution:
        """The method's solution within `arena` bytes; raises `DoesNotFitError`."""
        op, need = self.least
        if arena < 0 or need > self.problem.rounded(arena):
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
        The solution in the smallest arena that was found, at most keep-everything's.

        A method need not be monotone: it may succeed in a smaller arena as well, or with fewer
        choices. So what the step needs without variants and in-place pairs is found first, and is
        never exceeded. The search does not depend on the budget that was asked for, so that
        everybody is told the same.
        """
        plain = plainest(self.problem) if self.method.variants else None
        if plain is None:
            return self._narrowed(kept(everything))
        alone = replace(self, problem=plain, request=self.request.first_half())
        best, found = kept(everything), None
        with contextlib.suppress(TimeLimitError):
            found = alone.minimum(lay_out(keep_all_schedule(plain), work=0)[0])
            best = min(best, self._carried(found), key=lambda found: found.placed.arena_bytes)
        try:
            return self._narrowed(best, best.placed.arena_bytes // RESOLUTION)
        except TimeLimitError:
            if found is None:
                raise
            return best

    def within(self, arena: int) -> Solution:
        """As `solve`, and where that finds nothing without variants and in-place pairs."""
        try:
            return self.solve(arena)
        except DoesNotFitError:
            plain = plainest(self.problem) if self.method.variants else None
            if plain is None:
                raise
        return self._carried(replace(self, problem=plain).solve(arena))

    def _carried(self, found: Solution) -> Solution:
        """A solution of the plainest problem, whose proofs know of no other choices, as ours."""
        defaults = range(self.problem.op_count)
        return Solution(carried_back(self.problem, defaults, found.placed))

    def _narrowed(self, best: Solution, enough: int = 0) -> Solution:
        """
        The solution in the smallest arena that bisection found, at most that of `best`.

        On larger graphs it ends once it knows the smallest one to `enough` bytes.
        """
        step = self.problem.alignment
        small = self.problem.op_count <= SMALL_PROBLEM_OPS
        below, low = best, self.least.bytes - step
        guess = max(0, low + step)
        if not small:  # no method is expected below
            guess = max(guess, least_with_outputs(self.problem))
        probes = 64 if small else COARSE_PROBES
        for probe in range(probes):
            least = below.placed.arena_bytes
            if guess >= least or (probe and not small and least - low <= enough):
                break
            self.request.check_time()
            if self.request.progress is not None:
                message = "searching the smallest feasible budget"
                self.request.progress(Progress(message, probe / probes))
            try:
                below = self.solve(guess, any_schedule=True)
            except DoesNotFitError:
                low = guess
            guess = max((low + below.placed.arena_bytes) // 2 // step * step, low + step)
        with contextlib.suppress(DoesNotFitError):  # found in haste: there may be a cheaper one
            if below.status != "optimal":
                found = self.solve(below.placed.arena_bytes)
                below = min(found, below, key=lambda found: found.placed.cost_us)
        return below


def plan(
    graph: Graph,
    budget: PlanOptions | str | int,
    *,
    progress: Callable[[Progress], None] | None = None,
    **fields: Any,
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
    return _plan(graph, PlanOptions.given(budget, fields), progress)


def plan_if_it_fits(graph: Graph, budget: str | int, **fields: Any) -> Plan | None:
    """
    As `plan`; None where the method finds nothing, without a search for the smallest budget.

    Of a method that is not monotone that search may find a plan within a budget after all.
    """
    try:
        return _plan(graph, PlanOptions.given(budget, fields), None, at_once=True)
    except DoesNotFitError:
        return None


def _plan(
    graph: Graph,
    options: PlanOptions,
    progress: Callable[[Progress], None] | None,
    *,
    at_once: bool = False,
) -> Plan:
    """`at_once`, what finds nothing raises `DoesNotFitError`."""
    started = time.monotonic()
    info = options.info
    graph = options.apply_link(graph)
    problem = Problem.from_graph(graph, options.alignment, options.outputs, options.host_budget)
    deadline = None
    if options.time_limit is not None:
        kept_back = min(FINISH_SECONDS * problem.op_count, options.time_limit / 2)
        deadline = started + options.time_limit - kept_back
    request = Request(0, options.off, deadline, options.seed, options.solver, progress=progress)
    task = _Task(problem, info, request)

    schedule = keep_all_schedule(problem)
    # Only a share is of the very best placement; in bytes there is a second try below.
    everything, placement = lay_out(schedule, work=WORK if options.budget.kind == "share" else 0)
    budget_bytes = options.budget.resolve(problem.fixed_bytes + everything.arena_bytes)

    def finish(solution: Solution, within: int | None = None, least: int | None = None) -> Plan:
        if within is None:
            within = problem.fixed_bytes + solution.placed.arena_bytes
        return written(graph, solution, options, within, started, least)

    if budget_bytes is None:
        return finish(task.minimum(everything), least=least_budget(problem))
    limit = budget_bytes - problem.fixed_bytes
    if everything.arena_bytes > limit >= placement.lower_bound:
        # Try harder, from the layout that is there: this much is not ruled out.
        again, _ = lay_out(schedule, limit, order_hint=placement.order)
        everything = min(everything, again, key=lambda placed: placed.arena_bytes)
    fits = everything.arena_bytes <= limit
    if fits and not (info.variants and everything.cost_us > problem.floor_us):
        return finish(kept(everything), budget_bytes)
    try:
        found = task.solve(limit)
        if fits and everything.cost_us <= found.placed.cost_us:  # variants might have cost less
            found = replace(found, placed=everything)
        return finish(found, budget_bytes)
    except DoesNotFitError as error:
        if fits:
            return finish(kept(everything), budget_bytes)
        if at_once:
            raise
        blocking = None if limit < 0 else error.op
    least = task.minimum(everything)
    if least.placed.arena_bytes <= limit:  # the method is not monotone: a smaller arena worked
        return finish(least, budget_bytes)
    unused = info.unused(problem.beyond_recomputation)
    more = set(problem.beyond_recomputation).difference(unused)  # than `most_held` knows of
    alone = task.least.bytes > problem.rounded(max(0, limit))
    held = None if blocking is None or more or alone else most_held(problem, limit)
    if held is not None:
        blocking = held.op
    raise InfeasibleBudgetError(
        info.name,
        budget_bytes,
        problem.fixed_bytes + least.placed.arena_bytes,
        None if blocking is None else graph.ops[blocking].id,
        "" if blocking is None else graph.ops[blocking].name,
        0 if blocking is None else needs(problem).first[blocking],
        unused,
        "" if held is None else reason(problem, held),
        least_budget(problem),
    )


def written(
    graph: Graph,
    solution: Solution,
    options: PlanOptions,
    budget_bytes: int,
    started: float,
    least: int | None = None,
) -> Plan:
    """The verified plan of what a method found on `graph`, begun at a `time.monotonic` (s)."""
    problem = solution.placed.problem
    solution = _published(solution, options.info)
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
        budget_lower_bound_bytes=least,
        solve_seconds=time.monotonic() - started,
    )
    verify(graph, made)
    return made


def _published(solution: Solution, method: MethodInfo) -> Solution:
    """
    Without what was not proved for all that the graph offers.

    Where there are variants of which a method knows nothing, a schedule that uses them may cost
    less than a bound for schedules that do not.
    """
    problem, cost = solution.placed.problem, solution.placed.cost_us
    left = "variants" in method.unused(problem.beyond_recomputation)
    if solution.bound_model != "program-order" or not left:
        return solution
    if cost <= problem.floor_us:
        return replace(solution, status="optimal", lower_bound_us=cost, bound_model="any")
    return replace(solution, status="feasible", lower_bound_us=None, bound_model=None)
