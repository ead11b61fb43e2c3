"""Incremental liveness: lifetimes of the copies of each tensor, from its accesses.

The accesses of a tensor form a linked list in candidate order, so an edit updates only the tensors
that it accesses. A write `x` with `COPY == x` begins a copy; the copy ends at event `END`, where
its bytes are counted as freed. These counts stay valid until the tensor is stale.
"""

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute.event_list import mark_dirty, position_of
from coop_plan.planner.search.compute.sequence import (
    ACCESS_KIND,
    ALLOCATED,
    CODE,
    COPY,
    END,
    EVENT,
    FIRST_ACCESS,
    FREED,
    HEAD,
    INPLACE_SAVED,
    NEXT,
    NEXT_OF_EVENT,
    NONE,
    PREVIOUS,
    QUEUE,
    QUEUE_COUNT,
    QUEUED,
    READ,
    STALE,
    STALE_COUNT,
    STALES,
    TAIL,
    TENSOR,
    SearchState,
)


@inlined
def mark_stale(s: SearchState, t: int) -> None:
    """Mark a tensor's lifetimes as out of date and queue it for dead-code elimination."""
    if s.tensor[t, QUEUED] == 0:
        s.tensor[t, QUEUED] = 1
        s.lists[QUEUE, s.counts[QUEUE_COUNT]] = t
        s.counts[QUEUE_COUNT] += 1
    if s.tensor[t, STALE] == 0:
        s.tensor[t, STALE] = 1
        s.lists[STALES, s.counts[STALE_COUNT]] = t
        s.counts[STALE_COUNT] += 1


@inlined
def _set_lifetime(a: Program, s: SearchState, x: int, end: int) -> None:
    """Let the copy that write `x` begins end at event `end`; updates the bytes of both events."""
    e, size, old_end = s.access[x, EVENT], a.size[s.access[x, TENSOR]], s.access[x, END]
    if s.access[x, COPY] == x:
        if old_end == end:
            return
        s.event_bytes[old_end, FREED] -= size
        mark_dirty(s, old_end)
    else:
        s.access[x, COPY] = x
        s.event_bytes[e, ALLOCATED] += size
    s.access[x, END] = end
    s.event_bytes[end, FREED] += size
    mark_dirty(s, e)
    mark_dirty(s, end)


@inlined
def _clear_lifetime(a: Program, s: SearchState, x: int) -> None:
    """Let write `x` begin no copy; takes back the bytes it was counted with."""
    if s.access[x, COPY] == x:
        size = a.size[s.access[x, TENSOR]]
        s.event_bytes[s.access[x, EVENT], ALLOCATED] -= size
        s.event_bytes[s.access[x, END], FREED] -= size
        mark_dirty(s, s.access[x, EVENT])
        mark_dirty(s, s.access[x, END])
    s.access[x, COPY] = NONE


@inner
def update_liveness(a: Program, s: SearchState) -> bool:
    """Recompute the lifetimes of stale tensors; False if an event reads a tensor without a copy."""
    while s.counts[STALE_COUNT] > 0:
        t = s.lists[STALES, s.counts[STALE_COUNT] - 1]
        if not _update_copies(a, s, t):
            return False
        s.tensor[t, STALE] = 0
        s.counts[STALE_COUNT] -= 1
        # An in-place output saves bytes only if its input ends there, so a changed lifetime may
        # change the saving of each event that accesses the tensor.
        x = s.tensor[t, HEAD]
        while x != NONE:
            e = s.access[x, EVENT]
            code = s.event[e, CODE]
            if a.pairs_ptr[code] < a.pairs_ptr[code + 1]:
                saved = _inplace_saving(a, s, e, code)
                if saved != s.event_bytes[e, INPLACE_SAVED]:
                    s.event_bytes[e, INPLACE_SAVED] = saved
                    mark_dirty(s, e)
            x = s.access[x, NEXT]
    return True


@inlined
def _update_copies(a: Program, s: SearchState, t: int) -> bool:
    """Recompute the lifetimes of one tensor; False if no schedule has these accesses."""
    copy = end = NONE
    x = s.tensor[t, HEAD]
    while x != NONE:
        e = s.access[x, EVENT]
        if s.access[x, ACCESS_KIND] == READ:
            if copy == NONE:
                return False
            s.access[x, COPY], end = copy, e
        elif copy != NONE and a.overwritten[t] == 1:
            _clear_lifetime(a, s, x)  # a rerun writes to scratch memory, during its event only
        elif copy == NONE and s.event[e, CODE] >= a.ops:
            return False  # prefetched before it was computed
        else:
            if copy != NONE:
                _set_lifetime(a, s, copy, end)
            copy, end = x, e
        x = s.access[x, NEXT]
    if s.is_output[t] == 1:
        if copy == NONE:
            return False
        end = s.sequence.size
    if copy != NONE:
        _set_lifetime(a, s, copy, end)
    return True


