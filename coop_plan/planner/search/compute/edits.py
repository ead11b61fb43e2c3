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
from coop_plan.planner.search.compute.sequence import (
    ACCESS_KIND,
    ADDED,
    ADDED_COUNT,
    CANDIDATE_COST,
    CHANGED_COUNT,
    CODE,
    COPY,
    CURRENT_COST,
    EVENT,
    FIRST_ACCESS,
    FIRST_RUN,
    FREE,
    FREE_ACCESS,
    FREE_ACCESSES,
    FREE_COUNT,
    FULL,
    HEAD,
    IS_NEW,
    LENGTH,
    MOVED,
    MOVED_COUNT,
    NEXT_OF_EVENT,
    NONE,
    PRESENT,
    PREVIOUS,
    QUEUE,
    QUEUE_COUNT,
    QUEUED,
    READ,
    REMOVED,
    REMOVED_COUNT,
    STALE,
    STALE_COUNT,
    TAIL,
    TENSOR,
    TRANSIENT,
    WRITE,
    SearchState,
)


@inner
def load(a: Program, s: SearchState) -> bool:
    """Make the stored sequence the current one and the candidate; False if it is no schedule."""
    end, size = s.sequence.size, s.counts[LENGTH]
    # Reset: no accesses, no first runs, and all events and accesses free.
    for t in range(a.size.size):
        s.tensor[t, HEAD] = s.tensor[t, TAIL] = NONE
        s.tensor[t, STALE] = s.tensor[t, QUEUED] = 0
    for op in range(a.ops):
        s.first_run[op] = NONE
    for e in range(end):
        s.lists[FREE, e] = end - 1 - e
    accesses = s.access.shape[0]
    for x in range(accesses):
        s.access[x, NEXT_OF_EVENT] = x + 1
    s.access[accesses - 1, NEXT_OF_EVENT] = NONE
    s.counts[FREE_COUNT], s.counts[FREE_ACCESS], s.counts[FREE_ACCESSES] = end, 0, accesses
    s.counts[ADDED_COUNT] = s.counts[REMOVED_COUNT] = s.counts[MOVED_COUNT] = 0
    s.counts[STALE_COUNT] = s.counts[QUEUE_COUNT] = s.counts[CHANGED_COUNT] = 0
    s.event_bytes[end] = 0
    s.sums[CANDIDATE_COST] = 0.0
    for at in range(size):
        e = _new_event(a, s, s.sequence[at])
        if e == NONE:
            return False
        s.lists[MOVED, at] = e
    fill_blocks(s, size)
    for at in range(size):
        _attach(a, s, s.lists[MOVED, at])
    if not update_liveness(a, s):
        return False
    accept(s)
    return True


@inner
def store(s: SearchState) -> None:
    """Make the current sequence the stored one."""
    list_events(s)
    s.counts[LENGTH] = length(s)
    for at in range(length(s)):
        s.sequence[at] = s.event[s.lists[MOVED, at], CODE]


@inner
def accept(s: SearchState) -> None:
    """Make the candidate the current sequence."""
    commit(s)
    # An event added and removed in the same step is free again, as are removed ones.
    for i in range(s.counts[ADDED_COUNT]):
        s.event[s.lists[ADDED, i], IS_NEW] = 0
        if s.event[s.lists[ADDED, i], PRESENT] == 0:
            _free_event(s, s.lists[ADDED, i])
    for i in range(s.counts[REMOVED_COUNT]):
        _free_event(s, s.lists[REMOVED, i])
    s.sums[CURRENT_COST] = s.sums[CANDIDATE_COST]
    _clear_changes(s)


