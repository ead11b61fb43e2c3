"""Offloads and prefetches of an online execution: the copy engines' clocks and the record."""

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.core.lifetimes import OFFLOAD, PREFETCH, WAIT
from coop_plan.planner.online.neighbours import mark_resident, neighbour_cost
from coop_plan.planner.online.state import ArenaState


@inlined
def record_event(s: ArenaState, do: int, what: int, workspace: int = 0) -> None:
    """Append an event to the record."""
    event = s.event[s.now.events]
    event.do, event.what, event.workspace = do, what, workspace
    s.now.events += 1


@inner
def begin_offload(a: Arrays, s: ArenaState, t: int) -> None:
    """Begin to copy `t` to the host; its bytes stay in use until `end_offload`."""
    record_event(s, OFFLOAD, t)
    s.now.out_free_us = max(s.now.out_free_us, s.now.clock_us) + s.tensor[t].offload_us
    s.tensor[t].offload_end_us = s.now.out_free_us
    s.tensor[t].is_leaving = True
    if not s.tensor[t].is_home:
        s.now.host_bytes += a.size[t]


@inner
def end_offload(s: ArenaState, t: int) -> None:
    """Wait for the copy of `t` to the host."""
    record_event(s, WAIT, t)
    s.now.clock_us = max(s.now.clock_us, s.tensor[t].offload_end_us)
    s.tensor[t].is_leaving = False
    s.tensor[t].is_hosted = True
    s.tensor[t].offload_order = s.now.offloads
    s.now.offloads += 1


@inner
def begin_prefetch(s: ArenaState, t: int, at: int) -> None:
    """Begin to copy `t` from the host to offset `at`."""
    record_event(s, PREFETCH, t)
    s.offsets[s.now.offsets] = at
    s.now.offsets += 1
    s.tensor[t].offset = at
    s.now.in_free_us = max(s.now.in_free_us, s.now.clock_us) + s.tensor[t].prefetch_us
    s.tensor[t].prefetch_end_us = s.now.in_free_us
    s.tensor[t].is_live = s.tensor[t].is_arriving = True
    s.now.has_prefetched |= not s.tensor[t].is_home
    s.tensor[t].last_access_us = s.now.clock_us
    mark_resident(s, t)


@inner
def end_prefetch(s: ArenaState, t: int) -> None:
    """Wait for the copy of `t` from the host."""
    record_event(s, WAIT, t)
    s.now.clock_us = max(s.now.clock_us, s.tensor[t].prefetch_end_us)
    s.tensor[t].is_arriving = False


@inner
def swap_us(a: Arrays, s: ArenaState, t: int) -> float:
    """Time to offload and prefetch `t`, µs; infinite if it cannot be offloaded."""
    if s.tensor[t].is_hosted:
        return s.tensor[t].prefetch_us
    full = s.host_budget >= 0 and s.now.host_bytes + a.size[t] > s.host_budget
    if not s.tensor[t].is_movable or (full and not s.tensor[t].is_home):
        return float("inf")
    return s.tensor[t].offload_us + s.tensor[t].prefetch_us


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
