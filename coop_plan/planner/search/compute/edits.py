"""
Editing the candidate: events put in, taken out and moved; then accepted as current, or undone.

What a change costs follows what it accesses.
"""

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute.event_list import (
    even,
    event_at,
    insert,
    keep_changes,
    length,
    listed,
    remove,
    spread,
    take_back,
)
from coop_plan.planner.search.compute.liveness import (
    link,
    renews,
    run_fixed_length,
    undo_access,
    unlink,
    wanted,
)
from coop_plan.planner.search.compute.sequence import (
    ACCEPTED,
    ACCESSES,
    ALONG,
    BORN,
    BORN_COUNT,
    CODE,
    COMPUTE,
    COPY,
    DIFFER_COUNT,
    DOES,
    DOWN,
    EVENT,
    FIRST_RUN,
    FREE,
    FREE_ACCESS,
    FREE_ACCESSES,
    FREE_COUNT,
    FULL,
    HEAD,
    LAST,
    LENGTH,
    MAKE,
    MOVED,
    MOVED_COUNT,
    NEW,
    NONE,
    ONCE,
    PRESENT,
    QUEUE,
    QUEUE_COUNT,
    QUEUED,
    READ,
    REMOVED,
    REMOVED_COUNT,
    SAVED,
    STALE,
    STALE_COUNT,
    TAIL,
    TENSOR,
    UP,
    SearchState,
)


@inner
def enter(a: Program, s: SearchState) -> bool:
    """Make the sequence the current one and the candidate; false where it is no schedule."""
    room, size = s.sequence.size, s.counts[LENGTH]
    for t in range(a.size.size):
        s.tensor[t, HEAD] = s.tensor[t, TAIL] = NONE
        s.tensor[t, STALE] = s.tensor[t, QUEUED] = 0
    for op in range(a.ops):
        s.op[op] = NONE
    for e in range(room):
        s.lists[FREE, e] = room - 1 - e
    accesses = s.access.shape[0]
    for x in range(accesses):
        s.access[x, ALONG] = x + 1
    s.access[accesses - 1, ALONG] = NONE
    s.counts[FREE_COUNT], s.counts[FREE_ACCESS], s.counts[FREE_ACCESSES] = room, 0, accesses
    s.counts[BORN_COUNT] = s.counts[REMOVED_COUNT] = s.counts[MOVED_COUNT] = 0
    s.counts[STALE_COUNT] = s.counts[QUEUE_COUNT] = s.counts[DIFFER_COUNT] = 0
    s.bytes[room, UP] = s.bytes[room, DOWN] = s.bytes[room, ONCE] = s.bytes[room, SAVED] = 0
    s.sums[COMPUTE] = 0.0
    for at in range(size):
        e = _new(a, s, s.sequence[at])
        if e == NONE:
            return False
        s.lists[MOVED, at] = e
    spread(s, size)
    for at in range(size):
        _attach(a, s, s.lists[MOVED, at])
    if not run_fixed_length(a, s):
        return False
    accept(s)
    return True


@inner
def leave(s: SearchState) -> None:
    """The current sequence is the one at hand."""
    listed(s)
    s.counts[LENGTH] = length(s)
    for at in range(length(s)):
        s.sequence[at] = s.event[s.lists[MOVED, at], CODE]


@inner
def accept(s: SearchState) -> None:
    """The candidate becomes the current sequence."""
    keep_changes(s)
    for i in range(s.counts[BORN_COUNT]):
        s.event[s.lists[BORN, i], NEW] = 0
        if s.event[s.lists[BORN, i], PRESENT] == 0:
            _free(s, s.lists[BORN, i])
    for i in range(s.counts[REMOVED_COUNT]):
        _free(s, s.lists[REMOVED, i])
    s.sums[ACCEPTED] = s.sums[COMPUTE]
    _forget(s)


