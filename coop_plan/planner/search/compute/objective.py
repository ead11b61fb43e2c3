"""Objective of a candidate: its compute cost and its memory excess above the capacity."""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute import columns as c
from coop_plan.planner.search.compute.liveness import update_liveness
from coop_plan.planner.search.compute.sequence import SearchState


@inlined
def candidate_cost(a: Program, s: SearchState, limit: float) -> float:
    """Compute cost of the candidate, µs; infinite above `limit` or if it is no schedule."""
    if s.sums[c.CANDIDATE_COST] > limit or not update_liveness(a, s):
        return np.inf
    return float(s.sums[c.CANDIDATE_COST])


@inner
def memory_excess(s: SearchState, capacity: int) -> float:
    """Memory excess of a candidate of finite cost, as a share of `capacity` (bytes); 0 if it fits.

    Sets `PEAK_EVENT`, the event with the largest excess, and `PEAK_EXCESS`, its bytes above the
    capacity.
    """
    live, worst, total, area = 0, -1, 0.0, 0.0  # `live` is before block b
    for b in range(s.counts[c.BLOCKS]):
        if s.block[b, c.DIRTY] == 1:
            summarize_block(s, b)
        # Only a block whose peak exceeds the capacity is scanned event by event.
        if live + s.block[b, c.PEAK] > capacity:
            block_live = live
            for i in range(s.block[b, c.EVENTS]):
                e = s.members[b, i]
                block_live += s.event_bytes[e, c.ALLOCATED]
                excess = block_live + s.event_bytes[e, c.TRANSIENT]
                excess -= s.event_bytes[e, c.INPLACE_SAVED] + capacity
                block_live -= s.event_bytes[e, c.FREED]
                if excess > 0:
                    total += excess
                    if excess > worst:
                        worst = excess
                        s.counts[c.PEAK_EVENT], s.counts[c.PEAK_EXCESS] = (
                            s.block_start[b] + i,
                            excess,
                        )
        area += live * s.block[b, c.EVENTS] + s.block[b, c.BLOCK_AREA]
        live += s.block[b, c.NET]
    s.sums[c.AREA] = area
    return excess_share(worst, total, capacity)


@inlined
def excess_share(worst: int, total: float, capacity: int) -> float:
    """Memory excess as a share of `capacity`, from its maximum and its sum over all events.

    At least 0.002 if there is any. The sum rewards progress at other events than the peak.
    """
    if worst <= 0:
        return 0.0
    return 0.002 + (worst + 0.2 * total) / max(1, capacity)


@inlined
def summarize_block(s: SearchState, b: int) -> None:
    """Recompute the summary columns of a block and its list of long-lived copies."""
    # Relative to the live bytes at the block's start, which an edit of an earlier block changes.
    live = area = 0
    peak, last = -(1 << 62), c.NONE
    s.block[b, c.FIRST_LONG] = s.block[b, c.LAST_END] = c.NONE
    gain = gain_per_byte = 0.0
    for i in range(s.block[b, c.EVENTS]):
        e = s.members[b, i]
        live += s.event_bytes[e, c.ALLOCATED]
        peak = max(peak, live + s.event_bytes[e, c.TRANSIENT] - s.event_bytes[e, c.INPLACE_SAVED])
        area += live
        live -= s.event_bytes[e, c.FREED]
        # Writes come first in an event's list. A copy that ends in another block and can be evicted
        # joins the block's list of long-lived copies, for `repair` to draw from.
        x = s.event[e, c.FIRST_ACCESS]
        while x != c.NONE and s.access[x, c.ACCESS_KIND] != c.READ:
            t, end = s.access[x, c.TENSOR], s.event[s.access[x, c.END], c.BLOCK]
            if s.access[x, c.COPY] == x and end != b and s.gain_bound[t, 1] > 0.0:
                s.access[x, c.NEXT_LONG] = c.NONE
                if last == c.NONE:
                    s.block[b, c.FIRST_LONG] = x
                else:
                    s.access[last, c.NEXT_LONG] = x
                last = x
                s.block[b, c.LAST_END] = max(s.block[b, c.LAST_END], end)
                gain += s.gain_bound[t, 0]
                gain_per_byte += s.gain_bound[t, 1]
            x = s.access[x, c.NEXT_OF_EVENT]
    s.block[b, c.NET], s.block[b, c.PEAK], s.block[b, c.BLOCK_AREA] = live, peak, area
    s.block[b, c.DIRTY] = 0
    s.long_gain[b, 0], s.long_gain[b, 1] = gain, gain_per_byte
