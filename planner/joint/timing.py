"""
When tensors leave the device and are fetched: what a sequence with marks costs and needs.

The engines go by the rules of `planner.core.timeline`. Of the tensors that wait to be copied to the
host, the one whose last read before its fetch comes first goes as soon as the engine is free, and
leaves the device when that is over. A tensor is fetched as late as nobody waits for it, in the
order of the reads. Where memory is short, fetches come later, and compute waits for bytes that are
leaving; what is too much even so is counted. So a change of the sequence needs to say nothing of
times, and no copy is left behind by a change elsewhere.
"""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.compiled import inlined, inner
from coop_plan.planner.joint.marks import (
    ARRIVE,
    BEFORE,
    BEGIN,
    COPIES,
    EVENTS,
    FETCH,
    FETCHED,
    FETCHES,
    FIRST,
    GO,
    HELD,
    HOST_LIVE,
    HOST_MOST,
    HOST_TOTAL,
    IN_FREE,
    KIND,
    LAST,
    LAST_FETCH,
    LEAVE,
    LEAVING,
    LEFT,
    LEFT_COUNT,
    LIVE,
    MOVES,
    NEXT,
    NONE,
    NOW,
    OUT_FREE,
    OVER,
    QUEUED,
    TENSOR,
    TRANSFERS,
    WHAT,
    WORST,
    MarkState,
)


@inner
def evaluate(
    a: Program, s: MarkState, side: int, capacity: int, host: int, limit: float
) -> tuple[float, float]:
    """
    The makespan, µs, and how much more than the capacities (bytes) are needed, as shares of them.

    Infinite if the sequence is no schedule, or ends after `limit`. `host` below 0 is no limit.
    """
    if not _find_copies(a, s, side, limit):
        return np.inf, np.inf
    _find_latest(s, side)
    return _go(a, s, side, capacity, host, limit)


@inner
def _find_copies(a: Program, s: MarkState, side: int, limit: float) -> bool:
    """
    The copies of each tensor, the fetched ones in order, and when events begin if nobody waits.

    False where an event reads what is not there, or for want of room.
    """
    size, code, copy = s.counts[side, EVENTS], s.code[side], s.copy[side]
    begins, head, tail = s.begins, s.head[side], s.tail
    for t in range(a.size.size):
        head[t] = tail[t] = NONE
        s.tensor[t, MOVES] = s.tensor[t, LEFT] = 0
    s.counts[side, COPIES] = fetches = 0
    now = 0.0
    for e in range(size):
        c, begins[e] = code[e], now
        if c >= a.ops:
            if head[c - a.ops] == NONE or not _begin_copy(s, side, c - a.ops, e, 1):
                return False
            continue
        now += a.cost[c]
        for k in range(a.reads_ptr[c], a.reads_ptr[c + 1]):
            read = tail[a.reads[k]]
            if read == NONE:
                return False
            if copy[read, FIRST] == NONE:
                copy[read, FIRST] = e
                if copy[read, FETCHED] == 1:
                    s.fetched[fetches] = read
                    fetches += 1
                    s.tensor[a.reads[k], MOVES], s.tensor[a.reads[k], LAST_FETCH] = 1, read
            copy[read, LAST] = e
        for k in range(a.makes_ptr[c], a.makes_ptr[c + 1]):
            t = a.makes[k]
            # What is overwritten later is made again elsewhere, for its event alone.
            elsewhere = a.overwritten[t] == 1 and tail[t] != NONE
            if a.outside[t] == 0 and not elsewhere and not _begin_copy(s, side, t, e, 0):
                return False
    begins[size], s.counts[side, FETCHES] = now, fetches
    for e in range(size + 1):
        s.ending[e] = NONE
    for x in range(s.counts[side, COPIES]):
        s.beside[x] = s.ending[copy[x, LAST]]
        s.ending[copy[x, LAST]] = x
    return now <= limit


@inlined
def _begin_copy(s: MarkState, side: int, t: int, e: int, fetched: int) -> bool:
    x, copy = s.counts[side, COPIES], s.copy[side]
    if x == copy.shape[0]:
        return False
    s.counts[side, COPIES] = x + 1
    copy[x, TENSOR], copy[x, BEGIN], copy[x, FETCHED] = t, e, fetched
    copy[x, FIRST], copy[x, LAST], copy[x, NEXT] = NONE, e, NONE
    if s.tail[t] == NONE:
        s.head[side, t] = x
    else:
        copy[s.tail[t], NEXT] = x
    s.tail[t] = x
    return True


