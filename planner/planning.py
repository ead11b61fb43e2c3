"""The door: a graph, a budget and a method in, one verified plan out."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from planner.assemble import arena_bytes, assemble
from planner.errors import DoesNotFitError, InfeasibleBudgetError
from planner.layout import WORK, lay_out
from planner.methods import METHODS, MethodInfo, Progress, Request, Solution
from planner.methods.keep_all import keep_all_schedule
from planner.problem import Problem
from planner.schedule import Schedule
from planner.verifier import verify
from schemas import Budget, Graph, InvalidInputError, Outputs, Plan, parse_budget

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
    budget: Budget | str | int,
    *,
    method: str = "coop-offline",
    outputs: Outputs = "outside",
    alignment: int = 512,
    time_limit: float | None = None,
    seed: int = 0,
    solver: str | None = None,
    switches: Mapping[str, bool] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """
    Plan `graph` within `budget`; the plan has passed the verifier.

    Keep-everything is tried first, whatever the method: a budget that needs nothing costs nothing.
    A share is of keep-everything's peak, resident bytes included.

    Args:
        graph: one profiled training step.
        budget: bytes, `"12GiB"`, `"50%"` or `"min"`, or a parsed `Budget`.
        method: a name in `METHODS`.
        outputs: whether outputs of the step lie in the arena; see `schemas.Outputs`.
        alignment: of every offset, in bytes; a power of two.
        time_limit: seconds.
        seed: of the methods that draw random numbers; one seed, one plan (without a time limit).
        solver: of `checkmate`, a name that PuLP knows.
        switches: ablation switches of the method, false turns one off.
        progress: called with a `Progress` now and then.

    Raises:
        InvalidInputError: an unknown method or switch, a bad budget or alignment.
        InfeasibleBudgetError: the method cannot meet the budget.
        TimeLimitError: no plan before the time limit.
    """
    info, off = _method(method, switches or {})
    if solver is not None and not info.takes_solver:
        raise InvalidInputError(f"{method} takes no solver", "/solver")
    with _without_collections():
        return _plan(
            graph, budget, info, off, outputs, alignment, time_limit, seed, solver, progress
        )


def _plan(
    graph: Graph,
    budget: Budget | str | int,
    info: MethodInfo,
    off: frozenset[str],
    outputs: Outputs,
    alignment: int,
    time_limit: float | None,
    seed: int,
    solver: str | None,
    progress: Callable[[Progress], None] | None,
) -> Plan:
    started = time.monotonic()
    parsed = budget if isinstance(budget, Budget) else parse_budget(budget)
    problem = Problem.from_graph(graph, alignment, outputs)
    deadline = None if time_limit is None else started + time_limit
    task = _Task(problem, info, Request(0, off, deadline, seed, solver, progress=progress))

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


def _method(name: str, switches: Mapping[str, bool]) -> tuple[MethodInfo, frozenset[str]]:
    info = METHODS.get(name)
    if info is None:
        known = ", ".join(METHODS)
        raise InvalidInputError(f"unknown method '{name}': choose from {known}", "/method")
    for switch in switches:
        if switch not in info.switches:
            known = ", ".join(info.switches) or "none"
            message = f"{name} has no switch '{switch}' (it has: {known})"
            raise InvalidInputError(message, f"/switches/{switch}")
    return info, frozenset(switch for switch, on in switches.items() if not on)
