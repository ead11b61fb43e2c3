"""
What a trial costs and needs: its makespan, and how much more memory than there is.

The makespan is found by going through the events as the engines do (`planner.core.timeline`). Lives
end with events, whatever the times turn out to be (`planner.joint.lives`).
"""

import numpy as np

from coop_plan.planner.core.compiled import inlined, inner
from coop_plan.planner.joint.lives import settle
from coop_plan.planner.joint.sequence import (
    ALONG,
    AWAY,
    BACK,
    CODE,
    COMPUTE,
    DOWN,
    FETCH,
    FIRST_RUN,
    HOST_DOWN,
    HOST_UP,
    LINKED,
    MARGINS,
    NONE,
    OFFLOAD,
    ONCE,
    OVER,
    SAVED,
    TENSOR,
    TOUCHES,
    TRIAL,
    UP,
    WAITING,
    WAITS,
    WORST,
    Program,
    WalkState,
)


@inlined
def makespan(a: Program, s: WalkState, limit: float) -> float:
    """
    When the trial ends, µs; infinite if it is no schedule, or ends after `limit`.

    With a link it leaves when the trial's events begin.
    """
    if s.sums[COMPUTE] > limit or not settle(a, s):
        return np.inf
    return _timeline(a, s, limit) if s.counts[LINKED] == 1 else s.sums[COMPUTE]


@inner
def _timeline(a: Program, s: WalkState, limit: float) -> float:
    """The makespan with a link."""
    now = out_free = in_free = 0.0
    for at in range(s.counts[TRIAL]):
        e = s.trial[at]
        code = s.event[e, CODE]
        if code < a.ops:
            if s.event[e, WAITS] > 0:
                x = s.event[e, TOUCHES]
                while x != NONE:
                    if s.touch[x, WAITING] == 1:
                        now = max(now, s.when[BACK, s.touch[x, TENSOR]])
                    x = s.touch[x, ALONG]
            s.trial_begins[at] = now
            now += a.cost[code]
            if now > limit:
                return np.inf
            continue
        s.trial_begins[at] = now
        t, kind = (code - a.ops) // 3, (code - a.ops) % 3
        if kind == OFFLOAD:
            out_free = max(now, out_free) + s.out_us[t]
            s.when[AWAY, t] = out_free
        elif kind == FETCH:
            in_free = max(now, in_free) + s.in_us[t]
            s.when[BACK, t] = in_free
        else:
            now = max(now, s.when[AWAY, t])
    s.trial_begins[s.counts[TRIAL]] = now
    return now if now <= limit else np.inf


@inner
def excess(s: WalkState, capacity: int, host: int) -> float:
    """
    How much more than `capacity`, and on the host than `host` (bytes), a trial needs, as shares.

    The trial is one whose `makespan` is finite. Leaves the fullest event. `host` below 0 is no
    limit.
    """
    live, most, total = 0, -1, 0.0
    tight, position = s.counts[MARGINS] > 0, 0
    for at in range(s.counts[TRIAL]):
        e = s.trial[at]
        live += s.bytes[e, UP]
        over = live + s.bytes[e, ONCE] - s.bytes[e, SAVED] - capacity
        live -= s.bytes[e, DOWN]
        if tight and s.event[e, CODE] < s.op.size:
            if s.tight[position] == 1:
                over += _margin(s, position, s.event[e, CODE])
            position += s.event[e, FIRST_RUN]
        if over > 0:
            total += over
            if over > most:
                most = over
                s.counts[WORST], s.counts[OVER] = at, over
    found = _share(s, most, total, capacity) if most >= 0 else 0.0
    return found if host < 0 else found + _host_excess(s, host)


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


@inlined
def _host_excess(s: WalkState, host: int) -> float:
    live, most, total = 0, -1, 0.0
    for at in range(s.counts[TRIAL]):
        e = s.trial[at]
        live += s.bytes[e, HOST_UP]
        if live > host:
            total += live - host
            most = max(most, live - host)
        live -= s.bytes[e, HOST_DOWN]
    return _share(s, most, total, host) if most >= 0 else 0.0
