"""How room is made in a trial that needs too much: at its fullest event, by what is cheapest."""

import numpy as np

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.compiled import inlined, inner
from coop_plan.planner.joint.moves import recompute
from coop_plan.planner.joint.sequence import (
    BACK_AFTER,
    BEGIN,
    COPIES,
    END,
    HOST,
    LAST_READ,
    LEAVE,
    LINKED,
    NEXT_READ,
    NOWHERE,
    OVER,
    TENSOR,
    TRIAL,
    WORST,
    WalkState,
)
from coop_plan.planner.joint.transfers import fetch, move_to, next_read

LATER, SOONER, AGAIN, AWAY_AND_BACK = range(4)
"""What can be done: fetch later, leave sooner, recompute for the next read, copy away and back."""


@inner
def repair(a: Arrays, s: WalkState) -> bool:
    """
    At the fullest event, something that is only kept there is not.

    It was fetched early, waits for its copy to the host to be over, or is kept for its next read:
    then it is computed again for that, or copied to the host and back.
    """
    worst, over, size = s.counts[WORST], s.counts[OVER], s.counts[TRIAL]
    begins, linked = s.trial_begins, s.counts[LINKED] == 1
    if linked:
        _nearest_reads(a, s, worst)
    best, best_score, best_way, best_event = -1, np.inf, AGAIN, -1
    for c in range(s.counts[COPIES]):
        t = s.copy[TENSOR, c]
        begin, end = s.copy[BEGIN, c], s.copy[END, c]
        if not begin <= worst <= end or a.size[t] == 0:
            continue
        maker = a.producer[t]
        inside = begin < worst < end
        again = inside and s.again[maker] == 1 and a.evictable[t] == 1
        if not (again or linked):
            continue
        luck = np.random.exponential()
        if _held(a, s.trial[worst], t):
            continue
        bytes_ = min(a.size[t], over)
        if linked:
            way, event = AWAY_AND_BACK, s.tensor[NEXT_READ, t]
            us = max(0.0, s.in_us[t] - (begins[min(event, size)] - begins[worst]))
            if event > end:  # it is there because it has not left yet
                way, event, again = SOONER, end, False
                if end == size or s.trial[end] != a.ops + 3 * t + LEAVE or begin == worst:
                    continue
                us = max(0.0, begins[end + 1] - begins[worst])
            elif begin >= 0 and s.trial[begin] >= a.ops and s.tensor[LAST_READ, t] < begin:
                way, event, again = LATER, begin, False
            elif not inside or s.movable[t] == 0 or (event == size and not _waited_for(s, t)):
                us = np.inf
            else:
                taken = s.in_us[t] + (s.out_us[t] if s.tensor[HOST, t] == NOWHERE else 0.0)
                us += s.numbers.link_price * np.random.exponential() * taken
            score = us / bytes_ * luck
            if score < best_score:
                best, best_score, best_way, best_event = t, score, way, event
        if again:
            score = a.cost[maker] / bytes_ * luck
            if score < best_score:
                best, best_score, best_way = t, score, AGAIN
    if best < 0:
        return False
    if best_way == SOONER:
        move_to(s, best_event, worst)
        return True
    if best_way == LATER:
        move_to(s, best_event, worst + 1)
        return True
    if best_way == AGAIN:
        return recompute(a, s, a.producer[best], next_read(a, s, best, worst + 1))
    return fetch(a, s, best, best_event, worst, worst)


@inlined
def _held(a: Arrays, code: int, t: int) -> bool:
    """Whether an event reads a tensor and does not write over it."""
    held = False
    if code < a.ops:
        for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
            held = held or a.reads[k] == t
        for k in range(a.pairs_ptr[code], a.pairs_ptr[code + 1]):
            held = held and a.pairs_in[k] != t
    return held


@inlined
def _waited_for(s: WalkState, t: int) -> bool:
    """Whether a copy that is fetched in the window is read after it."""
    return bool(s.when[BACK_AFTER, t] > -np.inf)


@inner
def _nearest_reads(a: Arrays, s: WalkState, event: int) -> None:
    """Of what has copies, the last read up to an event of the trial, -1 for none, and the next."""
    size = s.counts[TRIAL]
    for c in range(s.counts[COPIES]):
        s.tensor[LAST_READ, s.copy[TENSOR, c]] = -1
        s.tensor[NEXT_READ, s.copy[TENSOR, c]] = size
    for e in range(event + 1):
        code = s.trial[e]
        if code < a.ops:
            for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
                s.tensor[LAST_READ, a.reads[k]] = e
    for e in range(size - 1, event, -1):
        code = s.trial[e]
        if code < a.ops:
            for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
                s.tensor[NEXT_READ, a.reads[k]] = e
