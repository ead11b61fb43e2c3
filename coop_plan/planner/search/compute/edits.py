"""Edits of the candidate: insert, move and remove events, dead-code elimination, accept and undo.

Each edit costs time in proportion to the tensors that its events access.
"""

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute import columns as c
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
from coop_plan.planner.search.compute.sequence import SearchState


@inner
def load(a: Program, s: SearchState) -> bool:
    """Make the stored sequence the current one and the candidate; False if it is no schedule."""
    end, size = s.sequence.size, s.counts[c.LENGTH]
    # Reset: no accesses, no first runs, and all events and accesses free.
    for t in range(a.size.size):
        s.tensor[t, c.HEAD] = s.tensor[t, c.TAIL] = c.NONE
        s.tensor[t, c.STALE] = s.tensor[t, c.QUEUED] = 0
    for op in range(a.ops):
        s.first_run[op] = c.NONE
    for e in range(end):
        s.lists[c.FREE, e] = end - 1 - e
    accesses = s.access.shape[0]
    for x in range(accesses):
        s.access[x, c.NEXT_OF_EVENT] = x + 1
    s.access[accesses - 1, c.NEXT_OF_EVENT] = c.NONE
    s.counts[c.FREE_COUNT], s.counts[c.FREE_ACCESS], s.counts[c.FREE_ACCESSES] = end, 0, accesses
    s.counts[c.ADDED_COUNT] = s.counts[c.REMOVED_COUNT] = s.counts[c.MOVED_COUNT] = 0
    s.counts[c.STALE_COUNT] = s.counts[c.QUEUE_COUNT] = s.counts[c.CHANGED_COUNT] = 0
    s.event_bytes[end] = 0
    s.sums[c.CANDIDATE_COST] = 0.0
    for at in range(size):
        e = _new_event(a, s, s.sequence[at])
        if e == c.NONE:
            return False
        s.lists[c.MOVED, at] = e
    fill_blocks(s, size)
    for at in range(size):
        _attach(a, s, s.lists[c.MOVED, at])
    if not update_liveness(a, s):
        return False
    accept(s)
    return True


@inner
def store(s: SearchState) -> None:
    """Make the current sequence the stored one."""
    list_events(s)
    s.counts[c.LENGTH] = length(s)
    for at in range(length(s)):
        s.sequence[at] = s.event[s.lists[c.MOVED, at], c.CODE]


@inner
def accept(s: SearchState) -> None:
    """Make the candidate the current sequence."""
    commit(s)
    # An event added and removed in the same step is free again, as are removed ones.
    for i in range(s.counts[c.ADDED_COUNT]):
        s.event[s.lists[c.ADDED, i], c.IS_NEW] = 0
        if s.event[s.lists[c.ADDED, i], c.PRESENT] == 0:
            _free_event(s, s.lists[c.ADDED, i])
    for i in range(s.counts[c.REMOVED_COUNT]):
        _free_event(s, s.lists[c.REMOVED, i])
    s.sums[c.CURRENT_COST] = s.sums[c.CANDIDATE_COST]
    _clear_changes(s)


@inner
def undo(a: Program, s: SearchState) -> None:
    """Restore the current sequence as the candidate."""
    # Detach all events that were added or moved while positions are still the candidate's.
    for i in range(s.counts[c.ADDED_COUNT]):
        e = s.lists[c.ADDED, i]
        if s.event[e, c.PRESENT] == 1:
            _detach(a, s, e)
        _free_event(s, e)
    for i in range(s.counts[c.MOVED_COUNT]):
        if s.event[s.lists[c.MOVED, i], c.PRESENT] == 1:
            _detach(a, s, s.lists[c.MOVED, i])
    # With the old positions back, link the moved and removed events again.
    restore(s)
    for i in range(s.counts[c.MOVED_COUNT]):
        e = s.lists[c.MOVED, i]
        if s.event[e, c.PRESENT] == 0 and s.event[e, c.IS_NEW] == 0:
            _attach(a, s, e)
    for i in range(s.counts[c.REMOVED_COUNT]):
        if s.event[s.lists[c.REMOVED, i], c.PRESENT] == 0:
            _attach(a, s, s.lists[c.REMOVED, i])
    update_liveness(a, s)
    # Copied, not summed, so that rounding errors do not build up.
    s.sums[c.CANDIDATE_COST] = s.sums[c.CURRENT_COST]
    _clear_changes(s)