@inner
def undo(a: Program, s: SearchState) -> None:
    """Restore the current sequence as the candidate."""
    # Detach all events that were added or moved while positions are still the candidate's.
    for i in range(s.counts[ADDED_COUNT]):
        e = s.lists[ADDED, i]
        if s.event[e, PRESENT] == 1:
            _detach(a, s, e)
        _free_event(s, e)
    for i in range(s.counts[MOVED_COUNT]):
        if s.event[s.lists[MOVED, i], PRESENT] == 1:
            _detach(a, s, s.lists[MOVED, i])
    # With the old positions back, link the moved and removed events again.
    restore(s)
    for i in range(s.counts[MOVED_COUNT]):
        e = s.lists[MOVED, i]
        if s.event[e, PRESENT] == 0 and s.event[e, IS_NEW] == 0:
            _attach(a, s, e)
    for i in range(s.counts[REMOVED_COUNT]):
        if s.event[s.lists[REMOVED, i], PRESENT] == 0:
            _attach(a, s, s.lists[REMOVED, i])
    update_liveness(a, s)
    # Copied, not summed, so that rounding errors do not build up.
    s.sums[CANDIDATE_COST] = s.sums[CURRENT_COST]
    _clear_changes(s)


@inlined
def finish_step(a: Program, s: SearchState, accepted: bool) -> None:
    """Accept or undo the candidate, then rebalance if a block was full."""
    if accepted:
        accept(s)
    elif s.counts[CHANGED_COUNT] > 0 or s.counts[ADDED_COUNT] > 0:
        undo(a, s)
    if s.counts[FULL] == 1:
        rebalance(s)


@inlined
def _clear_changes(s: SearchState) -> None:
    s.counts[ADDED_COUNT] = s.counts[REMOVED_COUNT] = s.counts[MOVED_COUNT] = 0
    for i in range(s.counts[QUEUE_COUNT]):
        s.tensor[s.lists[QUEUE, i], QUEUED] = 0
    s.counts[QUEUE_COUNT] = 0


@inlined
def _new_event(a: Program, s: SearchState, code: int) -> int:
    """Allocate an event outside the candidate; NONE if no event or access is free."""
    count = a.reads_ptr[code + 1] - a.reads_ptr[code]
    count += a.makes_ptr[code + 1] - a.makes_ptr[code]
    if s.counts[FREE_COUNT] == 0 or s.counts[FREE_ACCESSES] < count:
        return NONE
    s.counts[FREE_COUNT] -= 1
    e = int(s.lists[FREE, s.counts[FREE_COUNT]])
    s.event[e, CODE], s.event[e, FIRST_ACCESS], s.event[e, PRESENT] = code, NONE, 0
    s.event[e, FIRST_RUN] = s.event[e, IS_NEW] = 0
    s.event_bytes[e] = 0
    is_first = s.first_run[code] == NONE
    if is_first:
        s.first_run[code], s.event[e, FIRST_RUN] = e, 1
    transient = a.workspace[code]
    # Accesses are pushed to the front of the event's list: writes end up before reads.
    for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
        _new_access(s, e, a.reads[k], READ)
    for k in range(a.makes_ptr[code + 1] - 1, a.makes_ptr[code] - 1, -1):
        t = a.makes[k]
        if a.outside[t] == 0:
            _new_access(s, e, t, WRITE)
        if not is_first and (a.outside[t] == 1 or a.overwritten[t] == 1):
            transient += a.size[t]
    s.event_bytes[e, TRANSIENT] = transient
    return e


@inlined
def _new_access(s: SearchState, e: int, t: int, kind: int) -> None:
    x = s.counts[FREE_ACCESS]
    s.counts[FREE_ACCESS] = s.access[x, NEXT_OF_EVENT]
    s.counts[FREE_ACCESSES] -= 1
    s.access[x, TENSOR], s.access[x, ACCESS_KIND], s.access[x, EVENT] = t, kind, e
    s.access[x, COPY] = NONE
    s.access[x, NEXT_OF_EVENT] = s.event[e, FIRST_ACCESS]
    s.event[e, FIRST_ACCESS] = x


@inlined
def _free_event(s: SearchState, e: int) -> None:
    """Free an event that is not in the candidate, with its accesses."""
    x = s.event[e, FIRST_ACCESS]
    while x != NONE:
        following = s.access[x, NEXT_OF_EVENT]
        s.access[x, NEXT_OF_EVENT] = s.counts[FREE_ACCESS]
        s.counts[FREE_ACCESS] = x
        s.counts[FREE_ACCESSES] += 1
        x = following
    s.lists[FREE, s.counts[FREE_COUNT]] = e
    s.counts[FREE_COUNT] += 1


