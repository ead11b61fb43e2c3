"""How room is made in a trial that needs too much: at its fullest event, by what is cheapest."""

import numpy as np

from coop_plan.planner.core.compiled import inlined, inner
from coop_plan.planner.joint.edit import move
from coop_plan.planner.joint.lives import next_read
from coop_plan.planner.joint.moves import recompute
from coop_plan.planner.joint.sequence import (
    ALONG,
    AT,
    CODE,
    COPY,
    DOES,
    END,
    EVENT,
    HOST_BEGIN,
    LEAVE,
    LINKED,
    NEXT,
    NONE,
    OVER,
    READ,
    TENSOR,
    TOUCHES,
    TRIAL,
    WORST,
    Program,
    WalkState,
)
from coop_plan.planner.joint.transfers import fetch

LATER, SOONER, AGAIN, AWAY_AND_BACK = range(4)
"""What can be done: fetch later, leave sooner, recompute for the next read, copy away and back."""

LEAST_US = 1e-9
"""What costs less is as good as free."""


@inner
def repair(a: Program, s: WalkState) -> bool:
    """
    At the fullest event, something that is only kept there is not.

    It was fetched early, waits for its copy to the host to be over, or is kept for its next read:
    then it is computed again for that, or copied to the host and back. Each is as likely as what it
    costs a byte is low.
    """
    worst, over, size = s.counts[WORST], s.counts[OVER], s.counts[TRIAL]
    begins, linked = s.trial_begins, s.counts[LINKED] == 1
    best, best_way, best_event = -1, AGAIN, -1
    total = 0.0  # of the weights of what could be done up to here
    for begin in range(worst + 1):
        x = s.event[s.trial[begin], TOUCHES]
        while x != NONE and s.touch[x, DOES] != READ:
            copy, x = x, s.touch[x, ALONG]
            if s.touch[copy, COPY] != copy:
                continue
            end = s.event[s.touch[copy, END], AT]
            t = s.touch[copy, TENSOR]
            if end < worst or a.size[t] == 0:
                continue
            maker = a.producer[t]
            inside = begin < worst < end
            again = inside and s.again[maker] == 1 and a.evictable[t] == 1
            if not (again or linked) or _held(a, s.event[s.trial[worst], CODE], t):
                continue
            bytes_ = min(a.size[t], over)
            if linked:
                way, event, read = AWAY_AND_BACK, size, False
                y = s.touch[copy, NEXT]
                while y != NONE and event == size:
                    if s.touch[y, DOES] == READ:
                        at = s.event[s.touch[y, EVENT], AT]
                        read = read or at <= worst
                        event = at if at > worst else size
                    y = s.touch[y, NEXT]
                us = max(0.0, s.in_us[t] - (begins[event] - begins[worst]))
                if event > end:  # it is there because it has not left yet
                    way, event, again = SOONER, end, False
                    leaving = a.ops + 3 * t + LEAVE
                    if end == size or s.event[s.trial[end], CODE] != leaving or begin == worst:
                        continue
                    us = max(0.0, begins[end + 1] - begins[worst])
                elif s.event[s.trial[begin], CODE] >= a.ops and not read:
                    way, event, again = LATER, begin, False
                elif not inside or s.movable[t] == 0 or event == size:
                    us = np.inf
                else:
                    taken = s.in_us[t] + (s.out_us[t] if s.tensor[t, HOST_BEGIN] == NONE else 0.0)
                    us += s.numbers.link_price * 2.0 * np.random.random() * taken
                weight = bytes_ / max(us, LEAST_US)
                total += weight
                if np.random.random() * total < weight:
                    best, best_way, best_event = t, way, event
            if again:
                weight = bytes_ / max(a.cost[maker], LEAST_US)
                total += weight
                if np.random.random() * total < weight:
                    best, best_way = t, AGAIN
    if best < 0:
        return False
    if best_way in (LATER, SOONER):
        move(a, s, best_event, best_event + 1, worst)
        return True
    if best_way == AGAIN:
        return recompute(a, s, a.producer[best], next_read(s, best, worst + 1))
    return fetch(a, s, best, best_event, worst, worst)


@inlined
def _held(a: Program, code: int, t: int) -> bool:
    """Whether an event reads a tensor and does not write over it."""
    held = False
    if code < a.ops:
        for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
            held = held or a.reads[k] == t
        for k in range(a.pairs_ptr[code], a.pairs_ptr[code + 1]):
            held = held and a.pairs_in[k] != t
    return held
