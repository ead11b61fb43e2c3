"""The copies of the walk to the host and back: put in for one read, and timed anew for all."""

import numpy as np

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.compiled import inlined, inner
from coop_plan.planner.joint.sequence import (
    AFTER,
    AT_OFFLOAD,
    AWAY,
    AWAY_READY,
    FETCH,
    HOST_READY,
    LEAVE,
    NOTHING,
    OFFLOAD,
    OUT_READY,
    READY,
    ROOM,
    THERE,
    TRIAL,
    WalkState,
)


@inner
def put_in(s: WalkState, code: int, at: int) -> bool:
    """Put an event into the trial before event `at`; false where there is no room."""
    size = s.counts[TRIAL]
    if size >= s.counts[ROOM]:
        return False
    for e in range(size, at, -1):
        s.trial[e] = s.trial[e - 1]
    s.trial[at] = code
    s.counts[TRIAL] = size + 1
    return True


@inner
def move_to(s: WalkState, event: int, to: int) -> None:
    """Move an event of the trial to before what is event `to` now."""
    code = s.trial[event]
    if to > event:
        for e in range(event, to - 1):
            s.trial[e] = s.trial[e + 1]
        s.trial[to - 1] = code
    else:
        for e in range(event, to, -1):
            s.trial[e] = s.trial[e - 1]
        s.trial[to] = code


@inlined
def reads(a: Arrays, code: int, t: int) -> bool:
    """Whether an event is a run that reads a tensor."""
    if code >= a.ops:
        return False
    found = False
    for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
        found = found or a.reads[k] == t
    return found


@inner
def next_read(a: Arrays, s: WalkState, t: int, event: int) -> int:
    """The first event of the trial from `event` on that reads a tensor; its end if none does."""
    while event < s.counts[TRIAL] and not reads(a, s.trial[event], t):
        event += 1
    return event


@inlined
def _wait(s: WalkState, us: float) -> float:
    """The time given to a copy that takes `us`."""
    return us if np.random.random() < s.numbers.punctual_chance else 2.0 * np.random.random() * us


@inner
def fetch(a: Arrays, s: WalkState, t: int, event: int, after: int, before: int) -> bool:
    """
    Fetch `t` for the trial's event `event`, and copy it to the host first where it is not.

    It is fetched after event `after` and has left the device before event `before`, if they are
    not -1, and else in time for no one to wait.
    """
    begins, size = s.trial_begins, s.counts[TRIAL]
    if s.tensor[AFTER, t] != NOTHING and s.tensor[AFTER, t] != FETCH:
        return False  # it goes to the host after the window
    latest = begins[event] - _wait(s, s.in_us[t])
    at = event
    while at > after + 1 and at > 0 and begins[at] > latest:
        at -= 1
    if s.tensor[HOST_READY, t] == THERE:
        return put_in(s, a.ops + 3 * t + FETCH, at)
    offload = leave = made = -1
    for e in range(size):
        code = s.trial[e]
        if code == a.ops + 3 * t + OFFLOAD:
            offload = e
        elif code == a.ops + 3 * t + LEAVE:
            leave = e
        elif made < 0 and code == a.producer[t]:
            made = e
    most = at if before < 0 else min(at, before)
    if leave >= 0:
        if leave >= most:
            if most <= offload:
                return False
            move_to(s, leave, most)
            at += leave >= at
        return put_in(s, a.ops + 3 * t + FETCH, at)
    if at <= made or (made < 0 and s.tensor[READY, t] == 0):
        return False
    last = made  # the last read before it is fetched
    for e in range(max(0, made), at):
        if reads(a, s.trial[e], t):
            last = e
    earliest = _wait(s, s.out_us[t])
    if made >= 0:
        earliest += begins[made] + a.cost[a.producer[t]]
    leave = last + 1
    if leave > most:
        return False
    while leave < most and begins[leave] < earliest:
        leave += 1
    return (
        put_in(s, a.ops + 3 * t + FETCH, at)
        and put_in(s, a.ops + 3 * t + LEAVE, leave)
        and put_in(s, a.ops + 3 * t + OFFLOAD, made + 1)
    )


@inner
def retime(a: Arrays, s: WalkState) -> bool:
    """Tensors leave as early, and are fetched as late, as nobody waits; false with no copies."""
    n, size = a.ops, s.counts[TRIAL]
    begins = s.begins
    for e in range(size + 1):
        s.heads[e] = -1
    free = np.inf  # from when on the engine is taken, going back
    moved = 0
    for e in range(size - 1, -1, -1):
        code = s.trial[e]
        if code < n:
            continue
        t = (code - n) // 3
        s.tensor[AT_OFFLOAD, t] = -1
        s.when[AWAY, t] = s.when[AWAY_READY, t]
        moved += 1
        if (code - n) % 3 != FETCH:
            continue
        at = next_read(a, s, t, e + 1)
        free = min(free, begins[at]) - s.in_us[t]
        while at > 0 and begins[at] > free:
            at -= 1
        s.nexts[e] = s.heads[at]
        s.heads[at] = e
    if moved == 0:
        return False
    now = s.engine[OUT_READY]
    for e in range(size):
        code = s.trial[e]
        if code < n:
            continue
        t, kind = (code - n) // 3, (code - n) % 3
        if kind == OFFLOAD:
            now = max(now, begins[e]) + s.out_us[t]
            s.when[AWAY, t] = now
            s.tensor[AT_OFFLOAD, t] = e
        elif kind == LEAVE:
            at = s.tensor[AT_OFFLOAD, t] + 1
            for other in range(at, e):
                if reads(a, s.trial[other], t):
                    at = other + 1
            while at < e and begins[at] < s.when[AWAY, t]:
                at += 1
            s.nexts[e] = s.heads[at]
            s.heads[at] = e
    filled = 0
    for e in range(size + 1):
        put = s.heads[e]
        while put >= 0:
            s.live[filled] = s.trial[put]  # scratch: a trial of the same length
            filled += 1
            put = s.nexts[put]
        if e < size:
            code = s.trial[e]
            if code < n or (code - n) % 3 == OFFLOAD:
                s.live[filled] = code
                filled += 1
    for e in range(size):
        s.trial[e] = s.live[e]
    return True