@inlined
def _attach(a: Program, s: SearchState, e: int) -> None:
    """Add an event to the candidate, at the position it has in its block."""
    x = s.event[e, FIRST_ACCESS]
    while x != NONE:
        mark_stale(s, s.access[x, TENSOR])
        link_access(s, x)
        x = s.access[x, NEXT_OF_EVENT]
    s.event[e, PRESENT] = 1
    s.sums[CANDIDATE_COST] += a.cost[s.event[e, CODE]]


@inlined
def _detach(a: Program, s: SearchState, e: int) -> None:
    """Remove an event's accesses and cost from the candidate."""
    x = s.event[e, FIRST_ACCESS]
    while x != NONE:
        mark_stale(s, s.access[x, TENSOR])
        unlink_access(a, s, x)
        x = s.access[x, NEXT_OF_EVENT]
    s.event[e, PRESENT] = 0
    s.sums[CANDIDATE_COST] -= a.cost[s.event[e, CODE]]


@inner
def insert_ops(a: Program, s: SearchState, count: int, at: int) -> bool:
    """Insert the first `count` ops of `pending` before event `at`.

    Returns False if there is no room; the caller then undoes the step.
    """
    if length(s) + count > s.sequence.size:
        return False
    first = s.counts[ADDED_COUNT]
    for i in range(count):
        e = _new_event(a, s, s.pending[i])
        if e == NONE:
            return False
        s.lists[ADDED, first + i], s.event[e, IS_NEW] = e, 1
        s.counts[ADDED_COUNT] += 1
    if not insert(s, ADDED, first, count, at):
        return False
    for i in range(count):
        _attach(a, s, s.lists[ADDED, first + i])
    return True


@inner
def move_events(a: Program, s: SearchState, begin: int, end: int, to: int) -> bool:
    """Move the events `begin` to `end` - 1; the first of them has position `to` afterwards.

    Returns False if there is no room; they are then detached until the step is undone.
    """
    if to == begin:
        return True
    first = s.counts[MOVED_COUNT]
    for _ in range(begin, end):
        e = event_at(s, begin)
        _detach(a, s, e)
        remove(s, e)
        s.lists[MOVED, s.counts[MOVED_COUNT]] = e
        s.counts[MOVED_COUNT] += 1
    if not insert(s, MOVED, first, end - begin, to):
        return False
    for i in range(end - begin):
        _attach(a, s, s.lists[MOVED, first + i])
    return True


@inner
def remove_event(a: Program, s: SearchState, e: int) -> None:
    """Remove an event from the candidate."""
    _detach(a, s, e)
    remove(s, e)
    if s.event[e, IS_NEW] == 0:
        s.lists[REMOVED, s.counts[REMOVED_COUNT]] = e
        s.counts[REMOVED_COUNT] += 1


@inner
def eliminate_dead(a: Program, s: SearchState) -> None:
    """Dead-code elimination: remove reruns and prefetch markers without a live output.

    Walks each queued tensor's accesses backwards; removals queue the tensors that they read.
    """
    while s.counts[QUEUE_COUNT] > 0:
        s.counts[QUEUE_COUNT] -= 1
        t = s.lists[QUEUE, s.counts[QUEUE_COUNT]]
        s.tensor[t, QUEUED] = 0
        live = bool(s.is_output[t] == 1)
        x = s.tensor[t, TAIL]
        while x != NONE:
            e, kind, previous = s.access[x, EVENT], s.access[x, ACCESS_KIND], s.access[x, PREVIOUS]
            if s.event[e, PRESENT] == 0:
                pass  # its event reads and writes the tensor and was removed by this loop
            elif kind == READ:
                live = True
            elif s.event[e, FIRST_RUN] == 0 and not (
                (live and redefines(a, s, x)) or _is_used(a, s, e)
            ):
                remove_event(a, s, e)
            elif redefines(a, s, x):
                live = False
            x = previous


@inlined
def _is_used(a: Program, s: SearchState, e: int) -> bool:
    """True if any output of an event is read before the next write, or at the end of the step."""
    x, found = s.event[e, FIRST_ACCESS], False
    while x != NONE and not found:
        if s.access[x, ACCESS_KIND] == WRITE and redefines(a, s, x):
            found = is_live_after(a, s, x)
        x = s.access[x, NEXT_OF_EVENT]
    return found
