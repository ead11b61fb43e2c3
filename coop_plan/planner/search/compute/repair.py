"""Repair of a candidate above the capacity: evict one tensor at the peak until its next read."""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute.event_list import block_at, position_of
from coop_plan.planner.search.compute.liveness import is_live_at, next_read
from coop_plan.planner.search.compute.moves import (
    draw_evicted_chance,
    insert_prefetch,
    insert_recompute,
)
from coop_plan.planner.search.compute.objective import summarize_block
from coop_plan.planner.search.compute.sequence import MIN_COST_US, NONE, Block, SearchState, Tensor


@inner
def repair(a: Program, s: SearchState) -> bool:
    """Serve the next read of a tensor that is live but unused at the peak by a new copy.

    Tensor and copy, a recompute or a prefetch, are drawn with probability proportional to the bytes
    freed per µs.
    """
    peak = s.now.peak_event
    x = _draw_victim(a, s, peak) if peak != NONE else NONE
    if x == NONE:
        return False
    t = s.access[x].tensor
    read = next_read(s, t, peak + 1)
    rerun, prefetched = _rerun_gain(a, s, t, peak), _prefetch_gain(a, s, x, peak)
    if prefetched > 0.0 and np.random.random() * (rerun + prefetched) < prefetched:
        return insert_prefetch(a, s, t, read)
    extend, recompute = _recompute_gains(a, s, t, peak)
    chance = 0.0 if np.random.random() * (extend + recompute) < extend else draw_evicted_chance()
    return insert_recompute(a, s, a.producer[t], read, chance)


@inlined
def _draw_victim(a: Program, s: SearchState, peak: int) -> int:
    """Draw the write of a copy that is live but unused at event `peak`, by its gain; NONE if none.

    Long-lived copies of earlier blocks are drawn by an upper bound on their gain and accepted with
    probability gain / bound. That avoids a scan of all live tensors.
    """
    peak_block, excess = block_at(s, peak), s.now.peak_excess
    op = s.event[s.members[peak_block, peak - s.block[peak_block].start]].code
    near_gain, near = 0.0, NONE
    # Copies that begin in the peak's own block: exact gains, by reservoir sampling.
    for i in range(peak - s.block[peak_block].start):
        x = s.event[s.members[peak_block, i]].first_access
        while x != NONE and not s.access[x].is_read:
            near_gain, near = _reservoir_step(near_gain, near, x, _gain(a, s, x, peak, op))
            x = s.access[x].next_of_event
    # Copies of earlier blocks: a gain is at most size / cost, and at most excess / cost. The
    # smaller of the two sums is used as the bound.
    gain = gain_per_byte = 0.0
    for b in range(peak_block):
        if s.block[b].is_dirty:
            summarize_block(s, b)
        if s.block[b].last_end >= peak_block:
            gain += s.block[b].gain
            gain_per_byte += s.block[b].gain_per_byte
    per_byte = gain > gain_per_byte * excess
    scale = float(excess) if per_byte else 1.0
    total = near_gain + min(gain, gain_per_byte * excess)
    for _ in range(16 if total > near_gain else 0):
        left = np.random.random() * total - near_gain
        if left < 0.0:
            return near
        x = _find_by_weight(s, peak_block, per_byte, left / scale)
        if x == NONE:
            continue
        bound = scale * _bound(s.tensor[s.access[x].tensor], per_byte)
        if np.random.random() * bound < _gain(a, s, x, peak, op):
            return x
    # All draws rejected: scan every long-lived copy.
    for b in range(peak_block):
        x = s.block[b].first_long
        while x != NONE:
            near_gain, near = _reservoir_step(near_gain, near, x, _gain(a, s, x, peak, op))
            x = s.access[x].next_long
    return near


@inlined
def _reservoir_step(total: float, choice: int, x: int, weight: float) -> tuple[float, int]:
    """One step of weighted reservoir sampling; returns the new total weight and the choice."""
    total += weight
    if weight > 0.0 and np.random.random() * total < weight:
        choice = x
    return total, choice


