"""Objective of a candidate: the sum of its costs, and its excess memory."""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute.liveness import run_fixed_length
from coop_plan.planner.search.compute.sequence import (
    ACCESSES,
    ALONG,
    AREA,
    BLOCK,
    BLOCKS,
    CODE,
    COMPUTE,
    COPY,
    DIRTY,
    DOES,
    DOWN,
    END,
    EVENTS,
    FIRST_RUN,
    FIRSTS,
    LATER,
    LIVED,
    LONG,
    MARGINS,
    MOST,
    NET,
    NONE,
    ONCE,
    OVER,
    REACH,
    READ,
    SAVED,
    TENSOR,
    UP,
    WORST,
    SearchState,
)

NOTHING = -(1 << 62)
"""Memory of an empty block, bytes."""


@inlined
def cost_of(a: Program, s: SearchState, limit: float) -> float:
    """Cost of the candidate, µs; infinite if it is no schedule or exceeds `limit`."""
    if s.sums[COMPUTE] > limit or not run_fixed_length(a, s):
        return np.inf
    return float(s.sums[COMPUTE])


@inner
def excess(s: SearchState, capacity: int) -> float:
    """
    Excess of a candidate over `capacity` (bytes), as a share; also finds the fullest event.

    The candidate is one whose cost is finite.
    """
    live, most, total, area = 0, -1, 0.0, 0.0
    margins, position = s.counts[MARGINS] > 0, 0
    for b in range(s.counts[BLOCKS]):
        if s.block[b, DIRTY] == 1:
            look_at(s, b)
        tight = margins and s.tight[position] < s.tight[position + s.block[b, FIRSTS] + 1]
        if tight or live + s.block[b, MOST] > capacity:
            within, current_sequence = live, position
            for i in range(s.block[b, EVENTS]):
                e = s.row[b, i]
                within += s.bytes[e, UP]
                over = within + s.bytes[e, ONCE] - s.bytes[e, SAVED] - capacity
                within -= s.bytes[e, DOWN]
                if tight:
                    if s.tight[current_sequence] < s.tight[current_sequence + 1]:
                        over += _margin(s, current_sequence, s.event[e, CODE])
                    current_sequence += s.event[e, FIRST_RUN]
                if over > 0:
                    total += over
                    if over > most:
                        most = over
                        s.counts[WORST], s.counts[OVER] = s.begin[b] + i, over
        area += live * s.block[b, EVENTS] + s.block[b, LIVED]
        live += s.block[b, NET]
        position += s.block[b, FIRSTS]
    s.sums[AREA] = area
    if most < 0:
        return 0.0
    return float(s.numbers.least_excess + (most + s.numbers.spread * total) / max(1, capacity))


@inlined
def look_at(s: SearchState, b: int) -> None:
    """Find what a block needs."""
    live = area = firsts = 0
    most, last = NOTHING, NONE
    s.block[b, LONG] = s.block[b, REACH] = NONE
    wide = narrow = 0.0
    for i in range(s.block[b, EVENTS]):
        e = s.row[b, i]
        live += s.bytes[e, UP]
        most = max(most, live + s.bytes[e, ONCE] - s.bytes[e, SAVED])
        area += live
        live -= s.bytes[e, DOWN]
        firsts += s.event[e, FIRST_RUN]
        x = s.event[e, ACCESSES]
        while x != NONE and s.access[x, DOES] != READ:
            t, end = s.access[x, TENSOR], s.event[s.access[x, END], BLOCK]
            if s.access[x, COPY] == x and end != b and s.worth[t, 1] > 0.0:
                s.access[x, LATER] = NONE
                if last == NONE:
                    s.block[b, LONG] = x
                else:
                    s.access[last, LATER] = x
                last = x
                s.block[b, REACH] = max(s.block[b, REACH], end)
                wide += s.worth[t, 0]
                narrow += s.worth[t, 1]
            x = s.access[x, ALONG]
    s.block[b, NET], s.block[b, MOST], s.block[b, LIVED] = live, most, area
    s.block[b, FIRSTS], s.block[b, DIRTY] = firsts, 0
    s.weight[b, 0], s.weight[b, 1] = wide, narrow


@inlined
def _margin(s: SearchState, position: int, op: int) -> int:
    """Bytes to leave free while the op runs for this position."""
    margin = 0
    for i in range(s.counts[MARGINS]):
        if s.margin[0, i] == position and s.margin[1, i] == op:
            margin = s.margin[2, i]
    return margin
