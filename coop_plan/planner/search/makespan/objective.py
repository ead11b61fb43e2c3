"""
Objective of a sequence with prefetch markers: makespan, memory, and the times of copies.

The engines go by the rules of `planner.core.timeline`. Of the tensors that wait to be copied to the
host, the one whose last read before its fetch comes first goes as soon as the engine is free, and
leaves the device when that is over. A tensor is fetched as late as nobody waits for it, in the
order of the reads. Where memory is short, fetches come later, and compute waits for bytes that are
leaving; what is too much even so is counted. With `AHEAD` they come later, too, where memory will
be short before the read: that costs time where the other rule costs memory. So a change of the
sequence needs to say nothing of times, and no copy is left behind by a change elsewhere.
"""

import numpy as np

from coop_plan.planner.core.arrays import Ints, Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute.event_list import place
from coop_plan.planner.search.compute.objective import cost_of
from coop_plan.planner.search.compute.sequence import (
    ACCESSES,
    ALONG,
    BLOCKS,
    CODE,
    COPY,
    DOES,
    DOWN,
    END,
    EVENT,
    EVENTS,
    HEAD,
    LAST,
    NEXT,
    NONE,
    ONCE,
    OVER,
    READ,
    SAVED,
    TENSOR,
    UP,
    WORST,
)
from coop_plan.planner.search.makespan.sequence import (
    AHEAD,
    ARRIVE,
    BEFORE,
    FETCH,
    FETCHES,
    GO,
    HELD,
    HOST_LIVE,
    HOST_MOST,
    HOST_TOTAL,
    IN_FREE,
    KIND,
    LAST_FETCH,
    LAST_READ,
    LEAVE,
    LEAVING,
    LEFT,
    LEFT_COUNT,
    LIVE,
    MADE,
    MAKES,
    MOVED_COUNT,
    MOVES,
    NEXT_MADE,
    NEXT_READ,
    NOW,
    OUT_FREE,
    QUEUED,
    READS,
    SIZE,
    TRANSFERS,
    WHAT,
    MarkerSearchState,
)


@inner
def evaluate(
    a: Program, m: MarkerSearchState, capacity: int, host: int, limit: float
) -> tuple[float, float]:
    """
    The candidate's makespan, µs, and how much more than the capacities (bytes) it needs, as shares.

    Infinite if the sequence is no schedule, or ends after `limit`. `host` below 0 is no limit.
    """
    if cost_of(a, m.orders, limit) == np.inf:
        return np.inf, np.inf
    _list_events(a, m)
    _list_moved(m)
    _find_latest(m)
    return _go(a, m, capacity, host, limit)


@inlined
def _list_events(a: Program, m: MarkerSearchState) -> None:
    """List events in order, their begins without stalls, and the markers that are read."""
    s = m.orders
    now, at, fetches = 0.0, 0, 0
    for b in range(s.counts[BLOCKS]):
        for i in range(s.block[b, EVENTS]):
            e = s.row[b, i]
            m.order[at], m.begins[at] = e, now
            at += 1
            code = s.event[e, CODE]
            if code < a.ops:
                now += a.cost[code]
                continue
            x = s.event[e, ACCESSES]
            read = s.access[x, NEXT]
            if read == NONE or s.access[read, DOES] != READ:
                continue
            first, k = place(s, s.access[read, EVENT]), fetches
            while k > 0 and m.reader[k - 1] > first:
                m.reader[k], m.fetched[k] = m.reader[k - 1], m.fetched[k - 1]
                k -= 1
            m.reader[k], m.fetched[k] = first, x
            fetches += 1
    m.begins[at] = now
    m.flow[SIZE], m.flow[FETCHES] = at, fetches


@inlined
def _list_moved(m: MarkerSearchState) -> None:
    """Copies that are offloaded, by their producing event and their last read."""
    s, flow = m.orders, m.flow
    for i in range(flow[MOVED_COUNT]):
        t = m.moved[i]
        m.first_of[m.mover[t, MADE], MAKES] = m.first_of[m.mover[t, LAST_READ], READS] = NONE
        m.mover[t, MOVES] = m.mover[t, LEFT] = 0
    flow[MOVED_COUNT] = 0
    for i in range(flow[FETCHES]):
        t = s.access[m.fetched[i], TENSOR]
        m.mover[t, LAST_FETCH] = i
        if m.mover[t, MOVES] == 1:
            continue
        x = s.tensor[t, HEAD]
        made, read = s.access[x, EVENT], s.access[x, END]
        m.mover[t, MOVES], m.mover[t, MADE], m.mover[t, LAST_READ] = 1, made, read
        m.mover[t, NEXT_MADE], m.first_of[made, MAKES] = m.first_of[made, MAKES], t
        m.mover[t, NEXT_READ], m.first_of[read, READS] = m.first_of[read, READS], t
        m.moved[flow[MOVED_COUNT]] = t
        flow[MOVED_COUNT] += 1


