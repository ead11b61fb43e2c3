"""
A random walk among sequences of ops, by Metropolis' rule.

Any recompute may be taken out, moved, or put in where it helps; what that does to memory is seen by
going through the sequence once. Where a change needs more than there is, something else that is
only kept there is computed again for its next read instead.

The walk takes place in a window of the sequence; all else stays as it is. What is live when the
window begins may be read in it, and what is read after its end must be there by then.
"""

import numpy as np

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.compiled import inlined, inner, njit
from coop_plan.planner.offline.sequence import (
    ALIVE,
    BEGIN,
    CHAIN,
    COPIES,
    CURRENT,
    END,
    FIRST,
    GONE,
    LEFT,
    LENGTH,
    MARGINS,
    NEEDED,
    NEEDED_COUNT,
    NEEDED_LIST,
    NEVER,
    OVER,
    POSITION,
    RAN,
    READY,
    READY_COUNT,
    READY_LIST,
    ROOM,
    SEEN,
    TENSOR,
    TRIAL,
    WINDOW,
    WORST,
    Walk,
)

REPAIRS = 8
"""How often a change is mended by another one, at most."""

LEAST = 0.002
"""What a byte too many counts at least, as a share of the capacity."""

EAGER = 0.3
"""Chance that a change that needs too much is mended although it might be accepted as it is."""

SPREAD = 0.2
"""What a byte too many costs at every event, as a share of what it costs at the fullest one."""

BLOCK, LONG_BLOCK = 0.3, 0.8
"""Chance of the next recompute to be taken out, or moved, along with one."""

FURTHEST, EARLIEST = 60.0, 40.0
"""Events by which recomputes are moved, or come before the op that needs them, at most."""


@njit
def excess(a: Arrays, w: Walk, capacity: int) -> tuple[float, float]:
    """Cost (µs) of the whole sequence, and how much more than the capacity (bytes) it needs."""
    _enter(a, w, 0, w.counts[LENGTH])
    over = _measure(a, w, capacity)
    return _cost(a, w), over


@njit
def walk(
    a: Arrays,
    w: Walk,
    low: int,
    high: int,
    steps: int,
    capacity: int,
    heat: float,
    steep: float,
    seed: int,
) -> None:
    """
    So many steps in the window of events `low` to `high` - 1.

    `heat` is by how much a step may make it worse on average (µs), `steep` what it costs (µs) to
    need e times the capacity (bytes), roughly.
    """
    np.random.seed(seed)
    _enter(a, w, low, high)
    value = _cost(a, w) + steep * _measure(a, w, capacity)
    _accept(a, w)
    for _ in range(steps):
        limit = value + heat * np.random.exponential()
        if not _change(a, w):
            continue
        eager = np.random.random() < EAGER
        for mended in range(REPAIRS + 1):
            _collect(a, w)
            cost = _cost(a, w)
            if cost > limit:
                break
            over = _measure(a, w, capacity)
            good = cost + steep * over <= limit
            if good and not (eager and over > 0.0 and mended < REPAIRS):
                value = cost + steep * over
                _accept(a, w)
                break
            if not 0.0 < over < np.inf or mended == REPAIRS or not _repair(a, w):
                break
    _leave(w, low, high)


@inner
def _enter(a: Arrays, w: Walk, low: int, high: int) -> None:
    """Make the window's events the trial, and find out what there is before and after it."""
    length = w.counts[LENGTH]
    for t in range(a.size.size):
        w.tensor[READY, t] = w.tensor[GONE, t] = 0
        w.tensor[ALIVE, t] = a.is_output[t] - a.outside[t]
    for op in range(a.ops):
        w.op[RAN, op] = 0
    for e in range(low):
        op = w.ops[e]
        w.op[RAN, op] = 1
        for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
            w.tensor[GONE if a.outside[a.makes[k]] == 1 else READY, a.makes[k]] = 1
    for e in range(length - 1, low - 1, -1):
        if e == high - 1:
            for t in range(a.size.size):
                w.tensor[NEEDED, t] = w.tensor[ALIVE, t]
        _look_back(a, w, w.ops[e])
    for op in range(a.ops):
        w.op[SEEN, op] = w.op[RAN, op]
    for e in range(low, high):
        w.op[SEEN, w.ops[e]] = 1
    w.counts[READY_COUNT] = w.counts[NEEDED_COUNT] = 0
    for t in range(a.size.size):
        if w.tensor[READY, t] == 1 and w.tensor[ALIVE, t] == 1:
            w.tensor[READY_LIST, w.counts[READY_COUNT]] = t
            w.counts[READY_COUNT] += 1
        if a.producer[t] < 0 or w.op[SEEN, a.producer[t]] == 0:
            w.tensor[NEEDED, t] = 0
        if w.tensor[NEEDED, t] == 1:
            w.tensor[NEEDED_LIST, w.counts[NEEDED_COUNT]] = t
            w.counts[NEEDED_COUNT] += 1
        # Whoever changes one of these puts it back.
        w.tensor[ALIVE, t] = w.tensor[NEEDED, t]
        w.tensor[LEFT, t] = w.tensor[GONE, t]
        w.tensor[CURRENT, t] = -1
    for op in range(a.ops):
        w.op[SEEN, op] = w.op[RAN, op]
        w.op[FIRST, op] = -1 if w.op[RAN, op] == 1 else NEVER
    w.counts[TRIAL] = high - low
    w.counts[POSITION] = w.op[RAN].sum()
    w.counts[ROOM] = w.ops.size - length + high - low
    for e in range(low, high):
        w.trial[e - low] = w.ops[e]