@inner
def _find_latest(s: MarkState, side: int) -> None:
    """The events before which fetches begin so late that nobody waits."""
    begins, at, late = s.begins, s.counts[side, EVENTS] - 1, np.inf
    for i in range(s.counts[side, FETCHES] - 1, -1, -1):
        x = s.fetched[i]
        late = min(late, begins[s.copy[side, x, FIRST]]) - s.in_us[s.copy[side, x, TENSOR]]
        while at > 0 and begins[at] > late:
            at -= 1
        s.latest[i] = at


@inner
def _go(
    a: Program, s: MarkState, side: int, capacity: int, host: int, limit: float
) -> tuple[float, float]:
    """Go through the events as the engines do; see `evaluate`."""
    code, copy, head, clock, flow = s.code[side], s.copy[side], s.head[side], s.clock, s.flow
    s.counts[side, WORST], s.counts[side, OVER] = NONE, 0
    clock[:], flow[:] = 0.0, 0
    fetching = waited = most = 0
    total = 0.0
    for e in range(s.counts[side, EVENTS]):
        c = code[e]
        if c >= a.ops:
            continue
        needs, stays = _needs(a, s, side, e)
        while flow[QUEUED] > 0 and clock[OUT_FREE] <= clock[NOW] + a.cost[c]:
            _send(a, s, e, host)
        while flow[LEFT_COUNT] < flow[LEAVING] and s.leaves[flow[LEFT_COUNT]] <= clock[NOW]:
            _leave(a, s, side, e, host)
        while fetching < s.counts[side, FETCHES] and s.latest[fetching] <= e:
            x = s.fetched[fetching]
            t = copy[x, TENSOR]
            if copy[x, FIRST] > e and (
                s.tensor[t, LEFT] == 0
                or flow[LIVE] + needs + a.size[t] > capacity
                or _still_read(s, side, x, e)
            ):
                break
            while s.tensor[t, LEFT] == 0 and _may_leave(s):
                _leave(a, s, side, e, host)
            _make_room(a, s, side, e, needs + a.size[t], capacity, host)
            clock[IN_FREE] = s.back[x] = max(clock[NOW], clock[IN_FREE]) + s.in_us[t]
            _list(s, e, FETCH, t)
            flow[LIVE] += a.size[t]
            fetching += 1
        _make_room(a, s, side, e, needs, capacity, host)
        while waited < fetching and copy[s.fetched[waited], FIRST] == e:
            x = s.fetched[waited]
            t = copy[x, TENSOR]
            clock[NOW] = max(clock[NOW], s.back[x])
            _list(s, e, ARRIVE, t)
            flow[HOST_LIVE] -= a.size[t] if s.tensor[t, LAST_FETCH] == x else 0
            waited += 1
        clock[NOW] += a.cost[c]
        if clock[NOW] > limit:
            return np.inf, np.inf
        over = flow[LIVE] + needs - capacity
        if over > 0:
            total += over
            if over > most:
                most = over
                s.counts[side, WORST], s.counts[side, OVER] = e, over
        flow[LIVE] += stays
        x = s.ending[e]
        while x != NONE:
            t = copy[x, TENSOR]
            waits = s.tensor[t, MOVES] == 1 and s.tensor[t, LEFT] == 0 and x == head[t]
            flow[HELD if waits else LIVE] += a.size[t] if waits else -a.size[t]
            x = s.beside[x]
        for k in range(a.makes_ptr[c], a.makes_ptr[c + 1] if s.first_run[side, e] == 1 else 0):
            t = a.makes[k]
            if s.tensor[t, MOVES] == 1 and a.outside[t] == 0:
                _queue(s, copy[head[t], LAST], t)
    excess = _share(s, most, total, capacity)
    if host >= 0:
        excess += _share(s, flow[HOST_MOST], clock[HOST_TOTAL], host)
    return clock[NOW], excess


@inlined
def _needs(a: Program, s: MarkState, side: int, e: int) -> tuple[int, int]:
    """Bytes that an event needs beside what is live before it, and those of them that stay."""
    c, copy = s.code[side, e], s.copy[side]
    once, stays = a.workspace[c], 0
    for k in range(a.makes_ptr[c], a.makes_ptr[c + 1]):
        t = a.makes[k]
        if s.first_run[side, e] == 0 and (a.outside[t] == 1 or a.overwritten[t] == 1):
            once += a.size[t]
        elif a.outside[t] == 0:
            stays += a.size[t]
    for k in range(a.pairs_ptr[c], a.pairs_ptr[c + 1]):  # an output in the place of an input
        t = a.pairs_in[k]
        x = s.head[side, t]
        while x != NONE and copy[x, LAST] < e:
            x = copy[x, NEXT]
        held = x == s.head[side, t] and s.tensor[t, MOVES] == 1 and s.tensor[t, LEFT] == 0
        if x != NONE and copy[x, LAST] == e and copy[x, BEGIN] < e and not held:
            once -= a.size[a.pairs_out[k]]
            break
    return stays + once, stays


