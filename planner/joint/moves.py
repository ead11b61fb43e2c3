"""
The moves of the walk: events are put in, moved, or taken out where it helps.

A read may be served by what is kept, by a recompute, or by a fetch (`planner.joint.transfers`).
Events that serve nothing are collected.
"""

import numpy as np

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.compiled import inlined, inner
from coop_plan.planner.joint.sequence import (
    AFTER,
    ALIVE,
    AT_LEAVE,
    FETCH,
    FIRST,
    LINKED,
    NOTHING,
    OFFLOAD,
    RAN,
    ROOM,
    SEEN,
    TRIAL,
    WANTED,
    WINDOW,
    WalkState,
)
from coop_plan.planner.joint.transfers import fetch, next_read, retime
from coop_plan.planner.joint.window import look_back, restore


@inlined
def _begin_trial(s: WalkState) -> None:
    """The trial is the window."""
    size = s.counts[WINDOW]
    for e in range(size):
        s.trial[e] = s.window[e]
    for e in range(size + 1 if s.counts[LINKED] else 0):
        s.trial_begins[e] = s.begins[e]
    s.counts[TRIAL] = size


@inner
def change(a: Arrays, s: WalkState) -> bool:
    """A trial that differs from the window; false where the one drawn is none."""
    numbers = s.numbers
    size = s.counts[WINDOW]
    if size == 0:
        return False
    kind = np.random.random()
    begin = np.random.randint(size)
    below = numbers.recompute_chance
    if kind < below:
        return _serve(a, s, begin, False)
    below += numbers.fetch_chance
    if kind < below:
        return _serve(a, s, begin, True)
    below += numbers.retime_chance
    if kind < below:
        _begin_trial(s)
        return retime(a, s)
    for _ in range(numbers.tries):
        if s.is_first[begin] == 0:
            break
        begin = np.random.randint(size)
    if s.is_first[begin] == 1:
        return False
    below += numbers.convert_chance
    if kind < below:
        return _convert(a, s, begin)
    if kind < below + numbers.move_chance:
        return _move(a, s, begin)
    return _take_out(a, s, begin)


@inner
def _serve(a: Arrays, s: WalkState, event: int, by_link: bool) -> bool:
    """Something that an event reads is computed again, or fetched, for it."""
    op = s.window[event]
    if op >= a.ops:
        return False
    count = a.reads_ptr[op + 1] - a.reads_ptr[op]
    if count == 0:
        return False
    t = a.reads[a.reads_ptr[op] + np.random.randint(count)]
    if by_link:
        if s.movable[t] == 0:
            return False
        _begin_trial(s)
        return fetch(a, s, t, event, -1, -1)
    maker, at = a.producer[t], event
    if np.random.random() < s.numbers.early_chance:
        at -= int(s.numbers.earliest ** np.random.random())
    if s.again[maker] == 0 or at < 0 or at <= s.op[FIRST, maker]:
        return False
    _begin_trial(s)
    return recompute(a, s, maker, at)


@inner
def _convert(a: Arrays, s: WalkState, event: int) -> bool:
    """What is computed again is fetched instead, or the other way round."""
    code, size = s.window[event], s.counts[WINDOW]
    if code < a.ops:
        count = a.makes_ptr[code + 1] - a.makes_ptr[code]
        t = a.makes[a.makes_ptr[code] + np.random.randint(count)] if count > 0 else -1
    elif (code - a.ops) % 3 == FETCH:
        t = (code - a.ops) // 3
    else:
        return False
    if t < 0 or s.movable[t] == 0:
        return False
    _begin_trial(s)
    read = next_read(a, s, t, event + 1)
    if read == size:
        return False
    for e in range(event, size - 1):
        s.trial[e] = s.trial[e + 1]
        s.trial_begins[e] = s.trial_begins[e + 1]
    s.trial_begins[size - 1] = s.trial_begins[size]
    s.counts[TRIAL] = size - 1
    if code < a.ops:
        return fetch(a, s, t, read - 1, -1, -1)
    maker = a.producer[t]
    if s.again[maker] == 0 or a.evictable[t] == 0:
        return False
    return recompute(a, s, maker, read - 1)


@inner
def _move(a: Arrays, s: WalkState, begin: int) -> bool:
    """Move a block of events that are no first runs."""
    size = s.counts[WINDOW]
    more = s.numbers.moved_block if np.random.random() < s.numbers.moved_block_chance else 0.0
    end = _block_end(s, begin, more)
    distance = int(s.numbers.furthest ** np.random.random())
    to = begin + (distance if np.random.random() < s.numbers.later_chance else -distance)
    if to < 0 or to > size - (end - begin):
        return False
    for e in range(begin, end):
        code = s.window[e]
        if code < a.ops:
            first = s.op[FIRST, code]
            if s.again[code] == 0 or first - (end - begin if first > begin else 0) >= to:
                return False
    filled = 0
    rest = 0
    for e in range(size + 1):
        if begin <= e < end:
            continue
        if rest == to:
            for moved in range(begin, end):
                s.trial[filled] = s.window[moved]
                filled += 1
        if e < size:
            s.trial[filled] = s.window[e]
            filled += 1
            rest += 1
    s.counts[TRIAL] = filled
    return True