@inner
def undo(a: Program, s: SearchState) -> None:
    """The candidate is the current sequence again."""
    for i in range(s.counts[BORN_COUNT]):
        e = s.lists[BORN, i]
        if s.event[e, PRESENT] == 1:
            _detach(a, s, e)
        _free(s, e)
    for i in range(s.counts[MOVED_COUNT]):
        if s.event[s.lists[MOVED, i], PRESENT] == 1:
            _detach(a, s, s.lists[MOVED, i])
    take_back(s)
    for i in range(s.counts[MOVED_COUNT]):
        e = s.lists[MOVED, i]
        if s.event[e, PRESENT] == 0 and s.event[e, NEW] == 0:
            _attach(a, s, e)
    for i in range(s.counts[REMOVED_COUNT]):
        if s.event[s.lists[REMOVED, i], PRESENT] == 0:
            _attach(a, s, s.lists[REMOVED, i])
    run_fixed_length(a, s)
    s.sums[COMPUTE] = s.sums[ACCEPTED]
    _forget(s)


@inlined
def end_step(a: Program, s: SearchState, taken: bool) -> None:
    """The candidate is the current sequence, as it has become or as it was, and has room again."""
    if taken:
        accept(s)
    elif s.counts[DIFFER_COUNT] > 0 or s.counts[BORN_COUNT] > 0:
        undo(a, s)
    if s.counts[FULL] == 1:
        even(s)


@inlined
def _forget(s: SearchState) -> None:
    s.counts[BORN_COUNT] = s.counts[REMOVED_COUNT] = s.counts[MOVED_COUNT] = 0
    for i in range(s.counts[QUEUE_COUNT]):
        s.tensor[s.lists[QUEUE, i], QUEUED] = 0
    s.counts[QUEUE_COUNT] = 0


@inlined
def _new(a: Program, s: SearchState, code: int) -> int:
    """An event that is not in the candidate yet; NONE where there is no room for another one."""
    count = a.reads_ptr[code + 1] - a.reads_ptr[code]
    count += a.makes_ptr[code + 1] - a.makes_ptr[code]
    if s.counts[FREE_COUNT] == 0 or s.counts[FREE_ACCESSES] < count:
        return NONE
    s.counts[FREE_COUNT] -= 1
    e = int(s.lists[FREE, s.counts[FREE_COUNT]])
    s.event[e, CODE], s.event[e, ACCESSES], s.event[e, PRESENT] = code, NONE, 0
    s.event[e, FIRST_RUN] = s.event[e, NEW] = 0
    s.bytes[e, UP] = s.bytes[e, DOWN] = s.bytes[e, ONCE] = s.bytes[e, SAVED] = 0
    first = s.op[code] == NONE
    if first:
        s.op[code], s.event[e, FIRST_RUN] = e, 1
    once = a.workspace[code]
    # The last access is the first one in the event's list: what it makes comes first.
    for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
        _new_access(s, e, a.reads[k], READ)
    for k in range(a.makes_ptr[code + 1] - 1, a.makes_ptr[code] - 1, -1):
        t = a.makes[k]
        if a.outside[t] == 0:
            _new_access(s, e, t, MAKE)
        if not first and (a.outside[t] == 1 or a.overwritten[t] == 1):
            once += a.size[t]
    s.bytes[e, ONCE] = once
    return e


@inlined
def _new_access(s: SearchState, e: int, t: int, does: int) -> None:
    x = s.counts[FREE_ACCESS]
    s.counts[FREE_ACCESS] = s.access[x, ALONG]
    s.counts[FREE_ACCESSES] -= 1
    s.access[x, TENSOR], s.access[x, DOES], s.access[x, EVENT] = t, does, e
    s.access[x, COPY] = NONE
    s.access[x, ALONG] = s.event[e, ACCESSES]
    s.event[e, ACCESSES] = x


@inlined
def _free(s: SearchState, e: int) -> None:
    """An event that is not in the candidate is no more."""
    x = s.event[e, ACCESSES]
    while x != NONE:
        following = s.access[x, ALONG]
        s.access[x, ALONG] = s.counts[FREE_ACCESS]
        s.counts[FREE_ACCESS] = x
        s.counts[FREE_ACCESSES] += 1
        x = following
    s.lists[FREE, s.counts[FREE_COUNT]] = e
    s.counts[FREE_COUNT] += 1


