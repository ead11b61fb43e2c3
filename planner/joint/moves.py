"""
The moves of the walk: events are put in, moved, or taken out where it helps.

A read may be served by what is kept, by a recompute, or by a fetch (`planner.joint.transfers`).
Events that serve nothing are collected (`planner.joint.edit`).
"""

import numpy as np

from coop_plan.planner.core.compiled import inlined, inner
from coop_plan.planner.joint.edit import close, move, put_in, take_out
from coop_plan.planner.joint.lives import next_read, transfer_of, wanted_at
from coop_plan.planner.joint.sequence import (
    AT,
    CODE,
    CURRENT,
    FETCH,
    FIRST_RUN,
    LEAVE,
    LINKED,
    NONE,
    TRIAL,
    Program,
    WalkState,
)
from coop_plan.planner.joint.transfers import fetch, retime


@inner
def change(a: Program, s: WalkState) -> bool:
    """
    Change the trial, which is the current sequence, at one of its events.

    False where the change drawn is none; the trial may have been changed in part then.
    """
    numbers, size = s.numbers, s.counts[TRIAL]
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
        return retime(a, s)
    for _ in range(numbers.tries):
        if not _is_first(s, begin):
            break
        begin = np.random.randint(size)
    if _is_first(s, begin):
        return False
    below += numbers.convert_chance
    if kind < below:
        return _convert(a, s, begin)
    if kind < below + numbers.move_chance:
        return _move(a, s, begin)
    return _take_out(a, s, begin)


@inlined
def _is_first(s: WalkState, at: int) -> bool:
    return bool(s.event[s.trial[at], FIRST_RUN] == 1)


@inlined
def _know_begins(s: WalkState) -> None:
    """The trial's events begin when the current ones do."""
    for at in range(s.counts[CURRENT] + 1 if s.counts[LINKED] == 1 else 0):
        s.trial_begins[at] = s.begins[at]


@inner
def _serve(a: Program, s: WalkState, event: int, by_link: bool) -> bool:
    """Something that an event reads is computed again, or fetched, for it."""
    op = s.event[s.trial[event], CODE]
    if op >= a.ops:
        return False
    count = a.reads_ptr[op + 1] - a.reads_ptr[op]
    if count == 0:
        return False
    t = a.reads[a.reads_ptr[op] + np.random.randint(count)]
    if by_link:
        if s.movable[t] == 0:
            return False
        _know_begins(s)
        return fetch(a, s, t, event, -1, -1)
    maker, at = a.producer[t], event
    if np.random.random() < s.numbers.early_chance:
        at -= int(s.numbers.earliest ** np.random.random())
    if s.again[maker] == 0 or at < 0 or at <= s.event[s.op[maker], AT]:
        return False
    return recompute(a, s, maker, at)


@inner
def _convert(a: Program, s: WalkState, event: int) -> bool:
    """What is computed again is fetched instead, or the other way round."""
    code, size = s.event[s.trial[event], CODE], s.counts[TRIAL]
    if code < a.ops:
        count = a.makes_ptr[code + 1] - a.makes_ptr[code]
        t = a.makes[a.makes_ptr[code] + np.random.randint(count)] if count > 0 else -1
    elif (code - a.ops) % 3 == FETCH:
        t = (code - a.ops) // 3
    else:
        return False
    if t < 0 or s.movable[t] == 0:
        return False
    read = next_read(s, t, event + 1)
    if read == size:
        return False
    maker = a.producer[t]
    if code >= a.ops and (s.again[maker] == 0 or a.evictable[t] == 0):
        return False
    take_out(a, s, s.trial[event])
    close(s)
    if code >= a.ops:
        return recompute(a, s, maker, read - 1)
    _know_begins(s)
    for at in range(event, size):
        s.trial_begins[at] = s.trial_begins[at + 1]
    return fetch(a, s, t, read - 1, -1, -1)


@inner
def _move(a: Program, s: WalkState, begin: int) -> bool:
    """Move a block of events that are no first runs."""
    size = s.counts[TRIAL]
    more = s.numbers.moved_block if np.random.random() < s.numbers.moved_block_chance else 0.0
    end = _block_end(s, begin, more)
    distance = int(s.numbers.furthest ** np.random.random())
    to = begin + (distance if np.random.random() < s.numbers.later_chance else -distance)
    if to < 0 or to > size - (end - begin):
        return False
    for at in range(begin, end):
        code = s.event[s.trial[at], CODE]
        if code < a.ops:
            first = s.event[s.op[code], AT]
            if s.again[code] == 0 or first - (end - begin if first > begin else 0) >= to:
                return False
    move(a, s, begin, end, to)
    return True


@inner
def _take_out(a: Program, s: WalkState, begin: int) -> bool:
    """Take out a block of recomputes and fetches; of a tensor's copy to the host all that is."""
    first, size = s.event[s.trial[begin], CODE], s.counts[TRIAL]
    end = _block_end(s, begin, s.numbers.removed_block)
    for at in range(begin, end):
        code = s.event[s.trial[at], CODE]
        if code < a.ops or (code - a.ops) % 3 == FETCH:
            take_out(a, s, s.trial[at])
    if first >= a.ops and (first - a.ops) % 3 != FETCH:
        copied = (first - a.ops) // 3
        for at in range(size):
            e = s.trial[at]
            if (
                e != NONE
                and s.event[e, CODE] >= a.ops
                and (s.event[e, CODE] - a.ops) // 3 == copied
            ):
                take_out(a, s, e)
    return True


@inlined
def _block_end(s: WalkState, begin: int, more: float) -> int:
    """Where a block of events that are no first runs ends; each goes on with chance `more`."""
    end = begin + 1
    while np.random.random() < more and end < s.counts[TRIAL] and not _is_first(s, end):
        end += 1
    return end


@inner
def recompute(a: Program, s: WalkState, op: int, at: int) -> bool:
    """
    Put `op` into the trial before event `at`; false where there is no room for more events.

    What it reads and is not kept there is mostly computed again or fetched with it.
    """
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
            again, there = s.again[maker] == 1, 0 <= transfer_of(s, t, LEAVE) < at
            chance = kept if wanted_at(a, s, t, at) else gone
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
    for i in range(1, count):  # fetches, then in program order
        o = s.inserted[i]
        k = i
        while k > 0 and s.inserted[k - 1] < a.ops and (o >= a.ops or s.inserted[k - 1] > o):
            s.inserted[k] = s.inserted[k - 1]
            k -= 1
        s.inserted[k] = o
    return put_in(a, s, count, at)
