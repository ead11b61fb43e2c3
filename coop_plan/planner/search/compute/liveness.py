"""
The lives of the copies of a tensor, from its accesses: what reads and makes it, in order.

An event accesses the tensors that it reads and makes. The accesses of each tensor are linked in the
order of the candidate, so what a change does to memory is found from the tensors it accesses alone.
A access that is its own `COPY` began one, and what that needs is counted at its `END`, until both
are found anew.
"""

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute.event_list import mark, place
from coop_plan.planner.search.compute.sequence import (
    ACCESSES,
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
    UP,
    SearchState,
)


@inlined
def undo_access(s: SearchState, t: int) -> None:
    """A tensor's accesses will change: its copies must be found anew."""
    if s.tensor[t, QUEUED] == 0:
        s.tensor[t, QUEUED] = 1
        s.lists[QUEUE, s.counts[QUEUE_COUNT]] = t
        s.counts[QUEUE_COUNT] += 1
    if s.tensor[t, STALE] == 0:
        s.tensor[t, STALE] = 1
        s.lists[STALES, s.counts[STALE_COUNT]] = t
        s.counts[STALE_COUNT] += 1


@inlined
def _count(a: Program, s: SearchState, x: int, end: int) -> None:
    """A access begins a copy that ends with an event."""
    e, size, before = s.access[x, EVENT], a.size[s.access[x, TENSOR]], s.access[x, END]
    if s.access[x, COPY] == x:
        if before == end:
            return
        s.bytes[before, DOWN] -= size
        mark(s, before)
    else:
        s.access[x, COPY] = x
        s.bytes[e, UP] += size
    s.access[x, END] = end
    s.bytes[end, DOWN] += size
    mark(s, e)
    mark(s, end)


@inlined
def _discount(a: Program, s: SearchState, x: int) -> None:
    """A access does not begin a copy."""
    if s.access[x, COPY] == x:
        size = a.size[s.access[x, TENSOR]]
        s.bytes[s.access[x, EVENT], UP] -= size
        s.bytes[s.access[x, END], DOWN] -= size
        mark(s, s.access[x, EVENT])
        mark(s, s.access[x, END])
    s.access[x, COPY] = NONE


@inner
def run_fixed_length(a: Program, s: SearchState) -> bool:
    """Find the copies of what is stale; false where one is read that is not there."""
    while s.counts[STALE_COUNT] > 0:
        t = s.lists[STALES, s.counts[STALE_COUNT] - 1]
        if not _live(a, s, t):
            return False
        s.tensor[t, STALE] = 0
        s.counts[STALE_COUNT] -= 1
        x = s.tensor[t, HEAD]
        while x != NONE:
            e = s.access[x, EVENT]
            code = s.event[e, CODE]
            if a.pairs_ptr[code] < a.pairs_ptr[code + 1]:
                saved = _saved(a, s, e, code)
                if saved != s.bytes[e, SAVED]:
                    s.bytes[e, SAVED] = saved
                    mark(s, e)
            x = s.access[x, NEXT]
    return True


@inlined
def _live(a: Program, s: SearchState, t: int) -> bool:
    """Find out where the copies of a tensor begin and end; false where that is no schedule."""
    copy = end = NONE
    x = s.tensor[t, HEAD]
    while x != NONE:
        e = s.access[x, EVENT]
        if s.access[x, DOES] == READ:
            if copy == NONE:
                return False
            s.access[x, COPY], end = copy, e
        elif copy != NONE and a.overwritten[t] == 1:
            _discount(a, s, x)  # it writes elsewhere, for this event only
        elif copy == NONE and s.event[e, CODE] >= a.ops:
            return False  # it is fetched before it is made
        else:
            if copy != NONE:
                _count(a, s, copy, end)
            copy, end = x, e
        x = s.access[x, NEXT]
    if s.needed[t] == 1:
        if copy == NONE:
            return False
        end = s.sequence.size
    if copy != NONE:
        _count(a, s, copy, end)
    return True


@inlined
def _saved(a: Program, s: SearchState, e: int, code: int) -> int:
    """Bytes that a run needs less because an output takes the place of an input that ends."""
    saved = 0
    for k in range(a.pairs_ptr[code], a.pairs_ptr[code + 1]):
        x = s.event[e, ACCESSES]
        while x != NONE and (s.access[x, TENSOR] != a.pairs_in[k] or s.access[x, DOES] != READ):
            x = s.access[x, ALONG]
        if x != NONE and s.access[x, COPY] != NONE and s.access[s.access[x, COPY], END] == e:
            saved = a.size[a.pairs_out[k]]
            break
    return saved


@inlined
def link(s: SearchState, x: int) -> None:
    """Put a access among those of its tensor, at its event's place: it reads before it makes."""
    t, at = s.access[x, TENSOR], place(s, s.access[x, EVENT])
    at -= s.access[x, DOES] == READ
    last = s.tensor[t, TAIL]
    while last != NONE and place(s, s.access[last, EVENT]) > at:
        last = s.access[last, LAST]
    following = s.tensor[t, HEAD] if last == NONE else s.access[last, NEXT]
    s.access[x, LAST], s.access[x, NEXT] = last, following
    if last == NONE:
        s.tensor[t, HEAD] = x
    else:
        s.access[last, NEXT] = x
    if following == NONE:
        s.tensor[t, TAIL] = x
    else:
        s.access[following, LAST] = x


@inlined
def unlink(a: Program, s: SearchState, x: int) -> None:
    """Take a access out of those of its tensor."""
    copy = s.access[x, COPY]
    if copy == x:
        _discount(a, s, x)
    elif copy != NONE and s.access[copy, END] == s.access[x, EVENT]:
        mark(s, s.access[copy, EVENT])  # it may end in another block
    t, last, following = s.access[x, TENSOR], s.access[x, LAST], s.access[x, NEXT]
    if last == NONE:
        s.tensor[t, HEAD] = following
    else:
        s.access[last, NEXT] = following
    if following == NONE:
        s.tensor[t, TAIL] = last
    else:
        s.access[following, LAST] = last


@inlined
def renews(a: Program, s: SearchState, x: int) -> bool:
    """True if a producing access may move: a recompute or a prefetch."""
    return bool(a.evictable[s.access[x, TENSOR]] == 1 or s.event[s.access[x, EVENT], CODE] >= a.ops)


@inlined
def wanted(a: Program, s: SearchState, x: int) -> bool:
    """True if the tensor is read after an access, before it is produced again."""
    t, y = s.access[x, TENSOR], s.access[x, NEXT]
    while y != NONE:
        if s.access[y, DOES] == READ:
            return True
        if renews(a, s, y):
            return False
        y = s.access[y, NEXT]
    return bool(s.needed[t] == 1)


@inlined
def wanted_at(a: Program, s: SearchState, t: int, at: int) -> bool:
    """True if a tensor is live at the candidate's event `at`."""
    y = s.tensor[t, TAIL]
    needed = bool(s.needed[t] == 1)
    while y != NONE and place(s, s.access[y, EVENT]) >= at:
        if s.access[y, DOES] == READ:
            needed = True
        elif renews(a, s, y):
            needed = False
        y = s.access[y, LAST]
    return needed


@inlined
def next_read(s: SearchState, t: int, at: int) -> int:
    """The first event of the candidate from `at` on that reads a tensor; its end if none does."""
    x, found = s.tensor[t, TAIL], place(s, s.sequence.size)
    while x != NONE and place(s, s.access[x, EVENT]) >= at:
        if s.access[x, DOES] == READ:
            found = place(s, s.access[x, EVENT])
        x = s.access[x, LAST]
    return found
