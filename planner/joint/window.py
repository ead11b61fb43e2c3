"""
A window of a sequence: what there is before it and what is needed after it; all else stays.

What is live when the window begins may be read in it, and what is read after its end must be there
by then. The engines are where the events before left them. What comes after waits for compute, for
the engines and for copies under way; all of it only adds and takes maxima of times, so each of
these counts with the longest way from it to the end, once and for all.
"""

import numpy as np

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.compiled import inlined, inner
from coop_plan.planner.joint.sequence import (
    AFTER,
    ALIVE,
    AT_LEAVE,
    AWAY,
    AWAY_AFTER,
    AWAY_READY,
    BACK,
    BACK_AFTER,
    BACK_READY,
    COPIED_COUNT,
    COPIED_LIST,
    COPIED_READY,
    COPIES,
    CURRENT,
    FETCH,
    FIRST,
    FLYING,
    FLYING_READY,
    GONE,
    HOST,
    HOST_BEGIN,
    HOST_END,
    HOST_READY,
    IN_AFTER,
    IN_READY,
    LEAVE,
    LENGTH,
    LINKED,
    NEEDED,
    NEEDED_COUNT,
    NEEDED_LIST,
    NEVER,
    NOTHING,
    NOWHERE,
    OFFLOAD,
    OUT_AFTER,
    OUT_READY,
    POSITION,
    RAN,
    READY,
    READY_COUNT,
    READY_LIST,
    ROOM,
    SEEN,
    TAKEN_READY,
    THERE,
    TRIAL,
    UNDER_WAY,
    WINDOW,
    WRITTEN,
    WRITTEN_COUNT,
    WalkState,
)


