"""
The moves of the walk: runs and marks are put in, moved, changed into each other, or taken out.

A read may be served by what is kept, by a recompute, or by a fetch.
"""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.compiled import inlined, inner
from coop_plan.planner.joint.marks import BEGIN, EVENTS, LAST, NEXT, NONE, MarkState


@inner
def change(a: Program, s: MarkState, current: int, trial: int) -> bool:
    """
    Make the trial the current sequence with a change at one of its events.

    False where the change drawn is none; the trial may be no sequence then.
    """
    size, n = s.counts[current, EVENTS], s.numbers
    if size == 0:
        return False
    for e in range(size):
        s.code[trial, e] = s.code[current, e]
    s.counts[trial, EVENTS] = size
    kind, e = np.random.random(), np.random.randint(size)
    if kind < n.recompute_chance + n.fetch_chance:
        return _serve(a, s, current, trial, e, kind >= n.recompute_chance)
    for _ in range(n.tries):
        if s.first_run[current, e] == 0:
            break
        e = np.random.randint(size)
    if s.first_run[current, e] == 1:
        return False
    kind -= n.recompute_chance + n.fetch_chance
    if kind < n.convert_chance:
        return _convert(a, s, current, trial, e)
    if kind < n.convert_chance + n.move_chance:
        return _move(s, current, trial, e)
    end = _block_end(s, current, e, n.removed_block)
    for at in range(end, size):
        s.code[trial, at - (end - e)] = s.code[trial, at]
    s.counts[trial, EVENTS] = size - (end - e)
    return True


@inner
def _serve(a: Program, s: MarkState, current: int, trial: int, e: int, by_link: bool) -> bool:
    """Something that an event reads is computed again, or fetched, for it."""
    op = s.code[trial, e]
    if op >= a.ops or a.reads_ptr[op] == a.reads_ptr[op + 1]:
        return False
    t = a.reads[np.random.randint(a.reads_ptr[op], a.reads_ptr[op + 1])]
    maker, at = a.producer[t], e
    if by_link:
        if s.movable[t] == 0 or s.op[current, maker] >= e - 1:
            return False
        s.inserted[0] = a.ops + t
        return put_in(s, trial, 1, e)
    if np.random.random() < s.numbers.early_chance:
        at -= int(s.numbers.earliest ** np.random.random())
    if s.again[maker] == 0 or at < 0 or at <= s.op[current, maker]:
        return False
    return recompute(a, s, current, trial, maker, at)


@inner
def _convert(a: Program, s: MarkState, current: int, trial: int, e: int) -> bool:
    """What is computed again is fetched instead, or the other way round."""
    code, c, size = s.code[trial], s.code[trial, e], s.counts[trial, EVENTS]
    if c >= a.ops:
        t = c - a.ops
    elif a.makes_ptr[c] < a.makes_ptr[c + 1]:
        t = a.makes[np.random.randint(a.makes_ptr[c], a.makes_ptr[c + 1])]
    else:
        return False
    read = next_read(a, s, trial, t, e + 1)
    maker = a.producer[t]
    if read == size or s.movable[t] == 0:
        return False
    for at in range(e, read - 1):
        code[at] = code[at + 1]
    if c < a.ops:
        code[read - 1] = a.ops + t
        return True
    if s.again[maker] == 0 or a.evictable[t] == 0:
        return False
    for at in range(read - 1, size - 1):
        code[at] = code[at + 1]
    s.counts[trial, EVENTS] = size - 1
    return recompute(a, s, current, trial, maker, read - 1)


