"""Copies to the host and back in an eager execution: the engines' clocks, and the record."""

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.core.lifetimes import OFFLOAD, PREFETCH, WAIT
from coop_plan.planner.online.neighbours import computed, neighbour_cost
from coop_plan.planner.online.state import (
    ADDRESS,
    AWAY,
    BACK,
    CLOCK,
    EVENT_DO,
    EVENT_OP,
    EVENT_WORKSPACE,
    EVENTS,
    FETCHED,
    FLYING,
    HOST_BYTES,
    HOSTED,
    IN_FREE,
    LAST_ACCESS,
    LEAVING,
    LIVE,
    MOVABLE,
    OFFSET,
    OFFSETS,
    OUT_FREE,
    SWAPPED,
    SWAPS,
    ArenaState,
)

SWAPS_OUT, DIRECTS, RECOMPUTES, FILTERS, PREFETCHES, OVERLAPS = 1, 2, 4, 8, 16, 32
"""Flags of a method with transfers; see `planner.online.delta`."""


@inlined
def _record(s: ArenaState, do: int, t: int) -> None:
    event = s.counts[EVENTS]
    s.event[EVENT_DO, event] = do
    s.event[EVENT_OP, event] = t
    s.event[EVENT_WORKSPACE, event] = 0
    s.counts[EVENTS] = event + 1


@inner
def begin_offload(a: Arrays, s: ArenaState, t: int) -> None:
    """Tensor `t` begins to be copied to the host; its bytes stay until `end_offload`."""
    _record(s, OFFLOAD, t)
    s.total[OUT_FREE] = max(s.total[OUT_FREE], s.total[CLOCK]) + s.out_us[t]
    s.times[AWAY, t] = s.total[OUT_FREE]
    s.tensor[LEAVING, t] = 1
    s.counts[HOST_BYTES] += a.size[t]


@inner
def end_offload(s: ArenaState, t: int) -> None:
    """Compute waits until the copy to the host is there."""
    _record(s, WAIT, t)
    s.total[CLOCK] = max(s.total[CLOCK], s.times[AWAY, t])
    s.tensor[LEAVING, t] = 0
    s.tensor[HOSTED, t] = 1
    s.tensor[SWAPPED, t] = s.counts[SWAPS]
    s.counts[SWAPS] += 1


@inner
def begin_fetch(s: ArenaState, t: int, at: int) -> None:
    """Tensor `t` begins to be copied from the host to offset `at`."""
    _record(s, PREFETCH, t)
    s.record[OFFSET, s.counts[OFFSETS]] = at
    s.counts[OFFSETS] += 1
    s.tensor[ADDRESS, t] = at
    s.total[IN_FREE] = max(s.total[IN_FREE], s.total[CLOCK]) + s.in_us[t]
    s.times[BACK, t] = s.total[IN_FREE]
    s.tensor[LIVE, t] = s.tensor[FLYING, t] = 1
    s.counts[FETCHED] = 1
    s.times[LAST_ACCESS, t] = s.total[CLOCK]
    computed(s, t)


@inner
def end_fetch(s: ArenaState, t: int) -> None:
    """Compute waits until tensor `t` is back."""
    _record(s, WAIT, t)
    s.total[CLOCK] = max(s.total[CLOCK], s.times[BACK, t])
    s.tensor[FLYING, t] = 0


@inner
def swap_us(a: Arrays, s: ArenaState, t: int) -> float:
    """Time (µs) to copy `t` to the host and back; infinite if `t` may not be offloaded."""
    if s.tensor[HOSTED, t] == 1:
        return float(s.in_us[t])
    full = s.host_budget >= 0 and s.counts[HOST_BYTES] + a.size[t] > s.host_budget
    if s.tensor[MOVABLE, t] == 0 or full:
        return float("inf")
    return float(s.out_us[t] + s.in_us[t])


@inner
def directed_to_host(a: Arrays, s: ArenaState, t: int, evictable: bool) -> bool:
    """
    The director: whether a tensor that is released is swapped; else it is computed again.

    The cheaper of the two, by what its copies take and what it and its evicted neighbours cost.
    """
    there_and_back = swap_us(a, s, t)
    if there_and_back == float("inf"):
        return False
    if not evictable or s.transfers & DIRECTS == 0:
        return True
    return bool(there_and_back < neighbour_cost(s, t))
