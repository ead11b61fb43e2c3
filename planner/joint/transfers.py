"""The copies of the walk to the host and back: put in for one read, and timed anew for all."""

import numpy as np

from coop_plan.planner.core.compiled import inlined, inner
from coop_plan.planner.joint.edit import move, put_in_one, rearrange
from coop_plan.planner.joint.lives import last_read, next_read, transfer_of
from coop_plan.planner.joint.sequence import (
    AT,
    AWAY,
    CODE,
    FETCH,
    HEADS,
    LEAVE,
    NEXTS,
    NONE,
    OFFLOAD,
    TRIAL,
    Program,
    WalkState,
)


@inlined
def _wait(s: WalkState, us: float) -> float:
    """The time given to a copy that takes `us`."""
    return us if np.random.random() < s.numbers.punctual_chance else 2.0 * np.random.random() * us


@inner
def fetch(a: Program, s: WalkState, t: int, event: int, after: int, before: int) -> bool:
    """
    Fetch `t` for the trial's event `event`, and copy it to the host first where it is not.

    It is fetched after event `after` and has left the device before event `before`, if they are
    not -1, and else in time for no one to wait. False where it cannot be.
    """
    begins = s.trial_begins
    latest = begins[event] - _wait(s, s.in_us[t])
    at = event
    while at > after + 1 and at > 0 and begins[at] > latest:
        at -= 1
    most = at if before < 0 else min(at, before)
    leave = transfer_of(s, t, LEAVE)
    if leave != NONE:
        if leave >= most:
            if most <= transfer_of(s, t, OFFLOAD):
                return False
            move(a, s, leave, leave + 1, most)
            at += leave >= at
        return put_in_one(a, s, a.ops + 3 * t + FETCH, at)
    made = s.event[s.op[a.producer[t]], AT]
    if at <= made:
        return False
    last = last_read(s, t, at - 1)  # before it is fetched
    earliest = _wait(s, s.out_us[t]) + begins[made] + a.cost[a.producer[t]]
    leave = (made if last == NONE else last) + 1
    if leave > most:
        return False
    while leave < most and begins[leave] < earliest:
        leave += 1
    return (
        put_in_one(a, s, a.ops + 3 * t + FETCH, at)
        and put_in_one(a, s, a.ops + 3 * t + LEAVE, leave)
        and put_in_one(a, s, a.ops + 3 * t + OFFLOAD, made + 1)
    )


@inner
def retime(a: Program, s: WalkState) -> bool:
    """Tensors leave as early, and are fetched as late, as nobody waits; false with no copies."""
    n, size, begins = a.ops, s.counts[TRIAL], s.begins
    heads, nexts = s.lists[HEADS], s.lists[NEXTS]
    for at in range(size + 1):
        heads[at] = NONE
    free = np.inf  # from when on the engine is taken, going back
    moved = 0
    for e in range(size - 1, -1, -1):
        code = s.event[s.trial[e], CODE]
        if code < n or (code - n) % 3 != FETCH:
            continue
        t = (code - n) // 3
        at = next_read(s, t, e + 1)
        free = min(free, begins[at]) - s.in_us[t]
        while at > 0 and begins[at] > free:
            at -= 1
        nexts[e], heads[at] = heads[at], e
        moved += 1
    if moved == 0:
        return False
    now = 0.0
    for e in range(size):
        code = s.event[s.trial[e], CODE]
        if code < n:
            continue
        t, kind = (code - n) // 3, (code - n) % 3
        if kind == OFFLOAD:
            now = max(now, begins[e]) + s.out_us[t]
            s.when[AWAY, t] = now
        elif kind == LEAVE:
            at = 1 + max(transfer_of(s, t, OFFLOAD), last_read(s, t, e))
            while at < e and begins[at] < s.when[AWAY, t]:
                at += 1
            nexts[e], heads[at] = heads[at], e
    rearrange(a, s)
    return True
