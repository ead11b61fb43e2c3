"""
What a trial costs and needs: its makespan, and how much more memory than there is.

One pass goes through the events as the engines do (`planner.core.timeline`) and finds the lives of
the copies; another adds them up. Lives end with events, whatever the times turn out to be.
"""

import numpy as np

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.compiled import inlined, inner
from coop_plan.planner.joint.sequence import (
    AFTER,
    AWAY,
    AWAY_AFTER,
    BACK,
    BACK_AFTER,
    BEGIN,
    COPIED_COUNT,
    COPIED_LIST,
    COPIED_READY,
    COPIES,
    COPIES_READY,
    CURRENT,
    END,
    FETCH,
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
    MARGINS,
    NEEDED_COUNT,
    NEEDED_LIST,
    NOTHING,
    NOWHERE,
    OFFLOAD,
    OUT_AFTER,
    OUT_READY,
    OVER,
    POSITION,
    RAN,
    READY,
    READY_COUNT,
    READY_LIST,
    SEEN,
    TAKEN,
    TAKEN_READY,
    TENSOR,
    THERE,
    TRIAL,
    UNDER_WAY,
    WORST,
    WRITTEN,
    WRITTEN_COUNT,
    WRITTEN_LIST,
    WalkState,
)
from coop_plan.planner.joint.window import as_before


@inner
def makespan(a: Arrays, s: WalkState, limit: float) -> float:
    """
    When the trial ends, µs; infinite if it is no schedule, or ends after `limit`.

    In a window that is the end of all less what compute takes after it if it never waits. Leaves
    when its events begin, its copies, and what is live for one event only.
    """
    size = s.counts[TRIAL]
    least = 0.0  # if it never waits
    for e in range(size):
        if s.trial[e] < a.ops:
            least += a.cost[s.trial[e]]
    if least > limit:
        return np.inf
    flying = _begin(s)
    for e in range(size + 2):
        s.live[e] = 0
    now = 0.0
    out_free, in_free = s.engine[OUT_READY], s.engine[IN_READY]
    for e in range(size):
        code = s.trial[e]
        if code < a.ops:
            once = a.workspace[code]
            for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
                t = a.reads[k]
                if s.tensor[CURRENT, t] < 0:
                    return np.inf
                s.copy[END, s.tensor[CURRENT, t]] = e
                if flying > 0 and s.tensor[FLYING, t] == 1:
                    s.tensor[FLYING, t] = 0
                    s.tensor[HOST_END, t] = e
                    flying -= 1
                    now = max(now, s.when[BACK, t])
            s.trial_begins[e] = now
            now += a.cost[code]
            for k in range(a.makes_ptr[code], a.makes_ptr[code + 1]):
                t = a.makes[k]
                if a.outside[t] == 1 and s.tensor[WRITTEN, t] == 0:
                    s.tensor[WRITTEN, t] = 1
                    s.tensor[WRITTEN_LIST, s.counts[WRITTEN_COUNT]] = t
                    s.counts[WRITTEN_COUNT] += 1
                elif a.outside[t] == 1 or (s.tensor[CURRENT, t] >= 0 and a.overwritten[t] == 1):
                    once += a.size[t]
                elif flying > 0 and s.tensor[FLYING, t] == 1:
                    return np.inf  # fetched, and never waited for
                else:
                    s.tensor[CURRENT, t] = _copy(s, t, e)
            s.live[e] += once
            s.live[e + 1] -= once
            if now > limit:
                return np.inf
            continue
        s.trial_begins[e] = now
        t, kind = (code - a.ops) // 3, (code - a.ops) % 3
        if kind == OFFLOAD:
            c = s.tensor[CURRENT, t]
            if c < 0 or s.tensor[HOST, t] != NOWHERE:
                return np.inf
            s.copy[END, c] = e
            s.tensor[TAKEN, t] = c
            s.tensor[HOST, t] = UNDER_WAY
            s.tensor[HOST_BEGIN, t] = s.tensor[HOST_END, t] = e
            if s.tensor[AFTER, t] == NOTHING:
                s.tensor[COPIED_LIST, s.counts[COPIED_COUNT]] = t
                s.counts[COPIED_COUNT] += 1
            out_free = max(now, out_free) + s.out_us[t]
            s.when[AWAY, t] = out_free
        elif kind == FETCH:
            if s.tensor[HOST, t] != THERE or s.tensor[FLYING, t] == 1:
                return np.inf
            s.tensor[CURRENT, t] = _copy(s, t, e)
            s.tensor[FLYING, t] = 1
            flying += 1
            in_free = max(now, in_free) + s.in_us[t]
            s.when[BACK, t] = in_free
        else:
            if s.tensor[HOST, t] != UNDER_WAY or s.tensor[FLYING, t] == 1:
                return np.inf
            s.tensor[HOST, t] = THERE
            s.tensor[HOST_END, t] = e
            s.copy[END, s.tensor[TAKEN, t]] = e
            now = max(now, s.when[AWAY, t])
    s.trial_begins[size] = now
    for i in range(s.counts[NEEDED_COUNT]):
        c = s.tensor[CURRENT, s.tensor[NEEDED_LIST, i]]
        if c < 0:
            return np.inf
        s.copy[END, c] = size
    now = max(now, out_free + s.engine[OUT_AFTER], in_free + s.engine[IN_AFTER])
    for i in range(s.counts[COPIED_COUNT]):
        now = max(now, _waited(s, s.tensor[COPIED_LIST, i]))
    return now if now <= limit else np.inf