@inlined
def _attach(a: Program, s: SearchState, e: int) -> None:
    """An event is in the candidate, at its place."""
    x = s.event[e, ACCESSES]
    while x != NONE:
        undo_access(s, s.access[x, TENSOR])
        link(s, x)
        x = s.access[x, ALONG]
    s.event[e, PRESENT] = 1
    s.sums[COMPUTE] += a.cost[s.event[e, CODE]]


@inlined
def _detach(a: Program, s: SearchState, e: int) -> None:
    """An event is not in the candidate any more."""
    x = s.event[e, ACCESSES]
    while x != NONE:
        undo_access(s, s.access[x, TENSOR])
        unlink(a, s, x)
        x = s.access[x, ALONG]
    s.event[e, PRESENT] = 0
    s.sums[COMPUTE] -= a.cost[s.event[e, CODE]]


@inner
def put_in(a: Program, s: SearchState, codes: int, at: int) -> bool:
    """Put the first `codes` of `inserted` before event `at`; false where there is no room."""
    count = 0
    if length(s) + codes > s.sequence.size:
        return False
    for i in range(codes):
        e = _new(a, s, s.inserted[i])
        if e == NONE:
            break
        s.lists[BORN, s.counts[BORN_COUNT]], s.event[e, NEW] = e, 1
        s.counts[BORN_COUNT] += 1
        count += 1
    if count < codes:
        return False
    born = s.counts[BORN_COUNT] - codes
    if not insert(s, BORN, born, codes, at):
        return False
    for i in range(codes):
        _attach(a, s, s.lists[BORN, born + i])
    return True


@inner
def move(a: Program, s: SearchState, begin: int, end: int, to: int) -> bool:
    """
    Move the events `begin` to `end` - 1 so that the first of them is event `to` then.

    False where there is no room; they are nowhere then.
    """
    if to == begin:
        return True
    moved = s.counts[MOVED_COUNT]
    for _ in range(begin, end):
        e = event_at(s, begin)
        _detach(a, s, e)
        remove(s, e)
        s.lists[MOVED, s.counts[MOVED_COUNT]] = e
        s.counts[MOVED_COUNT] += 1
    if not insert(s, MOVED, moved, end - begin, to):
        return False
    for i in range(end - begin):
        _attach(a, s, s.lists[MOVED, moved + i])
    return True


@inner
def take_out(a: Program, s: SearchState, e: int) -> None:
    """Take an event out."""
    _detach(a, s, e)
    remove(s, e)
    if s.event[e, NEW] == 0:
        s.lists[REMOVED, s.counts[REMOVED_COUNT]] = e
        s.counts[REMOVED_COUNT] += 1


@inner
def collect(a: Program, s: SearchState) -> None:
    """Take events out of the candidate that serve nothing."""
    while s.counts[QUEUE_COUNT] > 0:
        s.counts[QUEUE_COUNT] -= 1
        t = s.lists[QUEUE, s.counts[QUEUE_COUNT]]
        s.tensor[t, QUEUED] = 0
        needed = bool(s.needed[t] == 1)
        x = s.tensor[t, TAIL]
        while x != NONE:
            e, does, last = s.access[x, EVENT], s.access[x, DOES], s.access[x, LAST]
            if s.event[e, PRESENT] == 0:
                pass  # an event that reads and makes the tensor, taken out just now
            elif does == READ:
                needed = True
            elif s.event[e, FIRST_RUN] == 0 and not (
                (needed and renews(a, s, x)) or _serves(a, s, e)
            ):
                take_out(a, s, e)
            elif renews(a, s, x):
                needed = False
            x = last


@inlined
def _serves(a: Program, s: SearchState, e: int) -> bool:
    """True if any output of this run is read before it is produced again."""
    x, found = s.event[e, ACCESSES], False
    while x != NONE and not found:
        if s.access[x, DOES] == MAKE and renews(a, s, x):
            found = wanted(a, s, x)
        x = s.access[x, ALONG]
    return found
