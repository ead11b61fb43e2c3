"""Repair of a candidate: the cheapest tensor at its fullest event is evicted."""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute.event_list import block_at, place
from coop_plan.planner.search.compute.liveness import next_read, wanted_at
from coop_plan.planner.search.compute.moves import evicted_chance, recompute
from coop_plan.planner.search.compute.sequence import (
    ACCESSES,
    ALONG,
    CODE,
    COPY,
    DOES,
    END,
    LATER,
    LEAST_US,
    LONG,
    NONE,
    OVER,
    REACH,
    READ,
    TENSOR,
    WORST,
    SearchState,
)

DRAWS = 16
"""Copies drawn from all that may be there before each is looked at."""


@inner
def repair(a: Program, s: SearchState) -> bool:
    """
    Something that is only kept at the fullest event for its next read is computed again for that.

    Each is as likely as what it costs a byte is low.
    """
    worst = s.counts[WORST]
    t = _drawn(a, s, worst)
    if t == NONE:
        return False
    return recompute(
        a, s, a.producer[t], next_read(s, t, worst + 1), evicted_chance_at(a, s, t, worst)
    )


@inlined
def evicted_chance_at(a: Program, s: SearchState, t: int, worst: int) -> float:
    """The chance with which what a tensor is made from is computed again with it; `gains`."""
    kept, again = gains(a, s, t, worst)
    return 0.0 if np.random.random() * (kept + again) < kept else evicted_chance(s)


@inlined
def _drawn(a: Program, s: SearchState, worst: int) -> int:
    """
    A tensor that is only kept at the fullest event; NONE if there is none.

    Of the blocks before that event's it is known what all that they leave is worth, be it gone by
    then or not: a copy drawn by that is taken with the chance that it is worth so much.
    """
    last, over = block_at(s, worst), s.counts[OVER]
    op = s.event[s.row[last, worst - s.begin[last]], CODE]
    near, nearest = 0.0, NONE
    for i in range(worst - s.begin[last]):
        x = s.event[s.row[last, i], ACCESSES]
        while x != NONE and s.access[x, DOES] != READ:
            near, nearest = _either(s, near, nearest, x, _worth(a, s, x, worst, op))
            x = s.access[x, ALONG]
    wide = narrow = 0.0
    for b in range(last):
        if s.block[b, REACH] >= last:
            wide += s.weight[b, 0]
            narrow += s.weight[b, 1]
    by, scale = (0, 1.0) if wide <= narrow * over else (1, float(over))
    total = near + min(wide, narrow * over)
    for _ in range(DRAWS if total > near else 0):
        left = np.random.random() * total - near
        if left < 0.0:
            return int(nearest)
        x = _left_by_blocks(s, last, by, left / scale)
        if x == NONE:
            continue
        most = scale * s.worth[s.access[x, TENSOR], by]
        if np.random.random() * most < _worth(a, s, x, worst, op):
            return int(s.access[x, TENSOR])
    for b in range(last):
        x = s.block[b, LONG]
        while x != NONE:
            near, nearest = _either(s, near, nearest, x, _worth(a, s, x, worst, op))
            x = s.access[x, LATER]
    return int(nearest)


@inlined
def _either(s: SearchState, total: float, t: int, x: int, worth: float) -> tuple[float, int]:
    """One tensor of those before, worth `total` together, and of one more; and what all are."""
    total += worth
    if worth > 0.0 and np.random.random() * total < worth:
        t = s.access[x, TENSOR]
    return total, t


@inlined
def _left_by_blocks(s: SearchState, last: int, by: int, left: float) -> int:
    """Block at which the running sum over blocks reaches `left`, or NONE."""
    b = 0
    while b < last and (s.block[b, REACH] < last or left >= s.weight[b, by]):
        if s.block[b, REACH] >= last:
            left -= s.weight[b, by]
        b += 1
    x = s.block[b, LONG] if b < last else NONE
    while x != NONE and left >= s.worth[s.access[x, TENSOR], by]:
        left -= s.worth[s.access[x, TENSOR], by]
        x = s.access[x, LATER]
    return int(x)


@inlined
def _worth(a: Program, s: SearchState, x: int, worst: int, op: int) -> float:
    """Bytes freed per µs of recomputation if the copy of this access is evicted at the peak."""
    t = s.access[x, TENSOR]
    ended = s.access[x, COPY] != x or place(s, s.access[x, END]) <= worst
    if ended or s.worth[t, 1] == 0.0 or _held(a, op, t):
        return 0.0
    return max(*gains(a, s, t, worst))


@inlined
def gains(a: Program, s: SearchState, t: int, worst: int) -> tuple[float, float]:
    """
    Bytes a µs where a tensor is computed again instead of kept at an event.

    First where what it is made from and is not kept there is from then on, which only counts as one
    of those who read it: what one recompute keeps is there for the others, and of the inputs of a
    concatenation, say, all or none are worth keeping. Then where that is computed again as well.
    """
    maker, kept, us = a.producer[t], 0.0, 0.0
    for k in range(a.reads_ptr[maker], a.reads_ptr[maker + 1]):
        r = a.reads[k]
        if a.size[r] > 0 and not wanted_at(a, s, r, worst):
            kept, us = kept + s.part[r], us + s.renewal[r]
    over, cost = float(s.counts[OVER]), max(a.cost[maker], LEAST_US)
    return max(0.0, min(a.size[t] - kept, over)) / cost, min(a.size[t], over) / (cost + us)


@inlined
def _held(a: Program, op: int, t: int) -> bool:
    """True if an event reads a tensor and does not overwrite it."""
    held = False
    for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
        held = held or a.reads[k] == t
    for k in range(a.pairs_ptr[op], a.pairs_ptr[op + 1]):
        held = held and a.pairs_in[k] != t
    return held
