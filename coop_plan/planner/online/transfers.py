"""Offloads and prefetches of an online execution: the copy engines' clocks and the record."""

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.core.lifetimes import OFFLOAD, PREFETCH, WAIT
from coop_plan.planner.online import columns as c
from coop_plan.planner.online.neighbours import mark_resident, neighbour_cost
from coop_plan.planner.online.state import ArenaState


@inlined
def _record(s: ArenaState, do: int, t: int) -> None:
    event = s.counts[c.EVENTS]
    s.event[c.EVENT_DO, event] = do
    s.event[c.EVENT_OP, event] = t
    s.event[c.EVENT_WORKSPACE, event] = 0
    s.counts[c.EVENTS] = event + 1


@inner
def begin_offload(a: Arrays, s: ArenaState, t: int) -> None:
    """Begin to copy `t` to the host; its bytes stay in use until `end_offload`."""
    _record(s, OFFLOAD, t)
    s.total[c.OUT_FREE] = max(s.total[c.OUT_FREE], s.total[c.CLOCK]) + s.out_us[t]
    s.times[c.OFFLOAD_END, t] = s.total[c.OUT_FREE]
    s.tensor[c.LEAVING, t] = 1
    s.counts[c.HOST_BYTES] += a.size[t]


@inner
def end_offload(s: ArenaState, t: int) -> None:
    """Wait for the copy of `t` to the host."""
    _record(s, WAIT, t)
    s.total[c.CLOCK] = max(s.total[c.CLOCK], s.times[c.OFFLOAD_END, t])
    s.tensor[c.LEAVING, t] = 0
    s.tensor[c.HOSTED, t] = 1
    s.tensor[c.OFFLOAD_ORDER, t] = s.counts[c.OFFLOAD_COUNT]
    s.counts[c.OFFLOAD_COUNT] += 1


@inner
def begin_prefetch(s: ArenaState, t: int, at: int) -> None:
    """Begin to copy `t` from the host to offset `at`."""
    _record(s, PREFETCH, t)
    s.record[c.OFFSET, s.counts[c.OFFSETS]] = at
    s.counts[c.OFFSETS] += 1
    s.tensor[c.ADDRESS, t] = at
    s.total[c.IN_FREE] = max(s.total[c.IN_FREE], s.total[c.CLOCK]) + s.in_us[t]
    s.times[c.PREFETCH_END, t] = s.total[c.IN_FREE]
    s.tensor[c.LIVE, t] = s.tensor[c.ARRIVING, t] = 1
    s.counts[c.HAS_PREFETCHED] = 1
    s.times[c.LAST_ACCESS, t] = s.total[c.CLOCK]
    mark_resident(s, t)


@inner
def end_prefetch(s: ArenaState, t: int) -> None:
    """Wait for the copy of `t` from the host."""
    _record(s, WAIT, t)
    s.total[c.CLOCK] = max(s.total[c.CLOCK], s.times[c.PREFETCH_END, t])
    s.tensor[c.ARRIVING, t] = 0


@inner
def swap_us(a: Arrays, s: ArenaState, t: int) -> float:
    """Time to offload and prefetch `t`, µs; infinite if it cannot be offloaded."""
    if s.tensor[c.HOSTED, t] == 1:
        return float(s.in_us[t])
    full = s.host_budget >= 0 and s.counts[c.HOST_BYTES] + a.size[t] > s.host_budget
    if s.tensor[c.MOVABLE, t] == 0 or full:
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
    if not evictable or not s.transfers.director:
        return True
    return bool(copy_us < neighbour_cost(s, t))
