"""What a trial costs, and how much more memory than there is it needs."""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.compiled import inlined, inner
from coop_plan.planner.orders.lives import settle
from coop_plan.planner.orders.sequence import (
    AREA,
    CODE,
    COMPUTE,
    DOWN,
    FIRST_RUN,
    MARGINS,
    ONCE,
    OVER,
    SAVED,
    TRIAL,
    UP,
    WORST,
    WalkState,
)


@inlined
def cost_of(a: Program, s: WalkState, limit: float) -> float:
    """What the trial costs, µs; infinite if it is no schedule, or costs more than `limit`."""
    if s.sums[COMPUTE] > limit or not settle(a, s):
        return np.inf
    return float(s.sums[COMPUTE])


@inner
def excess(s: WalkState, capacity: int) -> float:
    """
    How much more than `capacity` (bytes) a trial needs, as a share; leaves the fullest event.

    The trial is one whose cost is finite.
    """
    live, most, total, area = 0, -1, 0.0, 0.0
    tight, position = s.counts[MARGINS] > 0, 0
    for at in range(s.counts[TRIAL]):
        e = s.trial[at]
        live += s.bytes[e, UP]
        over = live + s.bytes[e, ONCE] - s.bytes[e, SAVED] - capacity
        area += live
        live -= s.bytes[e, DOWN]
        if tight:
            if s.tight[position] == 1:
                over += _margin(s, position, s.event[e, CODE])
            position += s.event[e, FIRST_RUN]
        if over > 0:
            total += over
            if over > most:
                most = over
                s.counts[WORST], s.counts[OVER] = at, over
    s.sums[AREA] = area
    if most < 0:
        return 0.0
    return float(s.numbers.least_excess + (most + s.numbers.spread * total) / max(1, capacity))


@inlined
def _margin(s: WalkState, position: int, op: int) -> int:
    """Bytes to leave free while the op runs for this position."""
    margin = 0
    for i in range(s.counts[MARGINS]):
        if s.margin[0, i] == position and s.margin[1, i] == op:
            margin = s.margin[2, i]
    return margin