@inner
def _move(s: MarkState, current: int, trial: int, e: int) -> bool:
    """Move a block of events that are no first runs, none before its op's first run."""
    n, size = s.numbers, s.counts[current, EVENTS]
    more = n.moved_block if np.random.random() < n.moved_block_chance else 0.0
    count = _block_end(s, current, e, more) - e
    distance = int(n.furthest ** np.random.random())
    to = e + (distance if np.random.random() < n.later_chance else -distance)
    if to < 0 or to > size - count:
        return False
    for at in range(e, e + count):
        op = s.code[current, at]
        if op < s.op.shape[1] and (s.again[op] == 0 or s.op[current, op] >= to):
            return False
    for at in range(to, e):
        s.code[trial, at + count] = s.code[current, at]
    for at in range(e + count, to + count):
        s.code[trial, at - count] = s.code[current, at]
    for i in range(count):
        s.code[trial, to + i] = s.code[current, e + i]
    return True


@inlined
def _block_end(s: MarkState, side: int, begin: int, more: float) -> int:
    """Where a block of events that are no first runs ends; each goes on with chance `more`."""
    end = begin + 1
    while (
        np.random.random() < more and end < s.counts[side, EVENTS] and s.first_run[side, end] == 0
    ):
        end += 1
    return end


@inner
def recompute(a: Program, s: MarkState, known: int, side: int, op: int, at: int) -> bool:
    """
    Put `op` in before event `at`; false where there is no room for more events.

    What it reads and is not kept there is mostly computed again or fetched with it. `known` is the
    side whose copies tell what is kept: those of its events that come before the change.
    """
    n = s.numbers
    kept = n.kept_usually if np.random.random() < n.usually else n.kept_rarely
    gone = n.gone_usually if np.random.random() < n.usually else n.gone_rarely
    s.inserted[0] = op
    count, i = 1, 0
    while i < count:
        o = s.inserted[i]
        i += 1
        if o >= a.ops:
            continue
        for k in range(a.reads_ptr[o], a.reads_ptr[o + 1]):
            t = a.reads[k]
            maker = a.producer[t]
            again, moves = s.again[maker] == 1 and a.evictable[t] == 1, s.movable[t] == 1
            chance = kept if _is_there(s, known, t, at) else gone
            if not (again or moves) or count == s.inserted.size or np.random.random() >= chance:
                continue
            code = maker
            if moves and not (again and np.random.random() >= n.fetched_chance):
                code = a.ops + t
            new = True
            for other in range(count):
                new = new and s.inserted[other] != code
            if new:
                s.inserted[count] = code
                count += 1
    for i in range(1, count):  # marks, then ops in program order
        o, k = s.inserted[i], i
        while k > 0 and s.inserted[k - 1] < a.ops and (o >= a.ops or s.inserted[k - 1] > o):
            s.inserted[k] = s.inserted[k - 1]
            k -= 1
        s.inserted[k] = o
    return put_in(s, side, count, at)


@inner
def put_in(s: MarkState, side: int, count: int, at: int) -> bool:
    """Put the first `count` of `inserted` in before event `at`; false where there is no room."""
    size, code = s.counts[side, EVENTS], s.code[side]
    if size + count > code.size:
        return False
    for e in range(size - 1, at - 1, -1):
        code[e + count] = code[e]
    for i in range(count):
        code[at + i] = s.inserted[i]
    s.counts[side, EVENTS] = size + count
    return True


@inlined
def next_read(a: Program, s: MarkState, side: int, t: int, at: int) -> int:
    """The first event from `at` on that reads a tensor; the number of events if none does."""
    found = s.counts[side, EVENTS]
    for e in range(at, s.counts[side, EVENTS]):
        if reads(a, s.code[side, e], t):
            found = e
            break
    return int(found)


@inlined
def reads(a: Program, code: int, t: int) -> bool:
    """Whether an event reads a tensor."""
    found = False
    for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]) if code < a.ops else range(0):
        found = found or a.reads[k] == t
    return found


@inlined
def _is_there(s: MarkState, side: int, t: int, at: int) -> bool:
    """Whether a copy of a tensor is kept for event `at` or a later one."""
    x, found = s.head[side, t], False
    while x != NONE and not found:
        found = s.copy[side, x, BEGIN] < at <= s.copy[side, x, LAST]
        x = s.copy[side, x, NEXT]
    return found