@inlined
def _inplace_saving(a: Program, s: SearchState, e: int, code: int) -> int:
    """Bytes that an event saves by writing one output over an input whose lifetime ends there."""
    saved = 0
    for k in range(a.pairs_ptr[code], a.pairs_ptr[code + 1]):
        x, source = s.event[e, FIRST_ACCESS], a.pairs_in[k]
        while x != NONE and (s.access[x, TENSOR] != source or s.access[x, ACCESS_KIND] != READ):
            x = s.access[x, NEXT_OF_EVENT]
        if x != NONE and s.access[x, COPY] != NONE and s.access[s.access[x, COPY], END] == e:
            saved = a.size[a.pairs_out[k]]
            break
    return saved


@inlined
def link_access(s: SearchState, x: int) -> None:
    """Insert an access into its tensor's list; of one event the read comes before the write."""
    t, at = s.access[x, TENSOR], position_of(s, s.access[x, EVENT])
    at -= s.access[x, ACCESS_KIND] == READ
    last = s.tensor[t, TAIL]
    while last != NONE and position_of(s, s.access[last, EVENT]) > at:
        last = s.access[last, PREVIOUS]
    following = s.tensor[t, HEAD] if last == NONE else s.access[last, NEXT]
    s.access[x, PREVIOUS], s.access[x, NEXT] = last, following
    if last == NONE:
        s.tensor[t, HEAD] = x
    else:
        s.access[last, NEXT] = x
    if following == NONE:
        s.tensor[t, TAIL] = x
    else:
        s.access[following, PREVIOUS] = x


@inlined
def unlink_access(a: Program, s: SearchState, x: int) -> None:
    """Remove an access from its tensor's list."""
    copy = s.access[x, COPY]
    if copy == x:
        _clear_lifetime(a, s, x)
    elif copy != NONE and s.access[copy, END] == s.access[x, EVENT]:
        mark_dirty(s, s.access[copy, EVENT])  # the copy may now end in another block
    t, last, following = s.access[x, TENSOR], s.access[x, PREVIOUS], s.access[x, NEXT]
    if last == NONE:
        s.tensor[t, HEAD] = following
    else:
        s.access[last, NEXT] = following
    if following == NONE:
        s.tensor[t, TAIL] = last
    else:
        s.access[following, PREVIOUS] = last


@inlined
def redefines(a: Program, s: SearchState, x: int) -> bool:
    """True if a write begins a new copy at any position: a recompute or a prefetch marker."""
    return bool(a.evictable[s.access[x, TENSOR]] == 1 or s.event[s.access[x, EVENT], CODE] >= a.ops)


@inlined
def is_live_after(a: Program, s: SearchState, x: int) -> bool:
    """True if the tensor of access `x` is live directly after it."""
    t, y = s.access[x, TENSOR], s.access[x, NEXT]
    while y != NONE:
        if s.access[y, ACCESS_KIND] == READ:
            return True
        if redefines(a, s, y):
            return False
        y = s.access[y, NEXT]
    return bool(s.is_output[t] == 1)


@inlined
def is_live_at(a: Program, s: SearchState, t: int, at: int) -> bool:
    """True if a tensor is live when event `at` of the candidate begins."""
    y = s.tensor[t, TAIL]
    live = bool(s.is_output[t] == 1)
    while y != NONE and position_of(s, s.access[y, EVENT]) >= at:
        if s.access[y, ACCESS_KIND] == READ:
            live = True
        elif redefines(a, s, y):
            live = False
        y = s.access[y, PREVIOUS]
    return live


@inlined
def next_read(s: SearchState, t: int, at: int) -> int:
    """Position of the first read of a tensor from `at` on; the end if there is none."""
    x, found = s.tensor[t, TAIL], position_of(s, s.sequence.size)
    while x != NONE and position_of(s, s.access[x, EVENT]) >= at:
        if s.access[x, ACCESS_KIND] == READ:
            found = position_of(s, s.access[x, EVENT])
        x = s.access[x, PREVIOUS]
    return found