@inlined
def _find_latest(m: MarkerSearchState) -> None:
    """The places before which fetches begin so late that nobody waits."""
    at, late = m.flow[SIZE] - 1, np.inf
    for i in range(m.flow[FETCHES] - 1, -1, -1):
        late = min(late, m.begins[m.reader[i]]) - m.in_us[m.orders.access[m.fetched[i], TENSOR]]
        while at > 0 and m.begins[at] > late:
            at -= 1
        m.latest[i] = at


@inner
def _go(
    a: Program, m: MarkerSearchState, capacity: int, host: int, limit: float
) -> tuple[float, float]:
    """Go through the events as the engines do; see `evaluate`."""
    s, clock, flow = m.orders, m.clock, m.flow
    s.counts[WORST], s.counts[OVER] = NONE, 0
    clock[:] = 0.0
    flow[:SIZE] = 0
    fetching = waited = most = 0
    overfull = NONE
    total, end = 0.0, m.begins[flow[SIZE]]
    for at in range(flow[SIZE]):
        e = m.order[at]
        c = s.event[e, CODE]
        if c >= a.ops:
            continue
        needs = s.bytes[e, UP] + s.bytes[e, ONCE]
        if s.bytes[e, SAVED] > 0:
            needs -= s.bytes[e, SAVED] if flow[MOVED_COUNT] == 0 else _saved(a, m, e, c)
        while flow[QUEUED] > 0 and clock[OUT_FREE] <= clock[NOW] + a.cost[c]:
            _send(m, at, host, a.size)
        while flow[LEFT_COUNT] < flow[LEAVING] and m.leaves[flow[LEFT_COUNT]] <= clock[NOW]:
            _leave(m, at, host, a.size)
        while fetching < flow[FETCHES] and m.latest[fetching] <= at:
            x = m.fetched[fetching]
            t = s.access[x, TENSOR]
            if m.reader[fetching] > at:
                if at <= overfull or m.mover[t, LEFT] == 0:
                    break
                if flow[LIVE] + needs + a.size[t] > capacity:
                    break
                if place(s, s.access[s.access[x, LAST], EVENT]) >= at:
                    break
                if flow[AHEAD] == 1:
                    overfull = _last_overfull(a, m, at, m.reader[fetching], capacity - a.size[t])
                    if at <= overfull:
                        break
            while m.mover[t, LEFT] == 0 and _may_leave(m):
                _leave(m, at, host, a.size)
            _make_room(m, at, needs + a.size[t], capacity, host, a.size)
            clock[IN_FREE] = m.back[fetching] = max(clock[NOW], clock[IN_FREE]) + m.in_us[t]
            _list(m, at, FETCH, t)
            flow[LIVE] += a.size[t]
            fetching += 1
        _make_room(m, at, needs, capacity, host, a.size)
        while waited < fetching and m.reader[waited] == at:
            t = s.access[m.fetched[waited], TENSOR]
            clock[NOW] = max(clock[NOW], m.back[waited])
            _list(m, at, ARRIVE, t)
            flow[HOST_LIVE] -= a.size[t] if m.mover[t, LAST_FETCH] == waited else 0
            waited += 1
        clock[NOW] += a.cost[c]
        if clock[NOW] + (end - m.begins[at + 1]) > limit:
            return np.inf, np.inf
        over = flow[LIVE] + needs - capacity
        if over > 0:
            total += over
            if over > most:
                most = over
                s.counts[WORST], s.counts[OVER] = at, over
        flow[LIVE] += s.bytes[e, UP] - s.bytes[e, DOWN]
        t = m.first_of[e, READS]
        while t != NONE:
            if m.mover[t, LEFT] == 0:
                flow[LIVE] += a.size[t]
                flow[HELD] += a.size[t]
            t = m.mover[t, NEXT_READ]
        t = m.first_of[e, MAKES]
        while t != NONE:
            _queue(m, place(s, m.mover[t, LAST_READ]), t)
            t = m.mover[t, NEXT_MADE]
    excess = _share(m, most, total, capacity)
    if host >= 0:
        excess += _share(m, flow[HOST_MOST], clock[HOST_TOTAL], host)
    return clock[NOW], excess


@inlined
def _last_overfull(a: Program, m: MarkerSearchState, at: int, until: int, capacity: int) -> int:
    """The last of the events from one on at which too much will be live, or NONE.

    What waits to leave has left after the first of them.
    """
    s, found, live = m.orders, NONE, m.flow[LIVE]
    for k in range(at, until):
        e = m.order[k]
        if s.event[e, CODE] < a.ops:
            if live + s.bytes[e, UP] + s.bytes[e, ONCE] - s.bytes[e, SAVED] > capacity:
                found = k
            live += s.bytes[e, UP] - s.bytes[e, DOWN]
        if k == at:
            live -= m.flow[HELD]
    return found


