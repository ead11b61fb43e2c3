"""
Live tensors of a eviction run in order of their scores: a binary heap that knows where each is.

Those below `small` bytes come after all others.
"""

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.heuristic.eviction_state import AT, HEAP, HEAP_COUNT, KEY, EvictionState


@inner
def put_in(a: Arrays, s: EvictionState, t: int, key: float) -> None:
    """Put `t` where it belongs by this score; it may be there by another."""
    s.value[KEY, t] = key
    at = s.tensor[AT, t]
    if at < 0:
        at = s.counts[HEAP_COUNT]
        s.counts[HEAP_COUNT] += 1
    _run_fixed_length(a, s, t, at)


@inner
def take_out(a: Arrays, s: EvictionState, t: int) -> None:
    """Take `t` out, if it is there."""
    at = s.tensor[AT, t]
    if at < 0:
        return
    s.tensor[AT, t] = -1
    s.counts[HEAP_COUNT] -= 1
    if at < s.counts[HEAP_COUNT]:
        _run_fixed_length(a, s, s.tensor[HEAP, s.counts[HEAP_COUNT]], at)


@inner
def _run_fixed_length(a: Arrays, s: EvictionState, t: int, at: int) -> None:
    """Move `t` from place `at`, which is its own or empty, up or down to where it belongs."""
    while at > 0 and _before(a, s, t, s.tensor[HEAP, (at - 1) // 2]):
        _set(s, at, s.tensor[HEAP, (at - 1) // 2])
        at = (at - 1) // 2
    while 2 * at + 1 < s.counts[HEAP_COUNT]:
        child = 2 * at + 1
        if child + 1 < s.counts[HEAP_COUNT] and _before(
            a, s, s.tensor[HEAP, child + 1], s.tensor[HEAP, child]
        ):
            child += 1
        if not _before(a, s, s.tensor[HEAP, child], t):
            break
        _set(s, at, s.tensor[HEAP, child])
        at = child
    _set(s, at, t)


@inlined
def _set(s: EvictionState, at: int, t: int) -> None:
    s.tensor[HEAP, at] = t
    s.tensor[AT, t] = at


@inlined
def _before(a: Arrays, s: EvictionState, t: int, other: int) -> bool:
    small, other_small = a.size[t] < s.small, a.size[other] < s.small
    if small != other_small:
        return bool(other_small)
    return bool(s.value[KEY, t] < s.value[KEY, other])