@inlined
def _share(s: MarkState, most: int, total: float, capacity: int) -> float:
    if most <= 0:
        return 0.0
    return s.numbers.least_excess + (most + s.numbers.spread * total) / max(1, capacity)


@inlined
def _list(s: MarkState, e: int, kind: int, t: int) -> None:
    row = s.transfer[s.flow[TRANSFERS]]
    row[BEFORE], row[KIND], row[WHAT] = e, kind, t
    s.flow[TRANSFERS] += 1


@inlined
def _still_read(s: MarkState, side: int, fetched: int, e: int) -> bool:
    """Whether the copy before a fetched one is still read at event `e` or later."""
    x = s.head[side, s.copy[side, fetched, TENSOR]]
    while s.copy[side, x, NEXT] != fetched:
        x = s.copy[side, x, NEXT]
    return bool(s.copy[side, x, LAST] >= e)


@inlined
def _may_leave(s: MarkState) -> bool:
    """Whether any tensor is being copied to the host, or waits for it."""
    return bool(s.flow[LEFT_COUNT] < s.flow[LEAVING] or s.flow[QUEUED] > 0)


@inner
def _make_room(
    a: Program, s: MarkState, side: int, e: int, bytes_: int, capacity: int, host: int
) -> None:
    """Before event `e` wait for as many bytes to leave as are missing, if that is enough."""
    flow = s.flow
    while flow[LIVE] + bytes_ > capacity >= flow[LIVE] + bytes_ - flow[HELD] and _may_leave(s):
        _leave(a, s, side, e, host)


@inner
def _leave(a: Program, s: MarkState, side: int, e: int, host: int) -> None:
    """Before event `e` the next tensor has left: compute waits for that, if it has not yet."""
    flow = s.flow
    if flow[LEFT_COUNT] == flow[LEAVING]:
        _send(a, s, e, host)
    t = s.leaving[flow[LEFT_COUNT]]
    s.clock[NOW] = max(s.clock[NOW], s.leaves[flow[LEFT_COUNT]])
    flow[LEFT_COUNT] += 1
    s.tensor[t, LEFT] = 1
    _list(s, e, LEAVE, t)
    if s.copy[side, s.head[side, t], LAST] < e:
        flow[LIVE] -= a.size[t]
        flow[HELD] -= a.size[t]


@inner
def _send(a: Program, s: MarkState, e: int, host: int) -> None:
    """The first of the queue begins to be copied to the host."""
    flow, clock = s.flow, s.clock
    flow[QUEUED] -= 1
    t, last = s.queue[0, 1], flow[QUEUED]
    key, moved = s.queue[last, 0], s.queue[last, 1]
    at, below = 0, 1
    while below < last:
        if below + 1 < last and s.queue[below + 1, 0] < s.queue[below, 0]:
            below += 1
        if s.queue[below, 0] >= key:
            break
        s.queue[at, 0], s.queue[at, 1] = s.queue[below, 0], s.queue[below, 1]
        at, below = below, 2 * below + 1
    s.queue[at, 0], s.queue[at, 1] = key, moved
    clock[OUT_FREE] = max(clock[NOW], clock[OUT_FREE]) + s.out_us[t]
    s.leaving[flow[LEAVING]], s.leaves[flow[LEAVING]] = t, clock[OUT_FREE]
    flow[LEAVING] += 1
    _list(s, e, GO, t)
    flow[HOST_LIVE] += a.size[t]
    if flow[HOST_LIVE] > host:
        flow[HOST_MOST] = max(flow[HOST_MOST], flow[HOST_LIVE] - host)
        clock[HOST_TOTAL] += flow[HOST_LIVE] - host


@inlined
def _queue(s: MarkState, key: int, t: int) -> None:
    """A tensor waits to be copied to the host; the least key comes first."""
    at = s.flow[QUEUED]
    while at > 0 and s.queue[(at - 1) >> 1, 0] > key:
        above = (at - 1) >> 1
        s.queue[at, 0], s.queue[at, 1] = s.queue[above, 0], s.queue[above, 1]
        at = above
    s.queue[at, 0], s.queue[at, 1] = key, t
    s.flow[QUEUED] += 1
