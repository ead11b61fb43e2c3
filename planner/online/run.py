"""One run of the simulator on a problem, and its schedule."""

from dataclasses import dataclass

from coop_plan.planner.core.arrays import Arrays, Ints, to_arrays
from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.method import Progress, Request
from coop_plan.planner.online.params import DEFAULTS, OnlineParams
from coop_plan.planner.online.simulator import DONE, RECORD_FULL, advance
from coop_plan.planner.online.state import (
    CLOCK,
    DROP_EVENT,
    DROPPED,
    DROPS,
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


@dataclass(frozen=True)
class OnlineRun:
    """The record of a completed run; see `planner.online.state` for its arrays."""

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

    def schedule(self, problem: Problem) -> Schedule:
        """The placed schedule."""
        s, count = self.state, self.state.counts
        drops = _by_event(s.record[DROP_EVENT], s.record[DROPPED], count[DROPS])
        pairs: dict[int, list[tuple[int, int]]] = {}
        for event, out, source in zip(
            s.record[INPLACE_EVENT, : count[WRITES]].tolist(),
            s.record[INPLACE_OUT, : count[WRITES]].tolist(),
            s.record[INPLACE_SOURCE, : count[WRITES]].tolist(),
            strict=True,
        ):
            pairs.setdefault(event, []).append((out, source))
        schedule = Schedule(problem)
        schedule.offset = s.record[OFFSET, : count[OFFSETS]].tolist()
        schedule.workspace_offset = s.event[EVENT_WORKSPACE, : count[EVENTS]].tolist()
        for event, op in enumerate(s.event[EVENT_OP, : count[EVENTS]].tolist()):
            schedule.run(op, tuple(pairs.get(event, ())))
            for t in drops.get(event, ()):
                schedule.drop(t)
        schedule.finish()
        return schedule


def _by_event(events: Ints, tensors: Ints, count: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for event, t in zip(events[:count].tolist(), tensors[:count].tolist(), strict=True):
        found.setdefault(event, []).append(t)
    return found


def simulate_arena(
    problem: Problem,
    request: Request,
    rule: int,
    *,
    partition: bool,
    inplace: bool,
    arrays: Arrays | None = None,
    params: OnlineParams = DEFAULTS,
) -> OnlineRun:
    """
    Execute the step in `request.arena_bytes` under an eviction rule of `planner.online.simulator`.

    Raises:
        DoesNotFitError: at the op that cannot be run.
        TimeLimitError: the request's deadline has passed.
    """
    arrays = arrays or to_arrays(problem)
    capacity = request.arena_bytes & -problem.alignment
    n = problem.op_count
    most = n * (params.max_recomputes_per_op + 1)
    record = min(most, params.first_record * n + 64)
    while True:
        state = empty_arena(problem, capacity, record, params, partition=partition)
        status = DONE
        for start in range(0, n, params.chunk_ops):
            request.check_time()
            if request.progress is not None:
                request.progress(Progress("simulating", start / n))
            stop = min(start + params.chunk_ops, n)
            status = advance(arrays, state, start, stop, most, rule, inplace)
            if status != DONE:
                break
        if status == DONE:
            return OnlineRun(state)
        if status != RECORD_FULL:
            raise DoesNotFitError(status)
        record *= 2