@inlined
def finish_step(a: Program, s: SearchState, accepted: bool) -> None:
    """Accept or undo the candidate, then rebalance if a block was full."""
    if accepted:
        accept(s)
    elif s.counts[c.CHANGED_COUNT] > 0 or s.counts[c.ADDED_COUNT] > 0:
        undo(a, s)
    if s.counts[c.FULL] == 1:
        rebalance(s)


@inlined
def _clear_changes(s: SearchState) -> None:
    s.counts[c.ADDED_COUNT] = s.counts[c.REMOVED_COUNT] = s.counts[c.MOVED_COUNT] = 0
    for i in range(s.counts[c.QUEUE_COUNT]):
        s.tensor[s.lists[c.QUEUE, i], c.QUEUED] = 0
    s.counts[c.QUEUE_COUNT] = 0


@inlined
def _new_event(a: Program, s: SearchState, code: int) -> int:
    """Allocate an event outside the candidate; NONE if no event or access is free."""
    count = a.reads_ptr[code + 1] - a.reads_ptr[code]
    count += a.makes_ptr[code + 1] - a.makes_ptr[code]
    if s.counts[c.FREE_COUNT] == 0 or s.counts[c.FREE_ACCESSES] < count:
        return c.NONE
    s.counts[c.FREE_COUNT] -= 1
    e = int(s.lists[c.FREE, s.counts[c.FREE_COUNT]])
    s.event[e, c.CODE], s.event[e, c.FIRST_ACCESS], s.event[e, c.PRESENT] = code, c.NONE, 0
    s.event[e, c.FIRST_RUN] = s.event[e, c.IS_NEW] = 0
    s.event_bytes[e] = 0
    is_first = s.first_run[code] == c.NONE
    if is_first:
        s.first_run[code], s.event[e, c.FIRST_RUN] = e, 1
    transient = a.workspace[code]
    # Accesses are pushed to the front of the event's list: writes end up before reads.
    for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
        _new_access(s, e, a.reads[k], c.READ)
    for k in range(a.makes_ptr[code + 1] - 1, a.makes_ptr[code] - 1, -1):
        t = a.makes[k]
        if a.outside[t] == 0:
            _new_access(s, e, t, c.WRITE)
        if not is_first and (a.outside[t] == 1 or a.overwritten[t] == 1):
            transient += a.size[t]
    s.event_bytes[e, c.TRANSIENT] = transient
    return e


@inlined
def _new_access(s: SearchState, e: int, t: int, kind: int) -> None:
    x = s.counts[c.FREE_ACCESS]
    s.counts[c.FREE_ACCESS] = s.access[x, c.NEXT_OF_EVENT]
    s.counts[c.FREE_ACCESSES] -= 1
    s.access[x, c.TENSOR], s.access[x, c.ACCESS_KIND], s.access[x, c.EVENT] = t, kind, e
    s.access[x, c.COPY] = c.NONE
    s.access[x, c.NEXT_OF_EVENT] = s.event[e, c.FIRST_ACCESS]
    s.event[e, c.FIRST_ACCESS] = x


@inlined
def _free_event(s: SearchState, e: int) -> None:
    """Free an event that is not in the candidate, with its accesses."""
    x = s.event[e, c.FIRST_ACCESS]
    while x != c.NONE:
        following = s.access[x, c.NEXT_OF_EVENT]
        s.access[x, c.NEXT_OF_EVENT] = s.counts[c.FREE_ACCESS]
        s.counts[c.FREE_ACCESS] = x
        s.counts[c.FREE_ACCESSES] += 1
        x = following
    s.lists[c.FREE, s.counts[c.FREE_COUNT]] = e
    s.counts[c.FREE_COUNT] += 1


@inlined
def _attach(a: Program, s: SearchState, e: int) -> None:
    """Add an event to the candidate, at the position it has in its block."""
    x = s.event[e, c.FIRST_ACCESS]
    while x != c.NONE:
        mark_stale(s, s.access[x, c.TENSOR])
        link_access(s, x)
        x = s.access[x, c.NEXT_OF_EVENT]
    s.event[e, c.PRESENT] = 1
    s.sums[c.CANDIDATE_COST] += a.cost[s.event[e, c.CODE]]


