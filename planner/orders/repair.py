"""How room is made in a trial that needs too much: at its fullest event, by what is cheapest."""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.compiled import inlined, inner
from coop_plan.planner.orders.lives import next_read
from coop_plan.planner.orders.moves import recompute
from coop_plan.planner.orders.sequence import (
    ALONG,
    AT,
    CODE,
    COPY,
    DOES,
    END,
    NONE,
    OVER,
    READ,
    TENSOR,
    TOUCHES,
    WORST,
    WalkState,
)

LEAST_US = 1e-9
"""What costs less is as good as free."""


@inner
def repair(a: Program, s: WalkState) -> bool:
    """
    Something that is only kept at the fullest event for its next read is computed again for that.

    Each is as likely as what it costs a byte is low.
    """
    worst, over = s.counts[WORST], s.counts[OVER]
    best, total = NONE, 0.0  # the weights of what could be done up to here
    for begin in range(worst):
        x = s.event[s.trial[begin], TOUCHES]
        while x != NONE and s.touch[x, DOES] != READ:
            copy, x = x, s.touch[x, ALONG]
            t = s.touch[copy, TENSOR]
            if s.touch[copy, COPY] != copy or s.event[s.touch[copy, END], AT] <= worst:
                continue
            maker = a.producer[t]
            if a.size[t] == 0 or s.again[maker] == 0 or a.evictable[t] == 0:
                continue
            if _held(a, s.event[s.trial[worst], CODE], t):
                continue
            weight = min(a.size[t], over) / max(a.cost[maker], LEAST_US)
            total += weight
            if np.random.random() * total < weight:
                best = t
    if best == NONE:
        return False
    return recompute(a, s, a.producer[best], next_read(s, best, worst + 1))


@inlined
def _held(a: Program, op: int, t: int) -> bool:
    """Whether an event reads a tensor and does not write over it."""
    held = False
    for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
        held = held or a.reads[k] == t
    for k in range(a.pairs_ptr[op], a.pairs_ptr[op + 1]):
        held = held and a.pairs_in[k] != t
    return held