@inlined
def _find_by_weight(s: SearchState, peak_block: int, per_byte: bool, left: float) -> int:
    """The long-lived copy at which the running sum of bounds exceeds `left`; NONE if none does."""
    b = 0
    while b < peak_block:
        if s.block[b].last_end >= peak_block:
            if left < _bound(s.block[b], per_byte):
                break
            left -= _bound(s.block[b], per_byte)
        b += 1
    x = s.block[b].first_long if b < peak_block else NONE
    while x != NONE and left >= _bound(s.tensor[s.access[x].tensor], per_byte):
        left -= _bound(s.tensor[s.access[x].tensor], per_byte)
        x = s.access[x].next_long
    return x


@inlined
def _bound(of: Block | Tensor, per_byte: bool) -> float:
    """Bound on the gain of an eviction, or that for one byte."""
    return of.gain_per_byte if per_byte else of.gain


@inlined
def _gain(a: Program, s: SearchState, x: int, peak: int, op: int) -> float:
    """Bytes freed per µs of both ways to evict the copy of write `x` at the peak."""
    t = s.access[x].tensor
    ended = s.access[x].write != x or position_of(s, s.access[x].end) <= peak
    if ended or s.tensor[t].gain_per_byte == 0.0 or _is_pinned(a, op, t):
        return 0.0
    if _is_ahead(a, s, x, peak):
        return 0.0
    return _rerun_gain(a, s, t, peak) + _prefetch_gain(a, s, x, peak)


@inlined
def _is_ahead(a: Program, s: SearchState, x: int, peak: int) -> bool:
    """True if the copy of write `x` is a prefetched one, resident only after the peak."""
    if s.event[s.access[x].event].code < a.ops:
        return False
    return position_of(s, s.access[s.access[x].next].event) >= peak


@inlined
def _prefetch_gain(a: Program, s: SearchState, x: int, peak: int) -> float:
    """Bytes freed per µs, at the rates of `Tensor`, if the copy of write `x` goes to the host."""
    tensor = s.tensor[s.access[x].tensor]
    if not tensor.is_movable:
        return 0.0
    bytes_ = min(a.size[s.access[x].tensor], s.now.peak_excess)
    is_away = s.event[s.access[x].event].code >= a.ops  # a prefetched copy is there already
    return float(bytes_ * (tensor.again_per_byte if is_away else tensor.away_per_byte))


@inlined
def _rerun_gain(a: Program, s: SearchState, t: int, peak: int) -> float:
    """Bytes freed per µs if `t` is recomputed: the larger of `_recompute_gains`."""
    return max(*_recompute_gains(a, s, t, peak)) if s.tensor[t].can_rerun else 0.0


@inlined
def _recompute_gains(a: Program, s: SearchState, t: int, peak: int) -> tuple[float, float]:
    """Gains, in bytes per µs, of evicting `t` at the peak and recomputing it later.

    First with its evicted inputs kept live for it: an input read by k ops is charged 1/k of its
    bytes, because one recompute keeps it live for all of them. Else no input of a concatenation
    would ever be worth keeping. Second with those inputs recomputed as well.
    """
    maker, extended, us = a.producer[t], 0.0, 0.0
    for k in range(a.reads_ptr[maker], a.reads_ptr[maker + 1]):
        source = a.reads[k]
        if a.size[source] > 0 and not is_live_at(a, s, source, peak):
            extended, us = extended + s.tensor[source].input_share, us + s.tensor[source].input_us
    excess, cost = float(s.now.peak_excess), max(a.cost[maker], MIN_COST_US)
    return max(0.0, min(a.size[t] - extended, excess)) / cost, min(a.size[t], excess) / (cost + us)


@inlined
def _is_pinned(a: Program, op: int, t: int) -> bool:
    """True if op `op` reads `t` and does not overwrite it."""
    pinned = False
    for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
        pinned = pinned or a.reads[k] == t
    for k in range(a.pairs_ptr[op], a.pairs_ptr[op + 1]):
        pinned = pinned and a.pairs_in[k] != t
    return pinned
