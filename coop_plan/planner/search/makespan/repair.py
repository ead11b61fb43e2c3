"""Repair of a candidate above the capacity: evicts a tensor at the peak until its next read."""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute import columns as c
from coop_plan.planner.search.compute.event_list import block_at, length, position_of
from coop_plan.planner.search.compute.liveness import next_read
from coop_plan.planner.search.compute.moves import insert_prefetch, insert_recompute
from coop_plan.planner.search.compute.objective import summarize_block
from coop_plan.planner.search.compute.repair import draw_input_chance, recompute_gains
from coop_plan.planner.search.makespan.sequence import MakespanState


@inner
def repair(a: Program, m: MakespanState) -> bool:
    """Evict one tensor that is live but unused at the peak of the candidate evaluated last.

    Its next read is served by a recompute or a prefetch. Each choice has a probability proportional
    to its bytes freed per µs.
    """
    s = m.search
    peak = s.counts[c.PEAK_EVENT]
    if peak == c.NONE:
        return False
    peak_block = block_at(s, peak)
    op, choice, by_prefetch, total = s.event[m.order[peak], c.CODE], c.NONE, False, 0.0
    for b in range(peak_block + 1):
        if s.block[b, c.DIRTY] == 1:
            summarize_block(s, b)
        x = (
            s.block[b, c.FIRST_LONG]
            if b < peak_block and s.block[b, c.LAST_END] >= peak_block
            else c.NONE
        )
        while x != c.NONE:
            choice, by_prefetch, total = _reservoir_step(
                a, m, x, peak, op, choice, by_prefetch, total
            )
            x = s.access[x, c.NEXT_LONG]
    for at in range(s.block_start[peak_block], peak):
        x = s.event[m.order[at], c.FIRST_ACCESS]
        while x != c.NONE and s.access[x, c.ACCESS_KIND] != c.READ:
            choice, by_prefetch, total = _reservoir_step(
                a, m, x, peak, op, choice, by_prefetch, total
            )
            x = s.access[x, c.NEXT_OF_EVENT]
    if choice == c.NONE:
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
    s, t = m.search, m.search.access[x, c.TENSOR]
    ended = s.access[x, c.COPY] != x or position_of(s, s.access[x, c.END]) <= peak
    if ended or s.gain_bound[t, 1] == 0.0:
        return choice, by_prefetch, total
    # A prefetched copy becomes resident shortly before its first read.
    is_prefetched = s.event[s.access[x, c.EVENT], c.CODE] >= a.ops
    if is_prefetched and position_of(s, s.access[s.access[x, c.NEXT], c.EVENT]) >= peak:
        return choice, by_prefetch, total
    for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
        if a.reads[k] == t:
            return choice, by_prefetch, total
    bytes_ = float(min(a.size[t], s.counts[c.PEAK_EXCESS]))
    if s.movable[t] == 1:
        us = m.prefetch_us[t] + (0.0 if is_prefetched else m.offload_us[t])
        # A copy engine's µs counts 0.3 of compute's, on the mean.
        us *= 0.3 * 2.0 * np.random.random()
        total += bytes_ / max(us, c.MIN_COST_US)
        if np.random.random() * total < bytes_ / max(us, c.MIN_COST_US):
            choice, by_prefetch = t, True
    if s.rerun_for[t] == 1:
        gained = max(*recompute_gains(a, s, t, peak))
        total += gained
        if np.random.random() * total < gained:
            choice, by_prefetch = t, False
    return choice, by_prefetch, total
