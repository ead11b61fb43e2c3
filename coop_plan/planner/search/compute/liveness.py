"""
The lives of the copies of a tensor, from its touches: what reads and makes it, in order.

An event touches the tensors that it reads and makes. The touches of each tensor are linked in the
order of the trial, so what a change does to memory is found from the tensors it touches alone. A
touch that is its own `COPY` began one, and what that needs is counted at its `END`, until both are
found anew.
"""

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute.event_list import mark, place
from coop_plan.planner.search.compute.sequence import (
    ALONG,
    CODE,
    COPY,
    DOES,
    DOWN,
    END,
    EVENT,
    HEAD,
    LAST,
    NEXT,
    NONE,
    QUEUE,
    QUEUE_COUNT,
    QUEUED,
    READ,
    SAVED,
    STALE,
    STALE_COUNT,
    STALES,
    TAIL,
    TENSOR,
    TOUCHES,
    UP,
    WalkState,
)


@inlined
def withdraw(s: WalkState, t: int) -> None:
    """A tensor's touches will change: its copies must be found anew."""
    if s.tensor[t, QUEUED] == 0:
        s.tensor[t, QUEUED] = 1
        s.lists[QUEUE, s.counts[QUEUE_COUNT]] = t
        s.counts[QUEUE_COUNT] += 1
    if s.tensor[t, STALE] == 0:
        s.tensor[t, STALE] = 1
        s.lists[STALES, s.counts[STALE_COUNT]] = t
        s.counts[STALE_COUNT] += 1


@inlined
def _count(a: Program, s: WalkState, x: int, end: int) -> None:
    """A touch begins a copy that ends with an event."""
    e, size, before = s.touch[x, EVENT], a.size[s.touch[x, TENSOR]], s.touch[x, END]
    if s.touch[x, COPY] == x:
        if before == end:
            return
        s.bytes[before, DOWN] -= size
        mark(s, before)
    else:
        s.touch[x, COPY] = x
        s.bytes[e, UP] += size
    s.touch[x, END] = end
    s.bytes[end, DOWN] += size
    mark(s, e)
    mark(s, end)


@inlined
def _discount(a: Program, s: WalkState, x: int) -> None:
    """A touch does not begin a copy."""
    if s.touch[x, COPY] == x:
        size = a.size[s.touch[x, TENSOR]]
        s.bytes[s.touch[x, EVENT], UP] -= size
        s.bytes[s.touch[x, END], DOWN] -= size
        mark(s, s.touch[x, EVENT])
        mark(s, s.touch[x, END])
    s.touch[x, COPY] = NONE


@inner
def settle(a: Program, s: WalkState) -> bool:
    """Find the copies of what is stale; false where one is read that is not there."""
    while s.counts[STALE_COUNT] > 0:
        t = s.lists[STALES, s.counts[STALE_COUNT] - 1]
        if not _live(a, s, t):
            return False
        s.tensor[t, STALE] = 0
        s.counts[STALE_COUNT] -= 1
        x = s.tensor[t, HEAD]
        while x != NONE:
            e = s.touch[x, EVENT]
            code = s.event[e, CODE]
            if a.pairs_ptr[code] < a.pairs_ptr[code + 1]:
                saved = _saved(a, s, e, code)
                if saved != s.bytes[e, SAVED]:
                    s.bytes[e, SAVED] = saved
                    mark(s, e)
            x = s.touch[x, NEXT]
    return True


@inlined
def _live(a: Program, s: WalkState, t: int) -> bool:
    """Find out where the copies of a tensor begin and end; false where that is no schedule."""
    copy = end = NONE
    x = s.tensor[t, HEAD]
    while x != NONE:
        e = s.touch[x, EVENT]
        if s.touch[x, DOES] == READ:
            if copy == NONE:
                return False
            s.touch[x, COPY], end = copy, e
        elif copy != NONE and a.overwritten[t] == 1:
            _discount(a, s, x)  # it writes elsewhere, for this event only
        elif copy == NONE and s.event[e, CODE] >= a.ops:
            return False  # it is fetched before it is made
        else:
            if copy != NONE:
                _count(a, s, copy, end)
            copy, end = x, e
        x = s.touch[x, NEXT]
    if s.needed[t] == 1:
        if copy == NONE:
            return False
        end = s.sequence.size
    if copy != NONE:
        _count(a, s, copy, end)
    return True


