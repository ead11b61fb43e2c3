"""A run of the simulator on a problem, its schedule, and a lower bound on its cost."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from coop_plan.planner.core.arrays import Arrays, to_arrays
from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.jit import inlined, njit
from coop_plan.planner.core.memory_bounds import largest_working_set
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule, Schedule
from coop_plan.planner.method import Progress, Request
from coop_plan.planner.online import columns as c
from coop_plan.planner.online.params import DEFAULTS, OnlineParams
from coop_plan.planner.online.simulator import DONE, RECORD_FULL, advance
from coop_plan.planner.online.state import ArenaState, empty_arena

ROUNDING = 1e-9
"""Relative difference that the order of a sum can make."""


class CostLimitError(Exception):
    """The run would cost more than the limit, or has looked at more blocks than its limit."""


@dataclass(frozen=True)
class OnlineRun:
    """Record of a completed run; `planner.online.state` describes its arrays."""

    problem: Problem
    state: ArenaState

    @property
    def cost_us(self) -> float:
        """Cost of all events, µs."""
        return float(self.state.total[c.CLOCK])

    @property
    def eviction_free_ratio(self) -> float:
        """Mean of free bytes / arena at forced evictions, the requested block counted as free."""
        failures = int(self.state.counts[c.FAILURES])
        return float(self.state.total[c.FREE_RATIOS]) / failures if failures else 0.0

    @property
    def evictions(self) -> int:
        """Number of tensors evicted by failed allocations."""
        return int(self.state.counts[c.EVICTED])

    @cached_property
    def placed(self) -> PlacedSchedule:
        """The schedule with its addresses."""
        s, count = self.state, self.state.counts
        events, writes, drops = count[c.EVENTS], count[c.WRITES], count[c.DROPS]
        rows = [c.INPLACE_EVENT, c.INPLACE_OUT, c.INPLACE_SOURCE]
        schedule = Schedule.with_decisions(
            self.problem,
            s.event[c.EVENT_OP, :events].copy(),
            do=s.event[c.EVENT_DO, :events].copy(),
            taken=np.ascontiguousarray(s.record[rows, :writes].T),
            dropped=np.ascontiguousarray(s.record[[c.DROP_EVENT, c.DROPPED], :drops].T),
        )
        return PlacedSchedule(
            schedule,
            offset=s.record[c.OFFSET, : count[c.OFFSETS]].copy(),
            workspace_offset=s.event[c.EVENT_WORKSPACE, :events].copy(),
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
    scan_limit: float = np.inf,
    params: OnlineParams = DEFAULTS,
) -> OnlineRun:
    """
    Execute the step in `request.arena_bytes` under an eviction rule of `planner.online.simulator`.

    Without `gaps` only bytes count, as in DTR's own simulator: addresses fit no arena. `cost_limit`
    (µs) ends a run that is certain to cost more, `scan_limit` one whose failed allocations have
    looked at that many blocks of the arena.

    Raises:
        DoesNotFitError: an op does not fit.
        CostLimitError: the run exceeds one of these limits.
        TimeLimitError: the request's deadline has passed.
    """
    unit = problem.alignment
    floor, units = request.arena_bytes // unit * unit, problem.rounded(request.arena_bytes)
    new_arena = partial(
        empty_arena,
        problem,
        params=params,
        partition=partition,
        whole_closure=whole_closure,
        dependents=dependents,
        transfers=transfers,
        gaps=gaps,
    )
    settings = rule, inplace, transfers, cost_limit, scan_limit, params
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
    rule: int,
    inplace: bool,
    transfers: int,
    cost_limit: float,
    scan_limit: float,
    params: OnlineParams,
) -> OnlineRun:
    """Execute the step in the arena that `new_arena` makes for a number of events."""
    arrays = to_arrays(problem)
    n = problem.op_count
    max_events = n * (params.max_recomputes_per_op + 1)
    record = min(max_events, params.first_record * n + 64)
    if transfers:
        record += 4 * problem.tensor_count
    limit = cost_limit * (1 + ROUNDING)
    chunk = max(params.chunk_ops, n // params.max_chunks)  # a bound on the cost reads every op
    while True:
        state = new_arena(record)
        status = DONE
        scans = 0
        for start in range(0, n, chunk):
            request.check_time()
            if request.progress is not None:
                request.progress(Progress("simulating", start / n))
            stop, failures = min(start + chunk, n), state.counts[c.FAILURES]
            status = advance(arrays, state, start, stop, max_events, rule, inplace)
            if status != DONE:
                break
            # An allocation that fails looks at every block.
            scans += (state.counts[c.FAILURES] - failures) * state.counts[c.BLOCKS]
            if scans > scan_limit:
                raise CostLimitError
            if limit < np.inf and not transfers and run_cost_bound(arrays, state, stop) > limit:
                raise CostLimitError
        if status == DONE:
            return OnlineRun(problem, state)
        if status != RECORD_FULL:
            raise DoesNotFitError(status)
        record *= 2


@njit
def run_cost_bound(a: Arrays, s: ArenaState, position: int) -> float:
    """Lower bound (µs) on the cost of a run without transfers that has reached op `position`.

    Costs so far, all later ops once, and each op once whose evicted outputs are read later or are
    needed to recompute those.
    """
    total = float(s.total[c.CLOCK])
    for op in range(position, a.ops):
        total += a.cost[op]
    reruns = np.zeros(a.ops, np.bool_)
    for t in range(a.size.size):
        if a.last_use[t] >= position and _is_evicted(a, s, t):
            reruns[a.producer[t]] = True
    for op in range(position - 1, -1, -1):  # an op's inputs have earlier producers
        if reruns[op]:
            total += a.cost[op]
            for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
                if _is_evicted(a, s, a.reads[k]):
                    reruns[a.producer[a.reads[k]]] = True
    return total


@inlined
def _is_evicted(a: Arrays, s: ArenaState, t: int) -> bool:
    """True if `t` was produced, is not live, and a rerun would write it to the arena."""
    return bool(a.outside[t] == 0 and s.tensor[c.WRITTEN, t] == 1 and s.tensor[c.LIVE, t] == 0)