@inlined
def _saved(a: Program, m: MarkerSearchState, e: int, code: int) -> int:
    """Bytes that a run needs less as an output takes the place of an input that does not wait."""
    s, saved = m.orders, 0
    for k in range(a.pairs_ptr[code], a.pairs_ptr[code + 1]):
        t = a.pairs_in[k]
        x = s.event[e, ACCESSES]
        while x != NONE and (s.access[x, TENSOR] != t or s.access[x, DOES] != READ):
            x = s.access[x, ALONG]
        x = s.access[x, COPY] if x != NONE else NONE
        waits = x == s.tensor[t, HEAD] and m.mover[t, MOVES] == 1 and m.mover[t, LEFT] == 0
        if x != NONE and s.access[x, END] == e and not waits:
            saved = a.size[a.pairs_out[k]]
            break
    return saved


@inlined
def _share(m: MarkerSearchState, most: int, total: float, capacity: int) -> float:
    if most <= 0:
        return 0.0
    return m.numbers.least_excess + (most + m.numbers.spread * total) / max(1, capacity)


@inlined
def _list(m: MarkerSearchState, at: int, kind: int, t: int) -> None:
    row = m.transfer[m.flow[TRANSFERS]]
    row[BEFORE], row[KIND], row[WHAT] = at, kind, t
    m.flow[TRANSFERS] += 1


@inlined
def _may_leave(m: MarkerSearchState) -> bool:
    """True if an offload is running or queued."""
    return bool(m.flow[LEFT_COUNT] < m.flow[LEAVING] or m.flow[QUEUED] > 0)


@inlined
def _make_room(
    m: MarkerSearchState, at: int, bytes_: int, capacity: int, host: int, size: Ints
) -> None:
    """Before an event wait for as many bytes to leave as are missing, if that is enough."""
    flow = m.flow
    while flow[LIVE] + bytes_ > capacity >= flow[LIVE] + bytes_ - flow[HELD] and _may_leave(m):
        _leave(m, at, host, size)


@inlined
def _leave(m: MarkerSearchState, at: int, host: int, size: Ints) -> None:
    """Before an event the next tensor has left: compute waits for that, if it has not yet."""
    flow = m.flow
    if flow[LEFT_COUNT] == flow[LEAVING]:
        _send(m, at, host, size)
    t = m.leaving[flow[LEFT_COUNT]]
    m.clock[NOW] = max(m.clock[NOW], m.leaves[flow[LEFT_COUNT]])
    flow[LEFT_COUNT] += 1
    m.mover[t, LEFT] = 1
    _list(m, at, LEAVE, t)
    if place(m.orders, m.mover[t, LAST_READ]) < at:
        flow[LIVE] -= size[t]
        flow[HELD] -= size[t]


@inlined
def _send(m: MarkerSearchState, at: int, host: int, size: Ints) -> None:
    """The first of the queue begins to be copied to the host."""
    flow, clock = m.flow, m.clock
    flow[QUEUED] -= 1
    t, last = m.queue[0, 1], flow[QUEUED]
    key, moved = m.queue[last, 0], m.queue[last, 1]
    current_sequence, below = 0, 1
    while below < last:
        if below + 1 < last and m.queue[below + 1, 0] < m.queue[below, 0]:
            below += 1
        if m.queue[below, 0] >= key:
            break
        m.queue[current_sequence, 0], m.queue[current_sequence, 1] = (
            m.queue[below, 0],
            m.queue[below, 1],
        )
        current_sequence, below = below, 2 * below + 1
    m.queue[current_sequence, 0], m.queue[current_sequence, 1] = key, moved
    clock[OUT_FREE] = max(clock[NOW], clock[OUT_FREE]) + m.out_us[t]
    m.leaving[flow[LEAVING]], m.leaves[flow[LEAVING]] = t, clock[OUT_FREE]
    flow[LEAVING] += 1
    _list(m, at, GO, t)
    flow[HOST_LIVE] += size[t]
    if flow[HOST_LIVE] > host:
        flow[HOST_MOST] = max(flow[HOST_MOST], flow[HOST_LIVE] - host)
        clock[HOST_TOTAL] += flow[HOST_LIVE] - host


@inlined
def _queue(m: MarkerSearchState, key: int, t: int) -> None:
    """A tensor waits to be copied to the host; the least key comes first."""
    at = m.flow[QUEUED]
    while at > 0 and m.queue[(at - 1) >> 1, 0] > key:
        above = (at - 1) >> 1
        m.queue[at, 0], m.queue[at, 1] = m.queue[above, 0], m.queue[above, 1]
        at = above
    m.queue[at, 0], m.queue[at, 1] = key, t
    m.flow[QUEUED] += 1
