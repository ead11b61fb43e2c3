"""Edits of the candidate: insert, move and remove events, dead-code elimination, accept and undo.

Each edit costs time in proportion to the tensors that its events access.
"""

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute.event_list import (
    commit,
    event_at,
    fill_blocks,
    insert,
    length,
    list_events,
    rebalance,
    remove,
    restore,
)
from coop_plan.planner.search.compute.liveness import (
    is_live_after,
    link_access,
    mark_stale,
    redefines,
    unlink_access,
    update_liveness,
)
from coop_plan.planner.search.compute.sequence import NONE, SearchState


@inner
def load(a: Program, s: SearchState) -> bool:
    """Make the stored sequence the current one and the candidate; False if it is no schedule."""
    end, size = s.sequence.size, s.now.length
    # Reset: no accesses, no first runs, and all events and accesses free.
    for t in range(a.size.size):
        s.tensor[t].head = s.tensor[t].tail = NONE
        s.tensor[t].is_stale = s.tensor[t].is_queued = False
    for op in range(a.ops):
        s.op[op].first_run = NONE
    for e in range(end):
        s.free[e] = end - 1 - e
    accesses = s.access.size
    for x in range(accesses):
        s.access[x].next_of_event = x + 1
    s.access[accesses - 1].next_of_event = NONE
    s.now.free, s.now.free_access, s.now.free_accesses = end, 0, accesses
    s.now.added = s.now.removed = s.now.moved = 0
    s.now.stale = s.now.queued = s.now.changed = 0
    _clear_bytes(s, end)
    s.now.candidate_cost = 0.0
    for at in range(size):
        e = _new_event(a, s, s.sequence[at])
        if e == NONE:
            return False
        s.moved[at] = e
    fill_blocks(s, size)
    for at in range(size):
        _attach(a, s, s.moved[at])
    if not update_liveness(a, s):
        return False
    accept(s)
    return True


@inner
def store(s: SearchState) -> None:
    """Make the current sequence the stored one."""
    list_events(s)
    s.now.length = length(s)
    for at in range(length(s)):
        s.sequence[at] = s.event[s.moved[at]].code


@inner
def accept(s: SearchState) -> None:
    """Make the candidate the current sequence."""
    commit(s)
    # An event added and removed in the same step is free again, as are removed ones.
    for i in range(s.now.added):
        s.event[s.added[i]].is_new = False
        if not s.event[s.added[i]].is_present:
            _free_event(s, s.added[i])
    for i in range(s.now.removed):
        _free_event(s, s.removed[i])
    s.now.current_cost = s.now.candidate_cost
    _clear_changes(s)


@inner
def undo(a: Program, s: SearchState) -> None:
    """Restore the current sequence as the candidate."""
    # Detach all events that were added or moved while positions are still the candidate's.
    for i in range(s.now.added):
        e = s.added[i]
        if s.event[e].is_present:
            _detach(a, s, e)
        _free_event(s, e)
    for i in range(s.now.moved):
        if s.event[s.moved[i]].is_present:
            _detach(a, s, s.moved[i])
    # With the old positions back, link the moved and removed events again.
    restore(s)
    for i in range(s.now.moved):
        e = s.moved[i]
        if not s.event[e].is_present and not s.event[e].is_new:
            _attach(a, s, e)
    for i in range(s.now.removed):
        if not s.event[s.removed[i]].is_present:
            _attach(a, s, s.removed[i])
    update_liveness(a, s)
    # Copied, not summed, so that rounding errors do not build up.
    s.now.candidate_cost = s.now.current_cost
    _clear_changes(s)


@inlined
def finish_step(a: Program, s: SearchState, accepted: bool) -> None:
    """Accept or undo the candidate, then rebalance if a block was full."""
    if accepted:
        accept(s)
    elif s.now.changed > 0 or s.now.added > 0:
        undo(a, s)
    if s.now.is_full:
        rebalance(s)


@inlined
def _clear_changes(s: SearchState) -> None:
    s.now.added = s.now.removed = s.now.moved = 0
    for i in range(s.now.queued):
        s.tensor[s.queued[i]].is_queued = False
    s.now.queued = 0


@inlined
def _new_event(a: Program, s: SearchState, code: int) -> int:
    """Allocate an event outside the candidate; NONE if no event or access is free."""
    count = a.reads_ptr[code + 1] - a.reads_ptr[code]
    count += a.makes_ptr[code + 1] - a.makes_ptr[code]
    if s.now.free == 0 or s.now.free_accesses < count:
        return NONE
    s.now.free -= 1
    e = int(s.free[s.now.free])
    event = s.event[e]
    event.code, event.first_access = code, NONE
    event.is_present = event.is_first_run = event.is_new = False
    _clear_bytes(s, e)
    is_first = s.op[code].first_run == NONE
    if is_first:
        s.op[code].first_run, event.is_first_run = e, True
    transient = a.workspace[code]
    # Accesses are pushed to the front of the event's list: writes end up before reads.
    for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
        _new_access(s, e, a.reads[k], True)
    for k in range(a.makes_ptr[code + 1] - 1, a.makes_ptr[code] - 1, -1):
        t = a.makes[k]
        if a.outside[t] == 0:
            _new_access(s, e, t, False)
        if not is_first and (a.outside[t] == 1 or a.overwritten[t] == 1):
            transient += a.size[t]
    event.transient = transient
    return e