@inlined
def _detach(a: Program, s: SearchState, e: int) -> None:
    """Remove an event's accesses and cost from the candidate."""
    x = s.event[e, c.FIRST_ACCESS]
    while x != c.NONE:
        mark_stale(s, s.access[x, c.TENSOR])
        unlink_access(a, s, x)
        x = s.access[x, c.NEXT_OF_EVENT]
    s.event[e, c.PRESENT] = 0
    s.sums[c.CANDIDATE_COST] -= a.cost[s.event[e, c.CODE]]


@inner
def insert_ops(a: Program, s: SearchState, count: int, at: int) -> bool:
    """Insert the first `count` ops of `pending` before event `at`.

    Returns False if there is no room; the caller then undoes the step.
    """
    if length(s) + count > s.sequence.size:
        return False
    first = s.counts[c.ADDED_COUNT]
    for i in range(count):
        e = _new_event(a, s, s.pending[i])
        if e == c.NONE:
            return False
        s.lists[c.ADDED, first + i], s.event[e, c.IS_NEW] = e, 1
        s.counts[c.ADDED_COUNT] += 1
    if not insert(s, c.ADDED, first, count, at):
        return False
    for i in range(count):
        _attach(a, s, s.lists[c.ADDED, first + i])
    return True


@inner
def move_events(a: Program, s: SearchState, begin: int, end: int, to: int) -> bool:
    """Move the events `begin` to `end` - 1; the first of them has position `to` afterwards.

    Returns False if there is no room; they are then detached until the step is undone.
    """
    if to == begin:
        return True
    first = s.counts[c.MOVED_COUNT]
    for _ in range(begin, end):
        e = event_at(s, begin)
        _detach(a, s, e)
        remove(s, e)
        s.lists[c.MOVED, s.counts[c.MOVED_COUNT]] = e
        s.counts[c.MOVED_COUNT] += 1
    if not insert(s, c.MOVED, first, end - begin, to):
        return False
    for i in range(end - begin):
        _attach(a, s, s.lists[c.MOVED, first + i])
    return True


@inner
def remove_event(a: Program, s: SearchState, e: int) -> None:
    """Remove an event from the candidate."""
    _detach(a, s, e)
    remove(s, e)
    if s.event[e, c.IS_NEW] == 0:
        s.lists[c.REMOVED, s.counts[c.REMOVED_COUNT]] = e
        s.counts[c.REMOVED_COUNT] += 1


@inner
def eliminate_dead(a: Program, s: SearchState) -> None:
    """Dead-code elimination: remove reruns and prefetch markers without a live output.

    Walks each queued tensor's accesses backwards; removals queue the tensors that they read.
    """
    while s.counts[c.QUEUE_COUNT] > 0:
        s.counts[c.QUEUE_COUNT] -= 1
        t = s.lists[c.QUEUE, s.counts[c.QUEUE_COUNT]]
        s.tensor[t, c.QUEUED] = 0
        live = bool(s.is_output[t] == 1)
        x = s.tensor[t, c.TAIL]
        while x != c.NONE:
            e, kind, previous = (
                s.access[x, c.EVENT],
                s.access[x, c.ACCESS_KIND],
                s.access[x, c.PREVIOUS],
            )
            if s.event[e, c.PRESENT] == 0:
                pass  # its event reads and writes the tensor and was removed by this loop
            elif kind == c.READ:
                live = True
            elif s.event[e, c.FIRST_RUN] == 0 and not (
                (live and redefines(a, s, x)) or _is_used(a, s, e)
            ):
                remove_event(a, s, e)
            elif redefines(a, s, x):
                live = False
            x = previous


@inlined
def _is_used(a: Program, s: SearchState, e: int) -> bool:
    """True if any output of an event is read before the next write, or at the end of the step."""
    x, found = s.event[e, c.FIRST_ACCESS], False
    while x != c.NONE and not found:
        if s.access[x, c.ACCESS_KIND] == c.WRITE and redefines(a, s, x):
            found = is_live_after(a, s, x)
        x = s.access[x, c.NEXT_OF_EVENT]
    return found
