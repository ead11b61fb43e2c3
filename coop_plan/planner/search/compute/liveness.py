"""Incremental liveness: lifetimes of the copies of each tensor, from its accesses.

The accesses of a tensor form a linked list in candidate order, so an edit updates only the tensors
that it accesses. A write `x` with `write == x` begins a copy; the copy ends at event `end`, where
its bytes are counted as freed. These counts stay valid until the tensor is stale.
"""

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute.event_list import mark_dirty, position_of
from coop_plan.planner.search.compute.sequence import NONE, SearchState


@inlined
def mark_stale(s: SearchState, t: int) -> None:
    """Mark a tensor's lifetimes as out of date and queue it for dead-code elimination."""
    if not s.tensor[t].is_queued:
        s.tensor[t].is_queued = True
        s.queued[s.now.queued] = t
        s.now.queued += 1
    if not s.tensor[t].is_stale:
        s.tensor[t].is_stale = True
        s.stale[s.now.stale] = t
        s.now.stale += 1


@inlined
def _set_lifetime(a: Program, s: SearchState, x: int, end: int) -> None:
    """Let the copy that write `x` begins end at event `end`; updates the bytes of both events."""
    e, size, old_end = s.access[x].event, a.size[s.access[x].tensor], s.access[x].end
    if s.access[x].write == x:
        if old_end == end:
            return
        s.event[old_end].freed -= size
        mark_dirty(s, old_end)
    else:
        s.access[x].write = x
        s.event[e].allocated += size
    s.access[x].end = end
    s.event[end].freed += size
    mark_dirty(s, e)
    mark_dirty(s, end)


@inlined
def _clear_lifetime(a: Program, s: SearchState, x: int) -> None:
    """Let write `x` begin no copy; takes back the bytes it was counted with."""
    if s.access[x].write == x:
        size = a.size[s.access[x].tensor]
        s.event[s.access[x].event].allocated -= size
        s.event[s.access[x].end].freed -= size
        mark_dirty(s, s.access[x].event)
        mark_dirty(s, s.access[x].end)
    s.access[x].write = NONE


@inner
def update_liveness(a: Program, s: SearchState) -> bool:
    """Recompute the lifetimes of stale tensors; False if an event reads a tensor without a copy."""
    while s.now.stale > 0:
        t = s.stale[s.now.stale - 1]
        if not _update_copies(a, s, t):
            return False
        s.tensor[t].is_stale = False
        s.now.stale -= 1
        # An in-place output saves bytes only if its input ends there, so a changed lifetime may
        # change the saving of each event that accesses the tensor.
        x = s.tensor[t].head
        while x != NONE:
            e = s.access[x].event
            code = s.event[e].code
            if a.pairs_ptr[code] < a.pairs_ptr[code + 1]:
                saved = _inplace_saving(a, s, e, code)
                if saved != s.event[e].inplace_saved:
                    s.event[e].inplace_saved = saved
                    mark_dirty(s, e)
            x = s.access[x].next
    return True


@inlined
def _update_copies(a: Program, s: SearchState, t: int) -> bool:
    """Recompute the lifetimes of one tensor; False if no schedule has these accesses."""
    copy = end = NONE
    x = s.tensor[t].head
    while x != NONE:
        e = s.access[x].event
        if s.access[x].is_read:
            if copy == NONE:
                return False
            s.access[x].write, end = copy, e
        elif copy != NONE and a.overwritten[t] == 1:
            _clear_lifetime(a, s, x)  # a rerun writes to scratch memory, during its event only
        elif copy == NONE and s.event[e].code >= a.ops:
            return False  # prefetched before it was computed
        else:
            if copy != NONE:
                _set_lifetime(a, s, copy, end)
            copy, end = x, e
        x = s.access[x].next
    if s.tensor[t].is_output:
        if copy == NONE:
            return False
        end = s.sequence.size
    if copy != NONE:
        _set_lifetime(a, s, copy, end)
    return True


@inlined
def _inplace_saving(a: Program, s: SearchState, e: int, code: int) -> int:
    """Bytes that an event saves by writing one output over an input whose lifetime ends there."""
    for k in range(a.pairs_ptr[code], a.pairs_ptr[code + 1]):
        if overwritable_copy(s, e, a.pairs_in[k]) != NONE:
            return int(a.size[a.pairs_out[k]])
    return 0


@inlined
def overwritable_copy(s: SearchState, e: int, t: int) -> int:
    """The copy of tensor `t` whose last read is in event `e`; NONE if there is none."""
    x = s.event[e].first_access
    while x != NONE and (s.access[x].tensor != t or not s.access[x].is_read):
        x = s.access[x].next_of_event
    copy = s.access[x].write if x != NONE else NONE
    return copy if copy != NONE and s.access[copy].end == e else NONE


@inlined
def link_access(s: SearchState, x: int) -> None:
    """Insert an access into its tensor's list; of one event the read comes before the write."""
    t, at = s.access[x].tensor, position_of(s, s.access[x].event)
    at -= s.access[x].is_read
    last = s.tensor[t].tail
    while last != NONE and position_of(s, s.access[last].event) > at:
        last = s.access[last].previous
    following = s.tensor[t].head if last == NONE else s.access[last].next
    s.access[x].previous, s.access[x].next = last, following
    if last == NONE:
        s.tensor[t].head = x
    else:
        s.access[last].next = x
    if following == NONE:
        s.tensor[t].tail = x
    else:
        s.access[following].previous = x


@inlined
def unlink_access(a: Program, s: SearchState, x: int) -> None:
    """Remove an access from its tensor's list."""
    copy = s.access[x].write
    if copy == x:
        _clear_lifetime(a, s, x)
    elif copy != NONE and s.access[copy].end == s.access[x].event:
        mark_dirty(s, s.access[copy].event)  # the copy may now end in another block
    t, last, following = s.access[x].tensor, s.access[x].previous, s.access[x].next
    if last == NONE:
        s.tensor[t].head = following
    else:
        s.access[last].next = following
    if following == NONE:
        s.tensor[t].tail = last
    else:
        s.access[following].previous = last


@inlined
def redefines(a: Program, s: SearchState, x: int) -> bool:
    """True if a write begins a new copy at any position: a recompute or a prefetch marker."""
    return bool(a.evictable[s.access[x].tensor] == 1 or s.event[s.access[x].event].code >= a.ops)


@inlined
def is_live_after(a: Program, s: SearchState, x: int) -> bool:
    """True if the tensor of access `x` is live directly after it."""
    t, y = s.access[x].tensor, s.access[x].next
    while y != NONE:
        if s.access[y].is_read:
            return True
        if redefines(a, s, y):
            return False
        y = s.access[y].next
    return s.tensor[t].is_output


@inlined
def is_live_at(a: Program, s: SearchState, t: int, at: int) -> bool:
    """True if a tensor is live when event `at` of the candidate begins."""
    y = s.tensor[t].tail
    live = s.tensor[t].is_output
    while y != NONE and position_of(s, s.access[y].event) >= at:
        if s.access[y].is_read:
            live = True
        elif redefines(a, s, y):
            live = False
        y = s.access[y].previous
    return live


@inlined
def next_read(s: SearchState, t: int, at: int) -> int:
    """Position of the first read of a tensor from `at` on; the end if there is none."""
    x, found = s.tensor[t].tail, position_of(s, s.sequence.size)
    while x != NONE and position_of(s, s.access[x].event) >= at:
        if s.access[x].is_read:
            found = position_of(s, s.access[x].event)
        x = s.access[x].previous
    return found
