"""Objective of a candidate: its compute cost and its memory excess above the capacity."""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute.liveness import update_liveness
from coop_plan.planner.search.compute.sequence import NONE, SearchState


@inlined
def candidate_cost(a: Program, s: SearchState, limit: float) -> float:
    """Compute cost of the candidate, µs; infinite above `limit` or if it is no schedule."""
    if s.now.candidate_cost > limit or not update_liveness(a, s):
        return np.inf
    return s.now.candidate_cost


@inner
def evaluate(a: Program, s: SearchState, capacity: int, limit: float) -> tuple[float, float]:
    """Cost (µs) of the candidate and its memory excess, as a share of `capacity` (bytes); 0 if it
    fits.

    The cost is infinite above `limit` or if the candidate is no schedule. Sets `peak_event`, the
    event with the largest excess, and `peak_excess`, its bytes above the capacity.
    """
    cost = candidate_cost(a, s, limit)
    if cost == np.inf:
        return np.inf, np.inf
    live, worst, total, area = 0, -1, 0.0, 0.0  # `live` is before block b
    for b in range(s.now.blocks):
        if s.block[b].is_dirty:
            summarize_block(s, b)
        # Only a block whose peak exceeds the capacity is scanned event by event.
        if live + s.block[b].peak > capacity:
            block_live = live
            for i in range(s.block[b].events):
                event = s.event[s.members[b, i]]
                block_live += event.allocated
                excess = block_live + event.transient - event.inplace_saved - capacity
                block_live -= event.freed
                if excess > 0:
                    total += excess
                    if excess > worst:
                        worst = excess
                        s.now.peak_event, s.now.peak_excess = s.block[b].start + i, excess
        area += live * s.block[b].events + s.block[b].area
        live += s.block[b].net
    s.now.area = area
    return cost, excess_share(worst, total, capacity)


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
    """Recompute the summary of a block and its list of long-lived copies."""
    # Relative to the live bytes at the block's start, which an edit of an earlier block changes.
    block = s.block[b]
    live = area = 0
    peak, last = -(1 << 62), NONE
    block.first_long = block.last_end = NONE
    gain = gain_per_byte = 0.0
    for i in range(block.events):
        event = s.event[s.members[b, i]]
        live += event.allocated
        peak = max(peak, live + event.transient - event.inplace_saved)
        area += live
        live -= event.freed
        # Writes come first in an event's list. A copy that ends in another block and can be evicted
        # joins the block's list of long-lived copies, for `repair` to draw from.
        x = event.first_access
        while x != NONE and not s.access[x].is_read:
            write = s.access[x]
            tensor, end = s.tensor[write.tensor], s.event[write.end].block
            if write.write == x and end != b and tensor.gain_per_byte > 0.0:
                write.next_long = NONE
                if last == NONE:
                    block.first_long = x
                else:
                    s.access[last].next_long = x
                last = x
                block.last_end = max(block.last_end, end)
                gain += tensor.gain
                gain_per_byte += tensor.gain_per_byte
            x = write.next_of_event
    block.net, block.peak, block.area, block.is_dirty = live, peak, area, False
    block.gain, block.gain_per_byte = gain, gain_per_byte