@inlined
def _clear_bytes(s: SearchState, e: int) -> None:
    event = s.event[e]
    event.allocated = event.freed = event.transient = event.inplace_saved = 0


@inlined
def _new_access(s: SearchState, e: int, t: int, is_read: bool) -> None:
    x = s.now.free_access
    access = s.access[x]
    s.now.free_access = access.next_of_event
    s.now.free_accesses -= 1
    access.tensor, access.is_read, access.event, access.write = t, is_read, e, NONE
    access.next_of_event = s.event[e].first_access
    s.event[e].first_access = x


@inlined
def _free_event(s: SearchState, e: int) -> None:
    """Free an event that is not in the candidate, with its accesses."""
    x = s.event[e].first_access
    while x != NONE:
        following = s.access[x].next_of_event
        s.access[x].next_of_event = s.now.free_access
        s.now.free_access = x
        s.now.free_accesses += 1
        x = following
    s.free[s.now.free] = e
    s.now.free += 1


@inlined
def _attach(a: Program, s: SearchState, e: int) -> None:
    """Add an event to the candidate, at the position it has in its block."""
    x = s.event[e].first_access
    while x != NONE:
        mark_stale(s, s.access[x].tensor)
        link_access(s, x)
        x = s.access[x].next_of_event
    s.event[e].is_present = True
    s.now.candidate_cost += a.cost[s.event[e].code]


@inlined
def _detach(a: Program, s: SearchState, e: int) -> None:
    """Remove an event's accesses and cost from the candidate."""
    x = s.event[e].first_access
    while x != NONE:
        mark_stale(s, s.access[x].tensor)
        unlink_access(a, s, x)
        x = s.access[x].next_of_event
    s.event[e].is_present = False
    s.now.candidate_cost -= a.cost[s.event[e].code]


@inner
def insert_ops(a: Program, s: SearchState, count: int, at: int) -> bool:
    """Insert the first `count` ops of `pending` before event `at`.

    Returns False if there is no room; the caller then undoes the step.
    """
    if length(s) + count > s.sequence.size:
        return False
    first = s.now.added
    for i in range(count):
        e = _new_event(a, s, s.pending[i])
        if e == NONE:
            return False
        s.added[first + i], s.event[e].is_new = e, True
        s.now.added += 1
    if not insert(s, s.added, first, count, at):
        return False
    for i in range(count):
        _attach(a, s, s.added[first + i])
    return True


@inner
def move_events(a: Program, s: SearchState, begin: int, end: int, to: int) -> bool:
    """Move the events `begin` to `end` - 1; the first of them has position `to` afterwards.

    Returns False if there is no room; they are then detached until the step is undone.
    """
    if to == begin:
        return True
    first = s.now.moved
    for _ in range(begin, end):
        e = event_at(s, begin)
        _detach(a, s, e)
        remove(s, e)
        s.moved[s.now.moved] = e
        s.now.moved += 1
    if not insert(s, s.moved, first, end - begin, to):
        return False
    for i in range(end - begin):
        _attach(a, s, s.moved[first + i])
    return True


@inner
def remove_event(a: Program, s: SearchState, e: int) -> None:
    """Remove an event from the candidate."""
    _detach(a, s, e)
    remove(s, e)
    if not s.event[e].is_new:
        s.removed[s.now.removed] = e
        s.now.removed += 1


@inner
def eliminate_dead(a: Program, s: SearchState) -> None:
    """Dead-code elimination: remove reruns and prefetch markers without a live output.

    Walks each queued tensor's accesses backwards; removals queue the tensors that they read.
    """
    while s.now.queued > 0:
        s.now.queued -= 1
        t = s.queued[s.now.queued]
        s.tensor[t].is_queued = False
        live = s.tensor[t].is_output
        x = s.tensor[t].tail
        while x != NONE:
            e, previous = s.access[x].event, s.access[x].previous
            if not s.event[e].is_present:
                pass  # its event reads and writes the tensor and was removed by this loop
            elif s.access[x].is_read:
                live = True
            elif not s.event[e].is_first_run and not (
                (live and redefines(a, s, x)) or _is_used(a, s, e)
            ):
                remove_event(a, s, e)
            elif redefines(a, s, x):
                live = False
            x = previous


@inlined
def _is_used(a: Program, s: SearchState, e: int) -> bool:
    """True if any output of an event is read before the next write, or at the end of the step."""
    x, found = s.event[e].first_access, False
    while x != NONE and not found:
        if not s.access[x].is_read and redefines(a, s, x):
            found = is_live_after(a, s, x)
        x = s.access[x].next_of_event
    return found