@inlined
def _look_back(a: Arrays, w: Walk, op: int) -> None:
    """What is needed before a run of `op`, from what is needed after it."""
    for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
        if a.evictable[a.makes[k]] == 1:
            w.tensor[ALIVE, a.makes[k]] = 0
    for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
        w.tensor[ALIVE, a.reads[k]] = 1


@inlined
def _restore(a: Arrays, w: Walk, op: int) -> None:
    """What `_look_back` changed is as it was again."""
    for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
        w.tensor[ALIVE, a.makes[k]] = w.tensor[NEEDED, a.makes[k]]
    for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
        w.tensor[ALIVE, a.reads[k]] = w.tensor[NEEDED, a.reads[k]]


@inner
def _leave(w: Walk, low: int, high: int) -> None:
    """Put the window back in its place."""
    length, size = w.counts[LENGTH], w.counts[WINDOW]
    more = size - (high - low)
    if more > 0:
        for e in range(length - 1, high - 1, -1):
            w.ops[e + more] = w.ops[e]
    else:
        for e in range(high, length):
            w.ops[e + more] = w.ops[e]
    for e in range(size):
        w.ops[low + e] = w.window[e]
    w.counts[LENGTH] = length + more


@inner
def _accept(a: Arrays, w: Walk) -> None:
    """The trial becomes the window."""
    size = w.counts[TRIAL]
    w.counts[WINDOW] = size
    for e in range(size):
        if w.op[RAN, w.trial[e]] == 0:
            w.op[FIRST, w.trial[e]] = NEVER
    for e in range(size):
        op = w.trial[e]
        w.window[e] = op
        w.is_first[e] = 1 if w.op[FIRST, op] == NEVER else 0
        if w.is_first[e] == 1:
            w.op[FIRST, op] = e


@inner
def _cost(a: Arrays, w: Walk) -> float:
    total = 0.0
    for e in range(w.counts[TRIAL]):
        total += a.cost[w.trial[e]]
    return total


@inner
def _change(a: Arrays, w: Walk) -> bool:
    """A trial that differs from the window; false where the one drawn is none."""
    size = w.counts[WINDOW]
    if size == 0:
        return False
    kind = np.random.random()
    begin = np.random.randint(size)
    if kind < 0.35:
        return _change_read(a, w, begin)
    for _ in range(50):
        if w.is_first[begin] == 0:
            break
        begin = np.random.randint(size)
    if w.is_first[begin] == 1:
        return False
    moves = kind < 0.7
    more = BLOCK
    if moves:
        more = LONG_BLOCK if np.random.random() < 0.6 else 0.0
    end = begin + 1
    while np.random.random() < more and end < size and w.is_first[end] == 0:
        end += 1
    to = size
    if moves:
        distance = int(FURTHEST ** np.random.random())
        to = begin + (distance if np.random.random() < 0.5 else -distance)
        if to < 0 or to > size - (end - begin):
            return False
        for e in range(begin, end):
            first = w.op[FIRST, w.window[e]]
            if w.again[w.window[e]] == 0 or first - (end - begin if first > begin else 0) >= to:
                return False
    filled = 0
    rest = 0
    for e in range(size + 1):
        if begin <= e < end:
            continue
        if moves and rest == to:
            for moved in range(begin, end):
                w.trial[filled] = w.window[moved]
                filled += 1
        if e < size:
            w.trial[filled] = w.window[e]
            filled += 1
            rest += 1
    w.counts[TRIAL] = filled
    return True


