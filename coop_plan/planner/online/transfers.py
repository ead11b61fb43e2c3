"""Offloads and prefetches of an online execution: the copy engines' clocks and the record."""

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.core.lifetimes import OFFLOAD, PREFETCH, WAIT
from coop_plan.planner.online.neighbours import mark_resident, neighbour_cost
from coop_plan.planner.online.state import (
    ADDRESS,
    ARRIVING,
    CLOCK,
    EVENT_DO,
    EVENT_OP,
    EVENT_WORKSPACE,
    EVENTS,
    HAS_PREFETCHED,
    HOST_BYTES,
    HOSTED,
    IN_FREE,
    LAST_ACCESS,
    LEAVING,
    LIVE,
    MOVABLE,
    OFFLOAD_COUNT,
    OFFLOAD_END,
    OFFLOAD_ORDER,
    OFFSET,
    OFFSETS,
    OUT_FREE,
    PREFETCH_END,
    ArenaState,
)

SWAPS_OUT, DIRECTS, RECOMPUTES, FILTERS, PREFETCHES, OVERLAPS = 1, 2, 4, 8, 16, 32
"""Flags of a method with transfers, see `planner.online.delta`."""


@inlined
def _record(s: ArenaState, do: int, t: int) -> None:
    event = s.counts[EVENTS]
    s.event[EVENT_DO, event] = do
    s.event[EVENT_OP, event] = t
    s.event[EVENT_WORKSPACE, event] = 0
    s.counts[EVENTS] = event + 1


@inner
def begin_offload(a: Arrays, s: ArenaState, t: int) -> None:
    """Begin to copy `t` to the host; its bytes stay in use until `end_offload`."""
    _record(s, OFFLOAD, t)
    s.total[OUT_FREE] = max(s.total[OUT_FREE], s.total[CLOCK]) + s.out_us[t]
    s.times[OFFLOAD_END, t] = s.total[OUT_FREE]
    s.tensor[LEAVING, t] = 1
    s.counts[HOST_BYTES] += a.size[t]


@inner
def end_offload(s: ArenaState, t: int) -> None:
    """Wait for the copy of `t` to the host."""
    _record(s, WAIT, t)
    s.total[CLOCK] = max(s.total[CLOCK], s.times[OFFLOAD_END, t])
    s.tensor[LEAVING, t] = 0
    s.tensor[HOSTED, t] = 1
    s.tensor[OFFLOAD_ORDER, t] = s.counts[OFFLOAD_COUNT]
    s.counts[OFFLOAD_COUNT] += 1


@inner
def begin_prefetch(s: ArenaState, t: int, at: int) -> None:
    """Begin to copy `t` from the host to offset `at`."""
    _record(s, PREFETCH, t)
    s.record[OFFSET, s.counts[OFFSETS]] = at
    s.counts[OFFSETS] += 1
    s.tensor[ADDRESS, t] = at
    s.total[IN_FREE] = max(s.total[IN_FREE], s.total[CLOCK]) + s.in_us[t]
    s.times[PREFETCH_END, t] = s.total[IN_FREE]
    s.tensor[LIVE, t] = s.tensor[ARRIVING, t] = 1
    s.counts[HAS_PREFETCHED] = 1
    s.times[LAST_ACCESS, t] = s.total[CLOCK]
    mark_resident(s, t)


@inner
def end_prefetch(s: ArenaState, t: int) -> None:
    """Wait for the copy of `t` from the host."""
    _record(s, WAIT, t)
    s.total[CLOCK] = max(s.total[CLOCK], s.times[PREFETCH_END, t])
    s.tensor[ARRIVING, t] = 0


@inner
def swap_us(a: Arrays, s: ArenaState, t: int) -> float:
    """Time to offload and prefetch `t`, µs; infinite if it cannot be offloaded."""
    if s.tensor[HOSTED, t] == 1:
        return float(s.in_us[t])
    full = s.host_budget >= 0 and s.counts[HOST_BYTES] + a.size[t] > s.host_budget
    if s.tensor[MOVABLE, t] == 0 or full:
        return float("inf")
    return float(s.out_us[t] + s.in_us[t])


@inner
def directed_to_host(a: Arrays, s: ArenaState, t: int, evictable: bool) -> bool:
    """DELTA's director: True if a released tensor is swapped, False if it is recomputed.

    Compares the time of its copies with its cost plus that of its evicted neighbours.
    """
    copy_us = swap_us(a, s, t)
    if copy_us == float("inf"):
        return False
    if not evictable or s.transfers & DIRECTS == 0:
        return True
    return bool(copy_us < neighbour_cost(s, t))
