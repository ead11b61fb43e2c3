"""
Editing the trial: events put in, taken out and moved; then accepted as current, or undone.

What a change costs follows what it touches.
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
from coop_plan.planner.search.compute.liveness import link, renews, settle, unlink, wanted, withdraw
from coop_plan.planner.search.compute.sequence import (
    ACCEPTED,
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
    FREE_COUNT,
    FREE_TOUCH,
    FREE_TOUCHES,
    FULL,
    GONE,
    GONE_COUNT,
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
    SAVED,
    STALE,
    STALE_COUNT,
    TAIL,
    TENSOR,
    TOUCHES,
    UP,
    WalkState,
)


@inner
def enter(a: Program, s: WalkState) -> bool:
    """Make the sequence the current one and the trial; false where it is no schedule."""
    room, size = s.sequence.size, s.counts[LENGTH]
    for t in range(a.size.size):
        s.tensor[t, HEAD] = s.tensor[t, TAIL] = NONE
        s.tensor[t, STALE] = s.tensor[t, QUEUED] = 0
    for op in range(a.ops):
        s.op[op] = NONE
    for e in range(room):
        s.lists[FREE, e] = room - 1 - e
    touches = s.touch.shape[0]
    for x in range(touches):
        s.touch[x, ALONG] = x + 1
    s.touch[touches - 1, ALONG] = NONE
    s.counts[FREE_COUNT], s.counts[FREE_TOUCH], s.counts[FREE_TOUCHES] = room, 0, touches
    s.counts[BORN_COUNT] = s.counts[GONE_COUNT] = s.counts[MOVED_COUNT] = 0
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
    if not settle(a, s):
        return False
    accept(s)
    return True


@inner
def leave(s: WalkState) -> None:
    """The current sequence is the one at hand."""
    listed(s)
    s.counts[LENGTH] = length(s)
    for at in range(length(s)):
        s.sequence[at] = s.event[s.lists[MOVED, at], CODE]


@inner
def accept(s: WalkState) -> None:
    """The trial becomes the current sequence."""
    keep_changes(s)
    for i in range(s.counts[BORN_COUNT]):
        s.event[s.lists[BORN, i], NEW] = 0
        if s.event[s.lists[BORN, i], PRESENT] == 0:
            _free(s, s.lists[BORN, i])
    for i in range(s.counts[GONE_COUNT]):
        _free(s, s.lists[GONE, i])
    s.sums[ACCEPTED] = s.sums[COMPUTE]
    _forget(s)


@inner
def undo(a: Program, s: WalkState) -> None:
    """The trial is the current sequence again."""
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
    for i in range(s.counts[GONE_COUNT]):
        if s.event[s.lists[GONE, i], PRESENT] == 0:
            _attach(a, s, s.lists[GONE, i])
    settle(a, s)
    s.sums[COMPUTE] = s.sums[ACCEPTED]
    _forget(s)


@inlined
def end_step(a: Program, s: WalkState, taken: bool) -> None:
    """The trial is the current sequence, as it has become or as it was, and has room again."""
    if taken:
        accept(s)
    elif s.counts[DIFFER_COUNT] > 0 or s.counts[BORN_COUNT] > 0:
        undo(a, s)
    if s.counts[FULL] == 1:
        even(s)


@inlined
def _forget(s: WalkState) -> None:
    s.counts[BORN_COUNT] = s.counts[GONE_COUNT] = s.counts[MOVED_COUNT] = 0
    for i in range(s.counts[QUEUE_COUNT]):
        s.tensor[s.lists[QUEUE, i], QUEUED] = 0
    s.counts[QUEUE_COUNT] = 0


@inlined
def _new(a: Program, s: WalkState, code: int) -> int:
    """An event that is not in the trial yet; NONE where there is no room for another one."""
    count = a.reads_ptr[code + 1] - a.reads_ptr[code]
    count += a.makes_ptr[code + 1] - a.makes_ptr[code]
    if s.counts[FREE_COUNT] == 0 or s.counts[FREE_TOUCHES] < count:
        return NONE
    s.counts[FREE_COUNT] -= 1
    e = int(s.lists[FREE, s.counts[FREE_COUNT]])
    s.event[e, CODE], s.event[e, TOUCHES], s.event[e, PRESENT] = code, NONE, 0
    s.event[e, FIRST_RUN] = s.event[e, NEW] = 0
    s.bytes[e, UP] = s.bytes[e, DOWN] = s.bytes[e, ONCE] = s.bytes[e, SAVED] = 0
    first = s.op[code] == NONE
    if first:
        s.op[code], s.event[e, FIRST_RUN] = e, 1
    once = a.workspace[code]
    # The last touch is the first one in the event's list: what it makes comes first.
    for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
        _new_touch(s, e, a.reads[k], READ)
    for k in range(a.makes_ptr[code + 1] - 1, a.makes_ptr[code] - 1, -1):
        t = a.makes[k]
        if a.outside[t] == 0:
            _new_touch(s, e, t, MAKE)
        if not first and (a.outside[t] == 1 or a.overwritten[t] == 1):
            once += a.size[t]
    s.bytes[e, ONCE] = once
    return e


@inlined
def _new_touch(s: WalkState, e: int, t: int, does: int) -> None:
    x = s.counts[FREE_TOUCH]
    s.counts[FREE_TOUCH] = s.touch[x, ALONG]
    s.counts[FREE_TOUCHES] -= 1
    s.touch[x, TENSOR], s.touch[x, DOES], s.touch[x, EVENT] = t, does, e
    s.touch[x, COPY] = NONE
    s.touch[x, ALONG] = s.event[e, TOUCHES]
    s.event[e, TOUCHES] = x


@inlined
def _free(s: WalkState, e: int) -> None:
    """An event that is not in the trial is no more."""
    x = s.event[e, TOUCHES]
    while x != NONE:
        following = s.touch[x, ALONG]
        s.touch[x, ALONG] = s.counts[FREE_TOUCH]
        s.counts[FREE_TOUCH] = x
        s.counts[FREE_TOUCHES] += 1
        x = following
    s.lists[FREE, s.counts[FREE_COUNT]] = e
    s.counts[FREE_COUNT] += 1


@inlined
def _attach(a: Program, s: WalkState, e: int) -> None:
    """An event is in the trial, at its place."""
    x = s.event[e, TOUCHES]
    while x != NONE:
        withdraw(s, s.touch[x, TENSOR])
        link(s, x)
        x = s.touch[x, ALONG]
    s.event[e, PRESENT] = 1
    s.sums[COMPUTE] += a.cost[s.event[e, CODE]]


@inlined
def _detach(a: Program, s: WalkState, e: int) -> None:
    """An event is not in the trial any more."""
    x = s.event[e, TOUCHES]
    while x != NONE:
        withdraw(s, s.touch[x, TENSOR])
        unlink(a, s, x)
        x = s.touch[x, ALONG]
    s.event[e, PRESENT] = 0
    s.sums[COMPUTE] -= a.cost[s.event[e, CODE]]


@inner
def put_in(a: Program, s: WalkState, codes: int, at: int) -> bool:
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
def move(a: Program, s: WalkState, begin: int, end: int, to: int) -> bool:
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
def take_out(a: Program, s: WalkState, e: int) -> None:
    """Take an event out."""
    _detach(a, s, e)
    remove(s, e)
    if s.event[e, NEW] == 0:
        s.lists[GONE, s.counts[GONE_COUNT]] = e
        s.counts[GONE_COUNT] += 1


@inner
def collect(a: Program, s: WalkState) -> None:
    """Take events out of the trial that serve nothing."""
    while s.counts[QUEUE_COUNT] > 0:
        s.counts[QUEUE_COUNT] -= 1
        t = s.lists[QUEUE, s.counts[QUEUE_COUNT]]
        s.tensor[t, QUEUED] = 0
        needed = bool(s.needed[t] == 1)
        x = s.tensor[t, TAIL]
        while x != NONE:
            e, does, last = s.touch[x, EVENT], s.touch[x, DOES], s.touch[x, LAST]
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
def _serves(a: Program, s: WalkState, e: int) -> bool:
    """Whether a run makes something that is needed after it, and was not kept anyway."""
    x, found = s.event[e, TOUCHES], False
    while x != NONE and not found:
        if s.touch[x, DOES] == MAKE and renews(a, s, x):
            found = wanted(a, s, x)
        x = s.touch[x, ALONG]
    return found
