"""Binary heap of live tensors by score, with the index of each tensor in it.

Tensors below `small` bytes sort behind all others.
"""

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.heuristic.columns import HEAP, HEAP_COUNT, HEAP_INDEX, KEY
from coop_plan.planner.heuristic.eviction_state import EvictionState


@inner
def heap_put(a: Arrays, s: EvictionState, t: int, key: float) -> None:
    """Insert `t` with this score, or change its score."""
    s.value[KEY, t] = key
    at = s.tensor[HEAP_INDEX, t]
    if at < 0:
        at = s.counts[HEAP_COUNT]
        s.counts[HEAP_COUNT] += 1
    _sift(a, s, t, at)


@inner
def heap_remove(a: Arrays, s: EvictionState, t: int) -> None:
    """Remove `t` if it is in the heap."""
    at = s.tensor[HEAP_INDEX, t]
    if at < 0:
        return
    s.tensor[HEAP_INDEX, t] = -1
    s.counts[HEAP_COUNT] -= 1
    if at < s.counts[HEAP_COUNT]:
        _sift(a, s, s.tensor[HEAP, s.counts[HEAP_COUNT]], at)


@inner
def _sift(a: Arrays, s: EvictionState, t: int, at: int) -> None:
    """Move `t` from index `at`, its own or a free one, up or down to its place."""
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
    s.tensor[HEAP_INDEX, t] = at


@inlined
def _before(a: Arrays, s: EvictionState, t: int, other: int) -> bool:
    small, other_small = a.size[t] < s.small, a.size[other] < s.small
    if small != other_small:
        return bool(other_small)
    return bool(s.value[KEY, t] < s.value[KEY, other])
