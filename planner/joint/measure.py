"""
What a trial costs and needs: its makespan, and how much more memory than there is.

One pass goes through the events as the engines do (`planner.core.timeline`) and finds the lives of
the copies; another adds them up. Lives end with events, whatever the times turn out to be.
"""

import numpy as np

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.compiled import inlined, inner
from coop_plan.planner.joint.sequence import (
    AWAY,
    BACK,
    BEGIN,
    COPIES,
    CURRENT,
    END,
    FETCH,
    FLYING,
    HOST,
    HOST_BEGIN,
    HOST_END,
    NEEDED,
    NOWHERE,
    OFFLOAD,
    OVER,
    TAKEN,
    TENSOR,
    THERE,
    TRIAL,
    UNDER_WAY,
    WORST,
    WRITTEN,
    JointState,
)


@inner
def makespan(a: Arrays, j: JointState, limit: float) -> float:
    """
    When the trial ends, µs; infinite if it is no schedule, or ends after `limit`.

    Leaves when its events begin, and its copies.
    """
    for t in range(a.size.size):
        j.tensor[CURRENT, t] = -1
        j.tensor[WRITTEN, t] = j.tensor[FLYING, t] = 0
        j.tensor[HOST, t] = NOWHERE
        j.tensor[HOST_BEGIN, t] = -1
        j.when[BACK, t] = 0.0
    size = j.counts[TRIAL]
    for e in range(size + 2):
        j.live[e] = 0
    j.counts[COPIES] = 0
    flying = 0
    now = out_free = in_free = 0.0
    for e in range(size):
        code = j.trial[e]
        if code < a.ops:
            once = a.workspace[code]
            for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
                t = a.reads[k]
                if j.tensor[CURRENT, t] < 0:
                    return np.inf
                j.copy[END, j.tensor[CURRENT, t]] = e
                if j.tensor[FLYING, t] == 1:
                    j.tensor[FLYING, t] = 0
                    j.tensor[HOST_END, t] = e
                    flying -= 1
                    now = max(now, j.when[BACK, t])
            j.trial_begins[e] = now
            now += a.cost[code]
            for k in range(a.makes_ptr[code], a.makes_ptr[code + 1]):
                t = a.makes[k]
                if a.outside[t] == 1 and j.tensor[WRITTEN, t] == 0:
                    j.tensor[WRITTEN, t] = 1
                elif a.outside[t] == 1 or (j.tensor[CURRENT, t] >= 0 and a.overwritten[t] == 1):
                    once += a.size[t]
                else:
                    if j.tensor[FLYING, t] == 1:
                        return np.inf  # fetched, and never waited for
                    _copy(j, t, e)
            j.live[e] += once
            j.live[e + 1] -= once
            if now > limit:
                return np.inf
            continue
        j.trial_begins[e] = now
        t, kind = (code - a.ops) // 3, (code - a.ops) % 3
        if kind == OFFLOAD:
            c = j.tensor[CURRENT, t]
            if c < 0 or j.tensor[HOST, t] != NOWHERE:
                return np.inf
            j.copy[END, c] = e
            j.tensor[TAKEN, t] = c
            j.tensor[HOST, t] = UNDER_WAY
            j.tensor[HOST_BEGIN, t] = e
            out_free = max(now, out_free) + j.out_us[t]
            j.when[AWAY, t] = out_free
        elif kind == FETCH:
            if j.tensor[HOST, t] != THERE or j.tensor[FLYING, t] == 1:
                return np.inf
            _copy(j, t, e)
            j.tensor[FLYING, t] = 1
            flying += 1
            in_free = max(now, in_free) + j.in_us[t]
            j.when[BACK, t] = in_free
        else:
            if j.tensor[HOST, t] != UNDER_WAY or j.tensor[FLYING, t] == 1:
                return np.inf
            j.tensor[HOST, t] = THERE
            j.tensor[HOST_END, t] = e
            j.copy[END, j.tensor[TAKEN, t]] = e
            now = max(now, j.when[AWAY, t])
    j.trial_begins[size] = now
    for t in range(a.size.size):
        if j.tensor[NEEDED, t] == 1:
            if j.tensor[CURRENT, t] < 0:
                return np.inf
            j.copy[END, j.tensor[CURRENT, t]] = size
        if j.tensor[HOST, t] == UNDER_WAY:
            return np.inf
    return now if flying == 0 and now <= limit else np.inf


@inlined
def _copy(j: JointState, t: int, event: int) -> None:
    copy = j.counts[COPIES]
    j.counts[COPIES] += 1
    j.tensor[CURRENT, t] = copy
    j.copy[TENSOR, copy] = t
    j.copy[BEGIN, copy] = j.copy[END, copy] = event


@inner
def excess(a: Arrays, j: JointState, capacity: int, host: int) -> float:
    """
    How much more than `capacity`, and on the host than `host` (bytes), a trial needs, as shares.

    The trial is the one whose `makespan` was last asked for. Leaves the bytes live at each event,
    and the fullest one. `host` below 0 is no limit.
    """
    for c in range(j.counts[COPIES]):
        t = j.copy[TENSOR, c]
        j.live[j.copy[BEGIN, c]] += a.size[t]
        j.live[j.copy[END, c] + 1] -= a.size[t]
        j.tensor[CURRENT, t] = -1
    live = 0
    most = -1
    total = 0.0
    c = 0
    for e in range(j.counts[TRIAL]):
        code = j.trial[e]
        live += j.live[e]
        now = live
        if code < a.ops:
            for k in range(a.pairs_ptr[code], a.pairs_ptr[code + 1]):
                source = j.tensor[CURRENT, a.pairs_in[k]]
                if source >= 0 and j.copy[END, source] == e:
                    now -= a.size[a.pairs_out[k]]
                    break
        while c < j.counts[COPIES] and j.copy[BEGIN, c] == e:
            j.tensor[CURRENT, j.copy[TENSOR, c]] = c
            c += 1
        j.live[e] = now
        over = now - capacity
        if over > 0:
            total += over
            if over > most:
                most = over
                j.counts[WORST] = e
                j.counts[OVER] = over
    found = 0.0
    if most >= 0:
        found = j.numbers.least_excess + (most + j.numbers.spread * total) / max(1, capacity)
    if host >= 0:
        found += _host_excess(a, j, host)
    return found


@inner
def _host_excess(a: Arrays, j: JointState, host: int) -> float:
    for e in range(j.counts[TRIAL] + 2):
        j.host_live[e] = 0
    for t in range(a.size.size):
        if j.tensor[HOST_BEGIN, t] >= 0:
            j.host_live[j.tensor[HOST_BEGIN, t]] += a.size[t]
            j.host_live[j.tensor[HOST_END, t] + 1] -= a.size[t]
    live = most = 0
    total = 0.0
    for e in range(j.counts[TRIAL]):
        live += j.host_live[e]
        most = max(most, live)
        total += max(0, live - host)
    if most <= host:
        return 0.0
    return j.numbers.least_excess + (most - host + j.numbers.spread * total) / max(1, host)