@inlined
def _begin(s: WalkState) -> int:
    """All is as it is when the window begins; returns how many fetched copies are under way."""
    for c in range(s.counts[COPIES]):
        s.tensor[CURRENT, s.copy[TENSOR, c]] = -1
    for i in range(s.counts[WRITTEN_COUNT]):
        s.tensor[WRITTEN, s.tensor[WRITTEN_LIST, i]] = s.tensor[GONE, s.tensor[WRITTEN_LIST, i]]
    for i in range(s.counts[COPIED_COUNT]):
        as_before(s, s.tensor[COPIED_LIST, i])
    s.counts[COPIES] = s.counts[WRITTEN_COUNT] = 0
    s.counts[COPIED_COUNT] = s.counts[COPIED_READY]
    for i in range(s.counts[READY_COUNT]):
        t = s.tensor[READY_LIST, i]
        s.tensor[CURRENT, t] = _copy(s, t, -1)
    flying = 0
    for i in range(s.counts[COPIED_READY]):
        t = s.tensor[COPIED_LIST, i]
        flying += s.tensor[FLYING_READY, t]
        if s.tensor[HOST_READY, t] == UNDER_WAY:
            same = s.tensor[TAKEN_READY, t] == 1 and s.tensor[READY, t] == 1
            s.tensor[TAKEN, t] = s.tensor[CURRENT, t] if same else _copy(s, t, -1)
    s.counts[COPIES_READY] = s.counts[COPIES]
    return flying


@inlined
def _copy(s: WalkState, t: int, event: int) -> int:
    copy = int(s.counts[COPIES])
    s.counts[COPIES] += 1
    s.copy[TENSOR, copy] = t
    s.copy[BEGIN, copy] = s.copy[END, copy] = event
    return copy


@inlined
def _waited(s: WalkState, t: int) -> float:
    """
    Until when a tensor's copies hold up the end, µs; infinite where what comes next cannot be.

    That is a transfer from another place than the one the tensor is at, or none where there must be
    one.
    """
    size, end = s.counts[TRIAL], -np.inf
    host, after = s.tensor[HOST, t], s.tensor[AFTER, t]
    if host == UNDER_WAY:
        if after != LEAVE:
            return np.inf
        s.copy[END, s.tensor[TAKEN, t]] = s.tensor[HOST_END, t] = size
        end = s.when[AWAY, t] + s.when[AWAY_AFTER, t]
    elif after == LEAVE or (after == OFFLOAD and host != NOWHERE):
        return np.inf
    elif after == FETCH:
        if host != THERE:
            return np.inf
        s.tensor[HOST_END, t] = size
    if s.tensor[FLYING, t] == 1:
        if s.when[BACK_AFTER, t] == -np.inf:
            return np.inf
        s.tensor[HOST_END, t] = size
        end = max(end, s.when[BACK, t] + s.when[BACK_AFTER, t])
    return end