@inner
def _change_read(a: Arrays, w: Walk, event: int) -> bool:
    """Something that an event reads is computed again for it."""
    op = w.window[event]
    reads = a.reads_ptr[op + 1] - a.reads_ptr[op]
    if reads == 0:
        return False
    maker = a.producer[a.reads[a.reads_ptr[op] + np.random.randint(reads)]]
    at = event
    if np.random.random() < 0.5:
        at -= int(EARLIEST ** np.random.random())
    if w.again[maker] == 0 or at < 0 or at <= w.op[FIRST, maker]:
        return False
    for e in range(w.counts[WINDOW]):
        w.trial[e] = w.window[e]
    w.counts[TRIAL] = w.counts[WINDOW]
    return _insert(a, w, maker, at)


@inner
def _insert(a: Arrays, w: Walk, op: int, at: int) -> bool:
    """
    Put `op` into the trial before event `at`; false where there is no room for more events.

    What it reads is mostly computed again with it unless it is kept there anyway.
    """
    size = w.counts[TRIAL]
    for e in range(size - 1, at - 1, -1):
        _look_back(a, w, w.trial[e])
    kept = 0.0 if np.random.random() < 0.7 else 0.3
    gone = 0.9 if np.random.random() < 0.7 else 0.5
    w.chain[0] = op
    count = 1
    i = 0
    while i < count:
        o = w.chain[i]
        i += 1
        for k in range(a.reads_ptr[o], a.reads_ptr[o + 1]):
            t = a.reads[k]
            maker = a.producer[t]
            chance = kept if w.tensor[ALIVE, t] == 1 else gone
            if w.again[maker] == 0 or count == CHAIN or np.random.random() >= chance:
                continue
            known = False
            for j in range(count):
                known = known or w.chain[j] == maker
            if not known:
                w.chain[count] = maker
                count += 1
    for e in range(at, size):
        _restore(a, w, w.trial[e])
    if size + count > w.counts[ROOM]:
        return False
    for i in range(1, count):  # in program order
        o = w.chain[i]
        j = i
        while j > 0 and w.chain[j - 1] > o:
            w.chain[j] = w.chain[j - 1]
            j -= 1
        w.chain[j] = o
    for e in range(size - 1, at - 1, -1):
        w.trial[e + count] = w.trial[e]
    for i in range(count):
        w.trial[at + i] = w.chain[i]
    w.counts[TRIAL] = size + count
    return True


@inner
def _repair(a: Arrays, w: Walk) -> bool:
    """At the fullest event, something only kept there is computed again for its next read."""
    worst = w.counts[WORST]
    over = w.counts[OVER]
    now = w.trial[worst]
    best, best_score = -1, np.inf
    for c in range(w.counts[COPIES]):
        t = w.copy[TENSOR, c]
        if not w.copy[BEGIN, c] < worst < w.copy[END, c] or a.size[t] == 0:
            continue
        if w.again[a.producer[t]] == 0 or a.evictable[t] == 0:
            continue
        read = False
        for k in range(a.reads_ptr[now], a.reads_ptr[now + 1]):
            read = read or a.reads[k] == t
        for k in range(a.pairs_ptr[now], a.pairs_ptr[now + 1]):
            read = read and a.pairs_in[k] != t  # then the op overwrites it
        score = a.cost[a.producer[t]] / min(a.size[t], over) * np.random.exponential()
        if score < best_score and not read:
            best, best_score = t, score
    if best < 0:
        return False
    for e in range(worst + 1, w.counts[TRIAL]):
        op = w.trial[e]
        for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
            if a.reads[k] == best:
                return _insert(a, w, a.producer[best], e)
    return _insert(a, w, a.producer[best], w.counts[TRIAL])


@inner
def _collect(a: Arrays, w: Walk) -> None:
    """Take recomputes out of the trial of which nothing is read."""
    size = w.counts[TRIAL]
    for e in range(size):
        op = w.trial[e]
        w.stay[e] = 1 - w.op[SEEN, op]
        w.op[SEEN, op] = 1
    for e in range(size - 1, -1, -1):
        op = w.trial[e]
        for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
            t = a.makes[k]
            if a.evictable[t] == 1 and w.tensor[ALIVE, t] == 1:
                w.stay[e] = 1
        if w.stay[e] == 1:
            _look_back(a, w, op)
    for e in range(size):
        _restore(a, w, w.trial[e])
        w.op[SEEN, w.trial[e]] = w.op[RAN, w.trial[e]]
    filled = 0
    for e in range(size):
        if w.stay[e] == 1:
            w.trial[filled] = w.trial[e]
            filled += 1
    w.counts[TRIAL] = filled


