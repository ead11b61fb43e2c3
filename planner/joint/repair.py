"""How room is made in a trial that needs too much: at its fullest event, by what is cheapest."""

import numpy as np

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.compiled import inner
from coop_plan.planner.joint.moves import fetch, move_to, recompute
from coop_plan.planner.joint.sequence import (
    BEGIN,
    COPIES,
    END,
    HOST,
    LAST_READ,
    LEAVE,
    NEXT_READ,
    NOWHERE,
    OVER,
    TENSOR,
    TRIAL,
    WORST,
    JointState,
)

LATER, SOONER, AGAIN, AWAY_AND_BACK = range(4)
"""What can be done: fetch later, leave sooner, recompute for the next read, copy away and back."""


@inner
def repair(a: Arrays, j: JointState) -> bool:
    """
    At the fullest event, something that is only kept there is not.

    It was fetched early, waits for its copy to the host to be over, or is kept for its next read:
    then it is computed again for that, or copied to the host and back.
    """
    worst, over, size = j.counts[WORST], j.counts[OVER], j.counts[TRIAL]
    begins = j.trial_begins
    _nearest_reads(a, j, worst)
    best, best_score, best_way, best_event = -1, np.inf, AGAIN, -1
    for c in range(j.counts[COPIES]):
        t = j.copy[TENSOR, c]
        begin, end = j.copy[BEGIN, c], j.copy[END, c]
        if not begin <= worst <= end or a.size[t] == 0 or j.tensor[LAST_READ, t] == worst:
            continue
        luck = np.random.exponential() / min(a.size[t], over)
        read = j.tensor[NEXT_READ, t]
        if j.tensor[NEXT_READ, t] > end:  # it is there because it has not left yet
            code = j.trial[end] if end < size else 0
            if code != a.ops + 3 * t + LEAVE or begin == worst:
                continue
            score = luck * max(0.0, begins[end + 1] - begins[worst])
            if score < best_score:
                best, best_score, best_way, best_event = t, score, SOONER, end
            continue
        if j.trial[begin] >= a.ops and j.tensor[LAST_READ, t] < begin:
            score = luck * max(0.0, j.in_us[t] - (begins[read] - begins[worst]))
            if score < best_score:
                best, best_score, best_way, best_event = t, score, LATER, begin
            continue
        if begin == worst:
            continue
        maker = a.producer[t]
        if maker >= 0 and j.again[maker] == 1 and a.evictable[t] == 1:
            score = luck * a.cost[maker]
            if score < best_score:
                best, best_score, best_way, best_event = t, score, AGAIN, read
        if j.movable[t] == 1 and read < size and j.in_us[t] < np.inf:
            taken = j.in_us[t] + (j.out_us[t] if j.tensor[HOST, t] == NOWHERE else 0.0)
            stall = max(0.0, j.in_us[t] - (begins[read] - begins[worst]))
            price = j.numbers.link_price * np.random.exponential()
            score = luck * (stall + price * taken)
            if score < best_score:
                best, best_score, best_way, best_event = t, score, AWAY_AND_BACK, read
    if best < 0:
        return False
    if best_way == SOONER:
        move_to(j, best_event, worst)
        return True
    if best_way == LATER:
        move_to(j, best_event, worst + 1)
        return True
    if best_way == AGAIN:
        return recompute(a, j, a.producer[best], best_event)
    return fetch(a, j, best, best_event, worst, worst)


@inner
def _nearest_reads(a: Arrays, j: JointState, event: int) -> None:
    """By tensor the last read up to an event of the trial, -1 for none, and the next one."""
    size = j.counts[TRIAL]
    for t in range(a.size.size):
        j.tensor[LAST_READ, t] = -1
        j.tensor[NEXT_READ, t] = size
    for e in range(event + 1):
        code = j.trial[e]
        if code < a.ops:
            for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
                j.tensor[LAST_READ, a.reads[k]] = e
    for e in range(size - 1, event, -1):
        code = j.trial[e]
        if code < a.ops:
            for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
                j.tensor[NEXT_READ, a.reads[k]] = e