@inner
def excess(a: Arrays, s: WalkState, capacity: int, host: int) -> float:
    """
    How much more than `capacity`, and on the host than `host` (bytes), a trial needs, as shares.

    The trial is the one whose `makespan` was last asked for. Leaves the fullest event. `host` below
    0 is no limit.
    """
    ready = s.counts[READY_COUNT]
    for c in range(s.counts[COPIES]):
        t = s.copy[TENSOR, c]
        if s.copy[END, c] >= 0:
            s.live[max(0, s.copy[BEGIN, c])] += a.size[t]
            s.live[s.copy[END, c] + 1] -= a.size[t]
        s.tensor[CURRENT, t] = -1
    for c in range(ready):
        s.tensor[CURRENT, s.copy[TENSOR, c]] = c
    tight, position = s.counts[MARGINS] > 0, s.counts[POSITION]
    live = 0
    most = -1
    total = 0.0
    c = s.counts[COPIES_READY]
    for e in range(s.counts[TRIAL]):
        code = s.trial[e]
        live += s.live[e]
        now = live
        if code < a.ops:
            for k in range(a.pairs_ptr[code], a.pairs_ptr[code + 1]):
                source = s.tensor[CURRENT, a.pairs_in[k]]
                if source >= 0 and s.copy[END, source] == e:
                    now -= a.size[a.pairs_out[k]]
                    break
        while c < s.counts[COPIES] and s.copy[BEGIN, c] == e:
            s.tensor[CURRENT, s.copy[TENSOR, c]] = c
            c += 1
        over = now - capacity
        if tight and code < a.ops:
            if s.tight[position] == 1:
                over += _margin(s, position, code)
            if s.op[SEEN, code] == 0:
                s.op[SEEN, code] = 1
                position += 1
        if over > 0:
            total += over
            if over > most:
                most = over
                s.counts[WORST] = e
                s.counts[OVER] = over
    if tight:
        for e in range(s.counts[TRIAL]):
            if s.trial[e] < a.ops:
                s.op[SEEN, s.trial[e]] = s.op[RAN, s.trial[e]]
    found = _share(s, most, total, capacity) if most >= 0 else 0.0
    return found if host < 0 else found + _host_excess(a, s, host)


@inlined
def _share(s: WalkState, most: int, total: float, capacity: int) -> float:
    return s.numbers.least_excess + (most + s.numbers.spread * total) / max(1, capacity)


@inlined
def _margin(s: WalkState, position: int, op: int) -> int:
    """Bytes to leave free while the op runs for this position."""
    margin = 0
    for i in range(s.counts[MARGINS]):
        if s.margin[0, i] == position and s.margin[1, i] == op:
            margin = s.margin[2, i]
    return margin


@inner
def _host_excess(a: Arrays, s: WalkState, host: int) -> float:
    for e in range(s.counts[TRIAL] + 2):
        s.host_live[e] = 0
    for i in range(s.counts[COPIED_COUNT]):
        t = s.tensor[COPIED_LIST, i]
        if s.tensor[HOST_END, t] >= 0:
            s.host_live[s.tensor[HOST_BEGIN, t]] += a.size[t]
            s.host_live[s.tensor[HOST_END, t] + 1] -= a.size[t]
    live = 0
    most = -1
    total = 0.0
    for e in range(s.counts[TRIAL]):
        live += s.host_live[e]
        if live > host:
            total += live - host
            most = max(most, live - host)
    return _share(s, most, total, host) if most >= 0 else 0.0