@inner
def _take_out(a: Arrays, s: WalkState, begin: int) -> bool:
    """Take out a block of recomputes and fetches; of a tensor's copy to the host all that is."""
    first, size = s.window[begin], s.counts[WINDOW]
    end = _block_end(s, begin, s.numbers.removed_block)
    copied = -1
    if first >= a.ops and (first - a.ops) % 3 != FETCH:
        copied = (first - a.ops) // 3
    filled = 0
    for e in range(size):
        code = s.window[e]
        gone = begin <= e < end and (code < a.ops or (code - a.ops) % 3 == FETCH)
        if not gone and code >= a.ops:
            gone = (code - a.ops) // 3 == copied
        if not gone:
            s.trial[filled] = code
            filled += 1
    s.counts[TRIAL] = filled
    return True


@inlined
def _block_end(s: WalkState, begin: int, more: float) -> int:
    """Where a block of events that are no first runs ends; each goes on with chance `more`."""
    end = begin + 1
    while np.random.random() < more and end < s.counts[WINDOW] and s.is_first[end] == 0:
        end += 1
    return end


@inner
def recompute(a: Arrays, s: WalkState, op: int, at: int) -> bool:
    """
    Put `op` into the trial before event `at`; false where there is no room for more events.

    What it reads and is not kept there is mostly computed again or fetched with it.
    """
    size = s.counts[TRIAL]
    for e in range(size - 1, at - 1, -1):
        look_back(a, s, s.trial[e])
    n = s.numbers
    kept = n.kept_usually if np.random.random() < n.usually else n.kept_rarely
    gone = n.gone_usually if np.random.random() < n.usually else n.gone_rarely
    s.inserted[0] = op
    count = 1
    i = 0
    while i < count:
        o = s.inserted[i]
        i += 1
        if o >= a.ops:
            continue
        for k in range(a.reads_ptr[o], a.reads_ptr[o + 1]):
            t = a.reads[k]
            maker = a.producer[t]
            again, there = s.again[maker] == 1, s.tensor[AT_LEAVE, t] < at
            chance = kept if s.tensor[ALIVE, t] == 1 else gone
            if not (again or there) or count == s.inserted.size or np.random.random() >= chance:
                continue
            code = maker
            if there and not (again and np.random.random() >= n.fetched_chance):
                code = a.ops + 3 * t + FETCH
            known = False
            for other in range(count):
                known = known or s.inserted[other] == code
            if not known:
                s.inserted[count] = code
                count += 1
    for e in range(at, size):
        restore(a, s, s.trial[e])
    if size + count > s.counts[ROOM]:
        return False
    for i in range(1, count):  # fetches, then in program order
        o = s.inserted[i]
        k = i
        while k > 0 and s.inserted[k - 1] < a.ops and (o >= a.ops or s.inserted[k - 1] > o):
            s.inserted[k] = s.inserted[k - 1]
            k -= 1
        s.inserted[k] = o
    for e in range(size - 1, at - 1, -1):
        s.trial[e + count] = s.trial[e]
    for i in range(count):
        s.trial[at + i] = s.inserted[i]
    s.counts[TRIAL] = size + count
    return True


@inner
def collect(a: Arrays, s: WalkState) -> None:
    """Take events out of the trial that serve nothing."""
    size = s.counts[TRIAL]
    for e in range(size):
        code = s.trial[e]
        if code < a.ops:
            s.stay[e] = 1 - s.op[SEEN, code]
            s.op[SEEN, code] = 1
        else:
            t = (code - a.ops) // 3
            s.stay[e] = 0
            s.tensor[WANTED, t] = s.tensor[AFTER, t] != NOTHING and s.tensor[AFTER, t] != OFFLOAD
    for e in range(size - 1, -1, -1):
        code = s.trial[e]
        if code < a.ops:
            for k in range(a.makes_ptr[code], a.makes_ptr[code + 1]):
                t = a.makes[k]
                if a.evictable[t] == 1 and s.tensor[ALIVE, t] == 1:
                    s.stay[e] = 1
        else:
            t = (code - a.ops) // 3
            if (code - a.ops) % 3 == FETCH:
                s.stay[e] = s.tensor[ALIVE, t]
                s.tensor[WANTED, t] |= s.tensor[ALIVE, t]
            else:
                s.stay[e] = s.tensor[WANTED, t]
        if s.stay[e] == 1:
            look_back(a, s, code)
    filled = 0
    for e in range(size):
        code = s.trial[e]
        restore(a, s, code)
        if code < a.ops:
            s.op[SEEN, code] = s.op[RAN, code]
        if s.stay[e] == 1:
            s.trial[filled] = code
            filled += 1
    s.counts[TRIAL] = filled
