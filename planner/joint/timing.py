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
    KIND,
    LAST,
    LAST_FETCH,
    LEAVE,
    LEFT,
    MOVES,
    NEXT,
    NONE,
    OVER,
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
    size, code, begins, copy = s.counts[side, EVENTS], s.code[side], s.begins[side], s.copy[side]
    head, tail = s.head[side], s.tail[side]
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
    for t in range(a.size.size):
        if s.needed[t] == 1 and tail[t] != NONE:
            copy[tail[t], LAST] = size
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
    if s.tail[side, t] == NONE:
        s.head[side, t] = x
    else:
        copy[s.tail[side, t], NEXT] = x
    s.tail[side, t] = x
    return True


@inner
def _find_latest(s: MarkState, side: int) -> None:
    """The events before which fetches begin so late that nobody waits."""
    begins, at, late = s.begins[side], s.counts[side, EVENTS] - 1, np.inf
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
    code, begins, copy, head = s.code[side], s.begins[side], s.copy[side], s.head[side]
    fetches, size = s.counts[side, FETCHES], s.counts[side, EVENTS]
    s.counts[side, TRANSFERS], s.counts[side, WORST], s.counts[side, OVER] = 0, NONE, 0
    now = out_free = in_free = total = host_total = 0.0
    live = held = host_live = 0  # bytes; held ones wait to leave and are of no use any more
    queued = left = leaving = fetching = waited = 0
    most = host_most = 0
    for e in range(size):
        c = code[e]
        if c >= a.ops:
            begins[e] = now
            continue
        needs, stays = _needs(a, s, side, e)
        while queued > 0 and out_free <= now + a.cost[c]:
            out_free = _send(s, side, e, queued, leaving, now, out_free)
            queued, leaving = queued - 1, leaving + 1
            host_live += a.size[s.leaving[leaving - 1]]
            host_most, host_total = _too_much(host_live - host, host_most, host_total)
        while left < leaving and s.leaves[left] <= now:
            gone = _leave(a, s, side, e, left)
            left, live, held = left + 1, live - gone, held - gone
        while fetching < fetches and s.latest[fetching] <= e:
            x = s.fetched[fetching]
            t, now_or_never = copy[x, TENSOR], copy[x, FIRST] == e
            wanted = live + needs + a.size[t]
            if not now_or_never and (
                s.tensor[t, LEFT] == 0 or wanted > capacity or _is_there(s, side, x, e)
            ):
                break
            # What is fetched must have left, and what is leaving may be in its way.
            while (s.tensor[t, LEFT] == 0) or (
                wanted > capacity and wanted - held <= capacity and (left < leaving or queued > 0)
            ):
                if left == leaving:
                    if queued == 0:
                        return np.inf, np.inf
                    out_free = _send(s, side, e, queued, leaving, now, out_free)
                    queued, leaving = queued - 1, leaving + 1
                    host_live += a.size[s.leaving[leaving - 1]]
                    host_most, host_total = _too_much(host_live - host, host_most, host_total)
                now = max(now, s.leaves[left])
                gone = _leave(a, s, side, e, left)
                left, live, held, wanted = left + 1, live - gone, held - gone, wanted - gone
            in_free = s.back[x] = max(now, in_free) + s.in_us[t]
            _list(s, side, e, FETCH, t)
            live += a.size[t]
            fetching += 1
        while (
            live + needs > capacity
            and live + needs - held <= capacity
            and (left < leaving or queued > 0)
        ):
            if left == leaving:
                out_free = _send(s, side, e, queued, leaving, now, out_free)
                queued, leaving = queued - 1, leaving + 1
                host_live += a.size[s.leaving[leaving - 1]]
                host_most, host_total = _too_much(host_live - host, host_most, host_total)
            now = max(now, s.leaves[left])
            gone = _leave(a, s, side, e, left)
            left, live, held = left + 1, live - gone, held - gone
        while waited < fetching and copy[s.fetched[waited], FIRST] == e:
            x = s.fetched[waited]
            t = copy[x, TENSOR]
            now = max(now, s.back[x])
            _list(s, side, e, ARRIVE, t)
            host_live -= a.size[t] if s.tensor[t, LAST_FETCH] == x else 0
            waited += 1
        begins[e] = now
        now += a.cost[c]
        if now > limit:
            return np.inf, np.inf
        if live + needs - capacity > most:
            s.counts[side, WORST], s.counts[side, OVER] = e, live + needs - capacity
        most, total = _too_much(live + needs - capacity, most, total)
        live += stays
        x = s.ending[e]
        while x != NONE:
            t = copy[x, TENSOR]
            if s.tensor[t, MOVES] == 1 and s.tensor[t, LEFT] == 0 and x == head[t]:
                held += a.size[t]
            else:
                live -= a.size[t]
            x = s.beside[x]
        for k in range(a.makes_ptr[c], a.makes_ptr[c + 1] if s.first_run[side, e] == 1 else 0):
            t = a.makes[k]
            if s.tensor[t, MOVES] == 1 and a.outside[t] == 0:
                _queue(s, queued, copy[head[t], LAST], t)
                queued += 1
    begins[size] = now
    over = _share(s, most, total, capacity)
    return now, over if host < 0 else over + _share(s, host_most, host_total, host)


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
def _too_much(over: int, most: int, total: float) -> tuple[int, float]:
    """The most bytes too many so far, and their sum."""
    return (max(most, over), total + over) if over > 0 else (most, total)


@inlined
def _share(s: MarkState, most: int, total: float, capacity: int) -> float:
    if most <= 0:
        return 0.0
    return s.numbers.least_excess + (most + s.numbers.spread * total) / max(1, capacity)


@inlined
def _list(s: MarkState, side: int, e: int, kind: int, t: int) -> None:
    row = s.transfer[side, s.counts[side, TRANSFERS]]
    row[BEFORE], row[KIND], row[WHAT] = e, kind, t
    s.counts[side, TRANSFERS] += 1


@inlined
def _leave(a: Program, s: MarkState, side: int, e: int, left: int) -> int:
    """The next tensor has left before event `e`; the bytes that are free by that."""
    t = s.leaving[left]
    s.tensor[t, LEFT] = 1
    _list(s, side, e, LEAVE, t)
    return int(a.size[t]) if s.copy[side, s.head[side, t], LAST] < e else 0


@inlined
def _is_there(s: MarkState, side: int, fetched: int, e: int) -> bool:
    """Whether the copy before a fetched one is still read at event `e` or later."""
    x = s.head[side, s.copy[side, fetched, TENSOR]]
    while s.copy[side, x, NEXT] != fetched:
        x = s.copy[side, x, NEXT]
    return bool(s.copy[side, x, LAST] >= e)


@inner
def _send(
    s: MarkState, side: int, e: int, queued: int, leaving: int, now: float, free: float
) -> float:
    """The first of the queue begins to be copied to the host; when that is over, µs."""
    t, last = s.queue[0, 1], queued - 1
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
    s.leaving[leaving] = t
    s.leaves[leaving] = max(now, free) + s.out_us[t]
    _list(s, side, e, GO, t)
    return float(s.leaves[leaving])


@inlined
def _queue(s: MarkState, queued: int, key: int, t: int) -> None:
    """A tensor waits to be copied to the host; the least key comes first."""
    at = queued
    while at > 0 and s.queue[(at - 1) >> 1, 0] > key:
        above = (at - 1) >> 1
        s.queue[at, 0], s.queue[at, 1] = s.queue[above, 0], s.queue[above, 1]
        at = above
    s.queue[at, 0], s.queue[at, 1] = key, t
