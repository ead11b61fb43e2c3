"""One run of the simulator on a problem, and its schedule."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from coop_plan.planner.core.arrays import to_arrays
from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.memory_bounds import largest_working_set
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule, Schedule
from coop_plan.planner.method import Progress, Request
from coop_plan.planner.online.params import DEFAULTS, OnlineParams
from coop_plan.planner.online.remaining_cost import least_cost
from coop_plan.planner.online.simulator import DONE, RECORD_FULL, advance
from coop_plan.planner.online.state import (
    CLOCK,
    DROP_EVENT,
    DROPPED,
    DROPS,
    EVENT_DO,
    EVENT_OP,
    EVENT_WORKSPACE,
    EVENTS,
    EVICTED,
    FAILURES,
    FREE_RATIOS,
    INPLACE_EVENT,
    INPLACE_OUT,
    INPLACE_SOURCE,
    OFFSET,
    OFFSETS,
    WRITES,
    ArenaState,
    empty_arena,
)

ROUNDING = 1e-9
"""Share of a cost by which sums in another order may differ."""


class TooDearError(Exception):
    """A run would cost more than was asked for."""


@dataclass(frozen=True)
class OnlineRun:
    """The record of a completed run; see `planner.online.state` for its arrays."""

    problem: Problem
    state: ArenaState

    @property
    def cost_us(self) -> float:
        """Cost of all events, µs."""
        return float(self.state.total[CLOCK])

    @property
    def eviction_free_ratio(self) -> float:
        """Mean of free bytes / arena at forced evictions, the requested block counted as free."""
        failures = int(self.state.counts[FAILURES])
        return float(self.state.total[FREE_RATIOS]) / failures if failures else 0.0

    @property
    def evictions(self) -> int:
        """Tensors that failed allocations evicted."""
        return int(self.state.counts[EVICTED])

    @cached_property
    def placed(self) -> PlacedSchedule:
        """The schedule with its addresses."""
        s, count = self.state, self.state.counts
        events, writes, drops = count[EVENTS], count[WRITES], count[DROPS]
        rows = [INPLACE_EVENT, INPLACE_OUT, INPLACE_SOURCE]
        schedule = Schedule.with_decisions(
            self.problem,
            s.event[EVENT_OP, :events].copy(),
            do=s.event[EVENT_DO, :events].copy(),
            taken=np.ascontiguousarray(s.record[rows, :writes].T),
            dropped=np.ascontiguousarray(s.record[[DROP_EVENT, DROPPED], :drops].T),
        )
        return PlacedSchedule(
            schedule,
            offset=s.record[OFFSET, : count[OFFSETS]].copy(),
            workspace_offset=s.event[EVENT_WORKSPACE, :events].copy(),
        )


def simulate_arena(
    problem: Problem,
    request: Request,
    rule: int,
    *,
    partition: bool,
    inplace: bool,
    whole_closure: bool = True,
    dependents: bool = True,
    transfers: int = 0,
    gaps: bool = True,
    cost_limit: float = np.inf,
    params: OnlineParams = DEFAULTS,
) -> OnlineRun:
    """
    Execute the step in `request.arena_bytes` under an eviction rule of `planner.online.simulator`.

    Without `gaps` only bytes count, as in DTR's own simulator: addresses are of no arena.
    `cost_limit` (µs) ends a run once it is sure to cost more.

    Raises:
        DoesNotFitError: at the op that cannot be run.
        TooDearError: it costs more than the limit.
        TimeLimitError: the request's deadline has passed.
    """
    unit = problem.alignment
    floor, units = request.arena_bytes // unit * unit, problem.rounded(request.arena_bytes)
    begin = partial(
        empty_arena,
        problem,
        params=params,
        partition=partition,
        whole_closure=whole_closure,
        dependents=dependents,
        transfers=transfers,
        gaps=gaps,
    )
    how = rule, inplace, transfers, cost_limit, params
    try:
        return _simulate(problem, request, partial(begin, floor), *how)
    except DoesNotFitError:
        if units == floor:
            raise
    # The last unit is cut short: it serves whoever happens to end within the rest of it.
    run = _simulate(problem, request, partial(begin, units), *how)
    if run.placed.arena_bytes > request.arena_bytes:
        raise DoesNotFitError(largest_working_set(problem).op)
    return run


def _simulate(
    problem: Problem,
    request: Request,
    begin: Callable[[int], ArenaState],
    rule: int,
    inplace: bool,
    transfers: int,
    cost_limit: float,
    params: OnlineParams,
) -> OnlineRun:
    """Execute the step in an arena that `begin` makes with a record of so many events."""
    arrays = to_arrays(problem)
    n = problem.op_count
    most = n * (params.max_recomputes_per_op + 1)
    record = min(most, params.first_record * n + 64)
    if transfers:
        record += 4 * problem.tensor_count
    limit = cost_limit * (1 + ROUNDING)
    while True:
        state = begin(record)
        status = DONE
        for start in range(0, n, params.chunk_ops):
            request.check_time()
            if request.progress is not None:
                request.progress(Progress("simulating", start / n))
            stop = min(start + params.chunk_ops, n)
            status = advance(arrays, state, start, stop, most, rule, inplace)
            if status != DONE:
                break
            if limit < np.inf and not transfers and least_cost(arrays, state, stop) > limit:
                raise TooDearError
        if status == DONE:
            return OnlineRun(problem, state)
        if status != RECORD_FULL:
            raise DoesNotFitError(status)
        record *= 2
