"""A run of the simulator on a problem, and its schedule."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from numpy.lib.recfunctions import structured_to_unstructured as as_table

from coop_plan.planner.core.arrays import to_arrays
from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.memory_bounds import largest_working_set
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule, Schedule
from coop_plan.planner.method import Progress, Request
from coop_plan.planner.online.simulator import DONE, RECORD_FULL, advance
from coop_plan.planner.online.state import ArenaState, Rule, Transfers, empty_arena

MAX_RECOMPUTES_PER_OP = 30
"""Most recomputes, as a multiple of the program's ops; beyond, the run does not fit."""


@dataclass(frozen=True)
class OnlineRun:
    """Record of a completed run; `planner.online.state` describes its arrays."""

    problem: Problem
    state: ArenaState

    @property
    def cost_us(self) -> float:
        """Cost of all events, µs."""
        return float(self.state.now.clock_us)

    @property
    def eviction_free_ratio(self) -> float:
        """Mean of free bytes / arena at forced evictions, the requested block counted as free."""
        now = self.state.now
        return float(now.free_ratios / now.failures) if now.failures else 0.0

    @property
    def evictions(self) -> int:
        """Number of tensors evicted by failed allocations."""
        return int(self.state.now.evicted)

    @cached_property
    def placed(self) -> PlacedSchedule:
        """The schedule with its addresses."""
        s = self.state
        event = s.event[: s.now.events]
        schedule = Schedule.with_decisions(
            self.problem,
            event["what"].copy(),
            do=event["do"].copy(),
            taken=as_table(s.inplace[: s.now.inplace]),
            dropped=as_table(s.drop[: s.now.drops]),
        )
        return PlacedSchedule(
            schedule,
            offset=s.offsets[: s.now.offsets].copy(),
            workspace_offset=event["workspace"].copy(),
        )


def simulate_arena(
    problem: Problem,
    request: Request,
    rule: Rule,
    *,
    partition: bool,
    inplace: bool,
    whole_closure: bool = True,
    dependents: bool = True,
    transfers: Transfers | None = None,
    gaps: bool = True,
) -> OnlineRun:
    """
    Execute the step in `request.arena_bytes` under an eviction rule of `planner.online.simulator`.

    Without `gaps` only bytes count, as in DTR's own simulator: addresses fit no arena.

    Raises:
        DoesNotFitError: an op does not fit.
        TimeLimitError: the request's deadline has passed.
    """
    transfers = transfers or Transfers()
    unit = problem.alignment
    floor, units = request.arena_bytes // unit * unit, problem.rounded(request.arena_bytes)
    new_arena = partial(
        empty_arena,
        problem,
        partition=partition,
        whole_closure=whole_closure,
        dependents=dependents,
        transfers=transfers,
        gaps=gaps,
    )
    settings = rule, inplace, transfers
    try:
        return _simulate(problem, request, partial(new_arena, floor), *settings)
    except DoesNotFitError:
        if units == floor:
            raise
    # Try again with the incomplete last alignment unit: a buffer may end within it.
    run = _simulate(problem, request, partial(new_arena, units), *settings)
    if run.placed.arena_bytes > request.arena_bytes:
        raise DoesNotFitError(largest_working_set(problem).op)
    return run


def _simulate(
    problem: Problem,
    request: Request,
    new_arena: Callable[[int], ArenaState],
    rule: Rule,
    inplace: bool,
    transfers: Transfers,
) -> OnlineRun:
    """Execute the step in the arena that `new_arena` makes for a number of events."""
    arrays = to_arrays(problem)
    n = problem.op_count
    max_events = n * (MAX_RECOMPUTES_PER_OP + 1)
    record = min(max_events, 4 * n + 64)  # it doubles when full
    if transfers.swaps:
        record += 4 * problem.tensor_count
    begun = len(problem.homes.copies)  # ops that produce residents with homes
    while True:
        state = new_arena(record)
        status = DONE
        chunk = 256  # ops between two checks of the time limit
        for start in range(begun, n, chunk):
            request.check_time()
            if request.progress is not None:
                request.progress(Progress("simulating", start / n))
            stop = min(start + chunk, n)
            status = advance(arrays, state, start, stop, max_events, rule, inplace)
            if status != DONE:
                break
        if status == DONE:
            return OnlineRun(problem, state)
        if status != RECORD_FULL:
            raise DoesNotFitError(status)
        record *= 2