@inlined
def _saved(a: Program, s: WalkState, e: int, code: int) -> int:
    """Bytes that a run needs less because an output takes the place of an input that ends."""
    saved = 0
    for k in range(a.pairs_ptr[code], a.pairs_ptr[code + 1]):
        x = s.event[e, TOUCHES]
        while x != NONE and (s.touch[x, TENSOR] != a.pairs_in[k] or s.touch[x, DOES] != READ):
            x = s.touch[x, ALONG]
        if x != NONE and s.touch[x, COPY] != NONE and s.touch[s.touch[x, COPY], END] == e:
            saved = a.size[a.pairs_out[k]]
            break
    return saved


@inlined
def link(s: WalkState, x: int) -> None:
    """Put a touch among those of its tensor, at its event's place: it reads before it makes."""
    t, at = s.touch[x, TENSOR], place(s, s.touch[x, EVENT])
    at -= s.touch[x, DOES] == READ
    last = s.tensor[t, TAIL]
    while last != NONE and place(s, s.touch[last, EVENT]) > at:
        last = s.touch[last, LAST]
    following = s.tensor[t, HEAD] if last == NONE else s.touch[last, NEXT]
    s.touch[x, LAST], s.touch[x, NEXT] = last, following
    if last == NONE:
        s.tensor[t, HEAD] = x
    else:
        s.touch[last, NEXT] = x
    if following == NONE:
        s.tensor[t, TAIL] = x
    else:
        s.touch[following, LAST] = x


@inlined
def unlink(a: Program, s: WalkState, x: int) -> None:
    """Take a touch out of those of its tensor."""
    copy = s.touch[x, COPY]
    if copy == x:
        _discount(a, s, x)
    elif copy != NONE and s.touch[copy, END] == s.touch[x, EVENT]:
        mark(s, s.touch[copy, EVENT])  # it may end in another block
    t, last, following = s.touch[x, TENSOR], s.touch[x, LAST], s.touch[x, NEXT]
    if last == NONE:
        s.tensor[t, HEAD] = following
    else:
        s.touch[last, NEXT] = following
    if following == NONE:
        s.tensor[t, TAIL] = last
    else:
        s.touch[following, LAST] = last


@inlined
def renews(a: Program, s: WalkState, x: int) -> bool:
    """Whether a touch that makes its tensor does so wherever it is, computed again or fetched."""
    return bool(a.evictable[s.touch[x, TENSOR]] == 1 or s.event[s.touch[x, EVENT], CODE] >= a.ops)


@inlined
def wanted(a: Program, s: WalkState, x: int) -> bool:
    """Whether its tensor is needed right after a touch."""
    t, y = s.touch[x, TENSOR], s.touch[x, NEXT]
    while y != NONE:
        if s.touch[y, DOES] == READ:
            return True
        if renews(a, s, y):
            return False
        y = s.touch[y, NEXT]
    return bool(s.needed[t] == 1)


@inlined
def wanted_at(a: Program, s: WalkState, t: int, at: int) -> bool:
    """Whether a tensor is needed when the trial's event `at` begins."""
    y = s.tensor[t, TAIL]
    needed = bool(s.needed[t] == 1)
    while y != NONE and place(s, s.touch[y, EVENT]) >= at:
        if s.touch[y, DOES] == READ:
            needed = True
        elif renews(a, s, y):
            needed = False
        y = s.touch[y, LAST]
    return needed


@inlined
def next_read(s: WalkState, t: int, at: int) -> int:
    """The first event of the trial from `at` on that reads a tensor; its end if none does."""
    x, found = s.tensor[t, TAIL], place(s, s.sequence.size)
    while x != NONE and place(s, s.touch[x, EVENT]) >= at:
        if s.touch[x, DOES] == READ:
            found = place(s, s.touch[x, EVENT])
        x = s.touch[x, LAST]
    return found