@inner
def _measure(a: Arrays, w: Walk, capacity: int) -> float:
    """
    How much more than the capacity the trial needs, as a share of it; infinite if a read fails.

    Leaves its copies, the bytes live at each event, and the fullest one.
    """
    size = w.counts[TRIAL]
    w.counts[COPIES] = 0
    for i in range(w.counts[READY_COUNT]):
        _copy(w, w.tensor[READY_LIST, i], -1)
    complete = _trace(a, w)
    over = np.inf
    if complete:
        for c in range(w.counts[COPIES]):
            if w.copy[END, c] >= 0:
                w.live[max(0, w.copy[BEGIN, c])] += a.size[w.copy[TENSOR, c]]
                w.live[w.copy[END, c] + 1] -= a.size[w.copy[TENSOR, c]]
        over = _sum_up(a, w, capacity)
    for e in range(size):
        op = w.trial[e]
        w.op[SEEN, op] = w.op[RAN, op]
        for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
            w.tensor[LEFT, a.makes[k]] = w.tensor[GONE, a.makes[k]]
    for c in range(w.counts[COPIES]):
        w.tensor[CURRENT, w.copy[TENSOR, c]] = -1
    return over


@inner
def _trace(a: Arrays, w: Walk) -> bool:
    """Find the copies, and what is live for one event only; false if something is not there."""
    size = w.counts[TRIAL]
    for e in range(size + 2):
        w.live[e] = 0
    for e in range(size):
        op = w.trial[e]
        once = a.workspace[op]
        for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
            if w.tensor[CURRENT, a.reads[k]] < 0:
                return False
            w.copy[END, w.tensor[CURRENT, a.reads[k]]] = e
        for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
            t = a.makes[k]
            if a.outside[t] == 1 and w.tensor[LEFT, t] == 0:
                w.tensor[LEFT, t] = 1
            elif a.outside[t] == 1 or (w.tensor[CURRENT, t] >= 0 and a.evictable[t] == 0):
                once += a.size[t]
            else:
                _copy(w, t, e)
        w.live[e] += once
        w.live[e + 1] -= once
    for i in range(w.counts[NEEDED_COUNT]):
        c = w.tensor[CURRENT, w.tensor[NEEDED_LIST, i]]
        if c < 0:
            return False
        w.copy[END, c] = size
    return True


@inlined
def _margin(w: Walk, position: int, op: int) -> int:
    """Bytes to leave free while the op runs for this position."""
    margin = 0
    for i in range(w.counts[MARGINS]):
        if w.margin[0, i] == position and w.margin[1, i] == op:
            margin = w.margin[2, i]
    return margin


@inlined
def _copy(w: Walk, t: int, event: int) -> None:
    copy = w.counts[COPIES]
    w.counts[COPIES] += 1
    w.tensor[CURRENT, t] = copy
    w.copy[TENSOR, copy] = t
    w.copy[BEGIN, copy] = w.copy[END, copy] = event


@inner
def _sum_up(a: Arrays, w: Walk, capacity: int) -> float:
    """Changes of what is live become what is live, in-place pairs sharing; the excess."""
    ready = w.counts[READY_COUNT]
    for c in range(w.counts[COPIES]):
        w.tensor[CURRENT, w.copy[TENSOR, c]] = -1
    for c in range(ready):
        w.tensor[CURRENT, w.copy[TENSOR, c]] = c
    position = w.counts[POSITION]
    live = 0
    most = -1
    total = 0.0
    c = ready
    for e in range(w.counts[TRIAL]):
        op = w.trial[e]
        live += w.live[e]
        here = live
        for k in range(a.pairs_ptr[op], a.pairs_ptr[op + 1]):
            out, source = w.tensor[CURRENT, a.pairs_out[k]], w.tensor[CURRENT, a.pairs_in[k]]
            free = out < 0 or (a.evictable[a.pairs_out[k]] == 1 and w.copy[END, out] < e)
            free = free and a.outside[a.pairs_out[k]] == 0
            if free and source >= 0 and w.copy[END, source] == e:
                here -= a.size[a.pairs_out[k]]
                break
        while c < w.counts[COPIES] and w.copy[BEGIN, c] == e:
            w.tensor[CURRENT, w.copy[TENSOR, c]] = c
            c += 1
        w.live[e] = here
        over = here - capacity
        if w.tight[position] == 1:
            over += _margin(w, position, op)
        if w.op[SEEN, op] == 0:
            w.op[SEEN, op] = 1
            position += 1
        if over > 0:
            total += over
            if over > most:
                most = over
                w.counts[WORST] = e
                w.counts[OVER] = over
    if most < 0:
        return 0.0
    return LEAST + (most + SPREAD * total) / max(1, capacity)
