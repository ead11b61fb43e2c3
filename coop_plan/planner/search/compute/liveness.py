"""Incremental liveness: lifetimes of the copies of each tensor, from its accesses.

The accesses of a tensor form a linked list in candidate order, so an edit updates only the tensors
that it accesses. A write `x` with `COPY == x` begins a copy; the copy ends at event `END`, where
its bytes are counted as freed. These counts stay valid until the tensor is stale.
"""

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute import columns as c
from coop_plan.planner.search.compute.event_list import mark_dirty, position_of
from coop_plan.planner.search.compute.sequence import SearchState


@inlined
def mark_stale(s: SearchState, t: int) -> None:
    """Mark a tensor's lifetimes as out of date and queue it for dead-code elimination."""
    if s.tensor[t, c.QUEUED] == 0:
        s.tensor[t, c.QUEUED] = 1
        s.lists[c.QUEUE, s.counts[c.QUEUE_COUNT]] = t
        s.counts[c.QUEUE_COUNT] += 1
    if s.tensor[t, c.STALE] == 0:
        s.tensor[t, c.STALE] = 1
        s.lists[c.STALES, s.counts[c.STALE_COUNT]] = t
        s.counts[c.STALE_COUNT] += 1


@inlined
def _set_lifetime(a: Program, s: SearchState, x: int, end: int) -> None:
    """Let the copy that write `x` begins end at event `end`; updates the bytes of both events."""
    e, size, old_end = s.access[x, c.EVENT], a.size[s.access[x, c.TENSOR]], s.access[x, c.END]
    if s.access[x, c.COPY] == x:
        if old_end == end:
            return
        s.event_bytes[old_end, c.FREED] -= size
        mark_dirty(s, old_end)
    else:
        s.access[x, c.COPY] = x
        s.event_bytes[e, c.ALLOCATED] += size
    s.access[x, c.END] = end
    s.event_bytes[end, c.FREED] += size
    mark_dirty(s, e)
    mark_dirty(s, end)


@inlined
def _clear_lifetime(a: Program, s: SearchState, x: int) -> None:
    """Let write `x` begin no copy; takes back the bytes it was counted with."""
    if s.access[x, c.COPY] == x:
        size = a.size[s.access[x, c.TENSOR]]
        s.event_bytes[s.access[x, c.EVENT], c.ALLOCATED] -= size
        s.event_bytes[s.access[x, c.END], c.FREED] -= size
        mark_dirty(s, s.access[x, c.EVENT])
        mark_dirty(s, s.access[x, c.END])
    s.access[x, c.COPY] = c.NONE


@inner
def update_liveness(a: Program, s: SearchState) -> bool:
    """Recompute the lifetimes of stale tensors; False if an event reads a tensor without a copy."""
    while s.counts[c.STALE_COUNT] > 0:
        t = s.lists[c.STALES, s.counts[c.STALE_COUNT] - 1]
        if not _update_copies(a, s, t):
            return False
        s.tensor[t, c.STALE] = 0
        s.counts[c.STALE_COUNT] -= 1
        # An in-place output saves bytes only if its input ends there, so a changed lifetime may
        # change the saving of each event that accesses the tensor.
        x = s.tensor[t, c.HEAD]
        while x != c.NONE:
            e = s.access[x, c.EVENT]
            code = s.event[e, c.CODE]
            if a.pairs_ptr[code] < a.pairs_ptr[code + 1]:
                saved = _inplace_saving(a, s, e, code)
                if saved != s.event_bytes[e, c.INPLACE_SAVED]:
                    s.event_bytes[e, c.INPLACE_SAVED] = saved
                    mark_dirty(s, e)
            x = s.access[x, c.NEXT]
    return True


@inlined
def _update_copies(a: Program, s: SearchState, t: int) -> bool:
    """Recompute the lifetimes of one tensor; False if no schedule has these accesses."""
    copy = end = c.NONE
    x = s.tensor[t, c.HEAD]
    while x != c.NONE:
        e = s.access[x, c.EVENT]
        if s.access[x, c.ACCESS_KIND] == c.READ:
            if copy == c.NONE:
                return False
            s.access[x, c.COPY], end = copy, e
        elif copy != c.NONE and a.overwritten[t] == 1:
            _clear_lifetime(a, s, x)  # a rerun writes to scratch memory, during its event only
        elif copy == c.NONE and s.event[e, c.CODE] >= a.ops:
            return False  # prefetched before it was computed
        else:
            if copy != c.NONE:
                _set_lifetime(a, s, copy, end)
            copy, end = x, e
        x = s.access[x, c.NEXT]
    if s.is_output[t] == 1:
        if copy == c.NONE:
            return False
        end = s.sequence.size
    if copy != c.NONE:
        _set_lifetime(a, s, copy, end)
    return True


