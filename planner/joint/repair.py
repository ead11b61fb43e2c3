"""How room is made in a sequence that needs too much: at its fullest event, by what is cheapest."""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.compiled import inner
from coop_plan.planner.joint.marks import (
    BEGIN,
    COPIES,
    EVENTS,
    FETCHED,
    FIRST,
    LAST,
    NONE,
    OVER,
    TENSOR,
    WORST,
    MarkState,
)
from coop_plan.planner.joint.moves import next_read, put_in, reads, recompute

LEAST_US = 1e-9
"""What costs less is as good as free."""


@inner
def repair(a: Program, s: MarkState, side: int) -> bool:
    """
    Something that is only kept at the fullest event is not: the sequence was just evaluated.

    For its next read it is computed again, or fetched. Each is as likely as what it costs a byte is
    low.
    """
    worst, over, copy = s.counts[side, WORST], s.counts[side, OVER], s.copy[side]
    if worst == NONE:
        return False
    best, by_link, total = NONE, False, 0.0
    for x in range(s.counts[side, COPIES]):
        t = copy[x, TENSOR]
        since = copy[x, FIRST] if copy[x, FETCHED] == 1 else copy[x, BEGIN]
        if not since < worst < copy[x, LAST] or since == NONE or a.size[t] == 0:
            continue
        if reads(a, s.code[side, worst], t):
            continue
        bytes_, maker = float(min(a.size[t], over)), a.producer[t]
        if s.movable[t] == 1:
            us = s.in_us[t] + (s.out_us[t] if copy[x, FETCHED] == 0 else 0.0)
            us *= s.numbers.link_price * 2.0 * np.random.random()
            total += bytes_ / max(us, LEAST_US)
            if np.random.random() * total < bytes_ / max(us, LEAST_US):
                best, by_link = t, True
        if s.again[maker] == 1 and a.evictable[t] == 1:
            total += bytes_ / max(a.cost[maker], LEAST_US)
            if np.random.random() * total < bytes_ / max(a.cost[maker], LEAST_US):
                best, by_link = t, False
    if best == NONE:
        return False
    read = next_read(a, s, side, best, worst + 1)
    if read == s.counts[side, EVENTS]:
        return False
    if by_link:
        s.inserted[0] = a.ops + best
        return put_in(s, side, 1, read)
    return recompute(a, s, side, side, a.producer[best], read)