@inlined
def look_back(a: Arrays, s: WalkState, code: int) -> None:
    """What is needed before an event, from what is needed after it."""
    if code < a.ops:
        for k in range(a.makes_ptr[code], a.makes_ptr[code + 1]):
            if a.evictable[a.makes[k]] == 1:
                s.tensor[ALIVE, a.makes[k]] = 0
        for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
            s.tensor[ALIVE, a.reads[k]] = 1
    elif (code - a.ops) % 3 == FETCH:
        s.tensor[ALIVE, (code - a.ops) // 3] = 0
    elif (code - a.ops) % 3 == OFFLOAD:
        s.tensor[ALIVE, (code - a.ops) // 3] = 1


@inlined
def restore(a: Arrays, s: WalkState, code: int) -> None:
    """What `look_back` changed is as it was again."""
    if code < a.ops:
        for k in range(a.makes_ptr[code], a.makes_ptr[code + 1]):
            s.tensor[ALIVE, a.makes[k]] = s.tensor[NEEDED, a.makes[k]]
        for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
            s.tensor[ALIVE, a.reads[k]] = s.tensor[NEEDED, a.reads[k]]
    else:
        t = (code - a.ops) // 3
        s.tensor[ALIVE, t] = s.tensor[NEEDED, t]


@inner
def enter(a: Arrays, s: WalkState, low: int, high: int) -> None:
    """Make the events `low` to `high` - 1 the trial, and find out what is around them."""
    length = s.counts[LENGTH]
    for t in range(a.size.size):
        s.tensor[READY, t] = s.tensor[GONE, t] = 0
        s.tensor[ALIVE, t] = a.is_output[t] - a.outside[t]
        s.tensor[CURRENT, t] = -1
    for op in range(a.ops):
        s.op[RAN, op] = 0
    _before(a, s, low)
    _after(a, s, high)
    for e in range(length - 1, low - 1, -1):
        if e == high - 1:
            for t in range(a.size.size):
                s.tensor[NEEDED, t] = s.tensor[ALIVE, t]
        look_back(a, s, s.sequence[e])
    for op in range(a.ops):
        s.op[SEEN, op] = s.op[RAN, op]
    for e in range(low, high):
        if s.sequence[e] < a.ops:
            s.op[SEEN, s.sequence[e]] = 1
    s.counts[READY_COUNT] = s.counts[NEEDED_COUNT] = s.counts[COPIED_READY] = 0
    for t in range(a.size.size):
        s.tensor[READY, t] &= s.tensor[ALIVE, t]
        if s.tensor[READY, t] == 1:
            s.tensor[READY_LIST, s.counts[READY_COUNT]] = t
            s.counts[READY_COUNT] += 1
        if a.producer[t] < 0 or s.op[SEEN, a.producer[t]] == 0:
            s.tensor[NEEDED, t] = 0
        if s.tensor[NEEDED, t] == 1:
            s.tensor[NEEDED_LIST, s.counts[NEEDED_COUNT]] = t
            s.counts[NEEDED_COUNT] += 1
        if s.tensor[HOST_READY, t] != NOWHERE or s.tensor[AFTER, t] != NOTHING:
            s.tensor[COPIED_LIST, s.counts[COPIED_READY]] = t
            s.counts[COPIED_READY] += 1
        # Whoever changes one of these puts it back.
        s.tensor[ALIVE, t] = s.tensor[NEEDED, t]
        s.tensor[WRITTEN, t] = s.tensor[GONE, t]
        s.tensor[AT_LEAVE, t] = -1 if s.tensor[HOST_READY, t] == THERE else NEVER
        as_before(s, t)
    for op in range(a.ops):
        s.op[SEEN, op] = s.op[RAN, op]
        s.op[FIRST, op] = -1 if s.op[RAN, op] == 1 else NEVER
    s.counts[WINDOW] = s.counts[COPIES] = s.counts[WRITTEN_COUNT] = 0
    s.counts[COPIED_COUNT] = s.counts[COPIED_READY]
    s.counts[TRIAL] = high - low
    s.counts[POSITION] = s.op[RAN].sum()
    s.counts[ROOM] = s.sequence.size - length + high - low
    for e in range(low, high):
        s.trial[e - low] = s.sequence[e]


@inlined
def as_before(s: WalkState, t: int) -> None:
    """The copies of a tensor to the host and back are where they are when the window begins."""
    s.tensor[HOST, t] = s.tensor[HOST_READY, t]
    s.tensor[FLYING, t] = s.tensor[FLYING_READY, t]
    s.when[AWAY, t] = s.when[AWAY_READY, t]
    s.when[BACK, t] = s.when[BACK_READY, t]
    s.tensor[HOST_BEGIN, t] = 0
    s.tensor[HOST_END, t] = -1


@inner
def _before(a: Arrays, s: WalkState, low: int) -> None:
    """Where tensors, copies and engines are when the window begins."""
    for t in range(a.size.size):
        s.tensor[HOST_READY, t] = NOWHERE
        s.tensor[FLYING_READY, t] = s.tensor[TAKEN_READY, t] = 0
        s.when[AWAY_READY, t] = s.when[BACK_READY, t] = 0.0
    now = out_free = in_free = 0.0
    for e in range(low):
        code = s.sequence[e]
        if code < a.ops:
            s.op[RAN, code] = 1
            for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
                if s.tensor[FLYING_READY, a.reads[k]] == 1:
                    s.tensor[FLYING_READY, a.reads[k]] = 0
                    now = max(now, s.when[BACK_READY, a.reads[k]])
            now += a.cost[code]
            for k in range(a.makes_ptr[code], a.makes_ptr[code + 1]):
                s.tensor[GONE if a.outside[a.makes[k]] == 1 else READY, a.makes[k]] = 1
                s.tensor[TAKEN_READY, a.makes[k]] = 0
            continue
        t, kind = (code - a.ops) // 3, (code - a.ops) % 3
        if kind == OFFLOAD:
            s.tensor[HOST_READY, t] = UNDER_WAY
            s.tensor[TAKEN_READY, t] = 1  # the copy that is read now is the one that is taken
            out_free = max(now, out_free) + s.out_us[t]
            s.when[AWAY_READY, t] = out_free
        elif kind == LEAVE:
            s.tensor[HOST_READY, t] = THERE
            now = max(now, s.when[AWAY_READY, t])
        else:
            s.tensor[READY, t] = s.tensor[FLYING_READY, t] = 1
            s.tensor[TAKEN_READY, t] = 0
            in_free = max(now, in_free) + s.in_us[t]
            s.when[BACK_READY, t] = in_free
    s.engine[OUT_READY], s.engine[IN_READY] = out_free - now, in_free - now
    for t in range(a.size.size):
        s.when[AWAY_READY, t] -= now
        s.when[BACK_READY, t] -= now


@inner
def _after(a: Arrays, s: WalkState, high: int) -> None:
    """The longest ways to the end from compute, the engines and copies where the window ends."""
    for t in range(a.size.size):
        s.tensor[AFTER, t] = NOTHING
        s.when[AWAY_AFTER, t] = s.when[BACK_AFTER, t] = -np.inf
    now = 0.0
    out_free = in_free = -np.inf
    for e in range(s.counts[LENGTH] - 1, high - 1, -1):
        code = s.sequence[e]
        if code < a.ops:
            for k in range(a.makes_ptr[code], a.makes_ptr[code + 1]):
                s.when[BACK_AFTER, a.makes[k]] = -np.inf
            now += a.cost[code]
            for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
                s.when[BACK_AFTER, a.reads[k]] = now
            continue
        t, kind = (code - a.ops) // 3, (code - a.ops) % 3
        s.tensor[AFTER, t] = kind
        if kind == OFFLOAD:
            out_free = max(out_free, s.when[AWAY_AFTER, t]) + s.out_us[t]
            now = max(now, out_free)
            s.when[AWAY_AFTER, t] = -np.inf
        elif kind == LEAVE:
            s.when[AWAY_AFTER, t] = now
        else:
            in_free = max(in_free, s.when[BACK_AFTER, t]) + s.in_us[t]
            now = max(now, in_free)
            s.when[BACK_AFTER, t] = -np.inf
    s.engine[OUT_AFTER], s.engine[IN_AFTER] = out_free - now, in_free - now
    for t in range(a.size.size):
        s.when[AWAY_AFTER, t] -= now
        s.when[BACK_AFTER, t] -= now


@inner
def leave(s: WalkState, low: int, high: int) -> None:
    """Put the window back in its place."""
    length, size = s.counts[LENGTH], s.counts[WINDOW]
    more = size - (high - low)
    if more > 0:
        for e in range(length - 1, high - 1, -1):
            s.sequence[e + more] = s.sequence[e]
    else:
        for e in range(high, length):
            s.sequence[e + more] = s.sequence[e]
    for e in range(size):
        s.sequence[low + e] = s.window[e]
    s.counts[LENGTH] = length + more


@inner
def accept(a: Arrays, s: WalkState) -> None:
    """The trial becomes the window."""
    linked, size = s.counts[LINKED] == 1, s.counts[TRIAL]
    for e in range(s.counts[WINDOW] if linked else 0):
        if s.window[e] >= a.ops:
            t = (s.window[e] - a.ops) // 3
            s.tensor[AT_LEAVE, t] = -1 if s.tensor[HOST_READY, t] == THERE else NEVER
    for e in range(size + 1 if linked else 0):
        s.begins[e] = s.trial_begins[e]
    s.counts[WINDOW] = size
    for e in range(size):
        if s.trial[e] < a.ops and s.op[RAN, s.trial[e]] == 0:
            s.op[FIRST, s.trial[e]] = NEVER
    for e in range(size):
        code = s.trial[e]
        s.window[e] = code
        s.is_first[e] = 0
        if code < a.ops:
            if s.op[FIRST, code] == NEVER:
                s.op[FIRST, code] = e
                s.is_first[e] = 1
        elif (code - a.ops) % 3 == LEAVE:
            s.tensor[AT_LEAVE, (code - a.ops) // 3] = e
