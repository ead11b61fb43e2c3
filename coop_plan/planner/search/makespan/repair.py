"""Repair of a candidate above the capacity: evicts a tensor at the peak until its next read."""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute.event_list import block_at, length, position_of
from coop_plan.planner.search.compute.liveness import next_read
from coop_plan.planner.search.compute.moves import insert_prefetch, insert_recompute
from coop_plan.planner.search.compute.objective import summarize_block
from coop_plan.planner.search.compute.repair import draw_input_chance, recompute_gains
from coop_plan.planner.search.compute.sequence import MIN_COST_US, NONE
from coop_plan.planner.search.makespan.sequence import MakespanState


@inner
def repair(a: Program, m: MakespanState) -> bool:
    """Evict one tensor that is live but unused at the peak of the candidate evaluated last.

    Its next read is served by a recompute or a prefetch. Each choice has a probability proportional
    to its bytes freed per µs.
    """
    s = m.search
    peak = s.now.peak_event
    if peak == NONE:
        return False
    peak_block = block_at(s, peak)
    op, choice, by_prefetch, total = s.event[m.order[peak]].code, NONE, False, 0.0
    for b in range(peak_block + 1):
        if s.block[b].is_dirty:
            summarize_block(s, b)
        x = s.block[b].first_long if b < peak_block and s.block[b].last_end >= peak_block else NONE
        while x != NONE:
            choice, by_prefetch, total = _reservoir_step(
                a, m, x, peak, op, choice, by_prefetch, total
            )
            x = s.access[x].next_long
    for at in range(s.block[peak_block].start, peak):
        x = s.event[m.order[at]].first_access
        while x != NONE and not s.access[x].is_read:
            choice, by_prefetch, total = _reservoir_step(
                a, m, x, peak, op, choice, by_prefetch, total
            )
            x = s.access[x].next_of_event
    if choice == NONE:
        return False
    read = next_read(s, choice, peak + 1)
    if read == length(s):
        return False
    if by_prefetch:
        return insert_prefetch(a, s, choice, read)
    return insert_recompute(a, s, a.producer[choice], read, draw_input_chance(a, s, choice, peak))


@inlined
def _reservoir_step(
    a: Program,
    m: MakespanState,
    x: int,
    peak: int,
    op: int,
    choice: int,
    by_prefetch: bool,
    total: float,
) -> tuple[int, bool, float]:
    """One step of weighted reservoir sampling over both ways to evict the copy of write `x`.

    Returns the choice, True if it is a prefetch, and the new total weight.
    """
    s, t = m.search, m.search.access[x].tensor
    ended = s.access[x].write != x or position_of(s, s.access[x].end) <= peak
    if ended or s.tensor[t].gain_per_byte == 0.0:
        return choice, by_prefetch, total
    # A prefetched copy becomes resident shortly before its first read.
    is_prefetched = s.event[s.access[x].event].code >= a.ops
    if is_prefetched and position_of(s, s.access[s.access[x].next].event) >= peak:
        return choice, by_prefetch, total
    for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
        if a.reads[k] == t:
            return choice, by_prefetch, total
    bytes_ = float(min(a.size[t], s.now.peak_excess))
    if s.tensor[t].is_movable:
        us = m.tensor[t].prefetch_us + (0.0 if is_prefetched else m.tensor[t].offload_us)
        # A copy engine's µs counts 0.3 of compute's, on the mean.
        us *= 0.3 * 2.0 * np.random.random()
        us += (1.0 if is_prefetched else 2.0) * m.flow.copy_launch_us
        total += bytes_ / max(us, MIN_COST_US)
        if np.random.random() * total < bytes_ / max(us, MIN_COST_US):
            choice, by_prefetch = t, True
    if s.tensor[t].can_rerun:
        gained = max(*recompute_gains(a, s, t, peak))
        total += gained
        if np.random.random() * total < gained:
            choice, by_prefetch = t, False
    return choice, by_prefetch, total