@inlined
def _inplace_saving(a: Program, s: SearchState, e: int, code: int) -> int:
    """Bytes that an event saves by writing one output over an input whose lifetime ends there."""
    for k in range(a.pairs_ptr[code], a.pairs_ptr[code + 1]):
        if overwritable_copy(s, e, a.pairs_in[k]) != c.NONE:
            return int(a.size[a.pairs_out[k]])
    return 0


@inlined
def overwritable_copy(s: SearchState, e: int, t: int) -> int:
    """The copy of tensor `t` whose last read is in event `e`; NONE if there is none."""
    x = s.event[e, c.FIRST_ACCESS]
    while x != c.NONE and (s.access[x, c.TENSOR] != t or s.access[x, c.ACCESS_KIND] != c.READ):
        x = s.access[x, c.NEXT_OF_EVENT]
    copy = s.access[x, c.COPY] if x != c.NONE else c.NONE
    return int(copy) if copy != c.NONE and s.access[copy, c.END] == e else c.NONE


@inlined
def link_access(s: SearchState, x: int) -> None:
    """Insert an access into its tensor's list; of one event the read comes before the write."""
    t, at = s.access[x, c.TENSOR], position_of(s, s.access[x, c.EVENT])
    at -= s.access[x, c.ACCESS_KIND] == c.READ
    last = s.tensor[t, c.TAIL]
    while last != c.NONE and position_of(s, s.access[last, c.EVENT]) > at:
        last = s.access[last, c.PREVIOUS]
    following = s.tensor[t, c.HEAD] if last == c.NONE else s.access[last, c.NEXT]
    s.access[x, c.PREVIOUS], s.access[x, c.NEXT] = last, following
    if last == c.NONE:
        s.tensor[t, c.HEAD] = x
    else:
        s.access[last, c.NEXT] = x
    if following == c.NONE:
        s.tensor[t, c.TAIL] = x
    else:
        s.access[following, c.PREVIOUS] = x


@inlined
def unlink_access(a: Program, s: SearchState, x: int) -> None:
    """Remove an access from its tensor's list."""
    copy = s.access[x, c.COPY]
    if copy == x:
        _clear_lifetime(a, s, x)
    elif copy != c.NONE and s.access[copy, c.END] == s.access[x, c.EVENT]:
        mark_dirty(s, s.access[copy, c.EVENT])  # the copy may now end in another block
    t, last, following = s.access[x, c.TENSOR], s.access[x, c.PREVIOUS], s.access[x, c.NEXT]
    if last == c.NONE:
        s.tensor[t, c.HEAD] = following
    else:
        s.access[last, c.NEXT] = following
    if following == c.NONE:
        s.tensor[t, c.TAIL] = last
    else:
        s.access[following, c.PREVIOUS] = last


@inlined
def redefines(a: Program, s: SearchState, x: int) -> bool:
    """True if a write begins a new copy at any position: a recompute or a prefetch marker."""
    return bool(
        a.evictable[s.access[x, c.TENSOR]] == 1 or s.event[s.access[x, c.EVENT], c.CODE] >= a.ops
    )


@inlined
def is_live_after(a: Program, s: SearchState, x: int) -> bool:
    """True if the tensor of access `x` is live directly after it."""
    t, y = s.access[x, c.TENSOR], s.access[x, c.NEXT]
    while y != c.NONE:
        if s.access[y, c.ACCESS_KIND] == c.READ:
            return True
        if redefines(a, s, y):
            return False
        y = s.access[y, c.NEXT]
    return bool(s.is_output[t] == 1)


@inlined
def is_live_at(a: Program, s: SearchState, t: int, at: int) -> bool:
    """True if a tensor is live when event `at` of the candidate begins."""
    y = s.tensor[t, c.TAIL]
    live = bool(s.is_output[t] == 1)
    while y != c.NONE and position_of(s, s.access[y, c.EVENT]) >= at:
        if s.access[y, c.ACCESS_KIND] == c.READ:
            live = True
        elif redefines(a, s, y):
            live = False
        y = s.access[y, c.PREVIOUS]
    return live


@inlined
def next_read(s: SearchState, t: int, at: int) -> int:
    """Position of the first read of a tensor from `at` on; the end if there is none."""
    x, found = s.tensor[t, c.TAIL], position_of(s, s.sequence.size)
    while x != c.NONE and position_of(s, s.access[x, c.EVENT]) >= at:
        if s.access[x, c.ACCESS_KIND] == c.READ:
            found = position_of(s, s.access[x, c.EVENT])
        x = s.access[x, c.PREVIOUS]
    return found
