"""Repair of a sequence: the cheapest tensor at its fullest event is evicted."""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute.event_list import block_at, length, place
from coop_plan.planner.search.compute.liveness import next_read
from coop_plan.planner.search.compute.objective import look_at
from coop_plan.planner.search.compute.repair import evicted_chance_at, gains
from coop_plan.planner.search.compute.sequence import (
    ACCESSES,
    ALONG,
    CODE,
    COPY,
    DIRTY,
    DOES,
    END,
    EVENT,
    LATER,
    LEAST_US,
    LONG,
    NEXT,
    NONE,
    OVER,
    REACH,
    READ,
    TENSOR,
    WORST,
)
from coop_plan.planner.search.makespan.moves import fetch, recompute
from coop_plan.planner.search.makespan.sequence import MarkerSearchState


@inner
def repair(a: Program, m: MarkerSearchState) -> bool:
    """
    Something that is only kept at the fullest event is not: the candidate was just evaluated.

    For its next read it is computed again, or fetched. Each is as likely as what it costs a byte is
    low.
    """
    s = m.orders
    worst = s.counts[WORST]
    if worst == NONE:
        return False
    last = block_at(s, worst)
    op, best, by_link, total = s.event[m.order[worst], CODE], NONE, False, 0.0
    for b in range(last + 1):
        if s.block[b, DIRTY] == 1:
            look_at(s, b)
        x = s.block[b, LONG] if b < last and s.block[b, REACH] >= last else NONE
        while x != NONE:
            best, by_link, total = _either(a, m, x, worst, op, best, by_link, total)
            x = s.access[x, LATER]
    for at in range(s.begin[last], worst):
        x = s.event[m.order[at], ACCESSES]
        while x != NONE and s.access[x, DOES] != READ:
            best, by_link, total = _either(a, m, x, worst, op, best, by_link, total)
            x = s.access[x, ALONG]
    if best == NONE:
        return False
    read = next_read(s, best, worst + 1)
    if read == length(s):
        return False
    if by_link:
        return fetch(a, m, best, read)
    return recompute(a, m, a.producer[best], read, evicted_chance_at(a, s, best, worst))


@inlined
def _either(
    a: Program,
    m: MarkerSearchState,
    x: int,
    worst: int,
    op: int,
    best: int,
    by_link: bool,
    total: float,
) -> tuple[int, bool, float]:
    """One tensor of those before, worth `total` together, and of one more; and what all are."""
    s, t = m.orders, m.orders.access[x, TENSOR]
    if s.access[x, COPY] != x or s.worth[t, 1] == 0.0 or place(s, s.access[x, END]) <= worst:
        return best, by_link, total
    # What is fetched is there from its first read on, more or less.
    fetched = s.event[s.access[x, EVENT], CODE] >= a.ops
    if fetched and place(s, s.access[s.access[x, NEXT], EVENT]) >= worst:
        return best, by_link, total
    for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
        if a.reads[k] == t:
            return best, by_link, total
    bytes_, maker = float(min(a.size[t], s.counts[OVER])), a.producer[t]
    if m.movable[t] == 1:
        us = m.in_us[t] + (0.0 if fetched else m.out_us[t])
        us *= m.numbers.link_price * 2.0 * np.random.random()
        total += bytes_ / max(us, LEAST_US)
        if np.random.random() * total < bytes_ / max(us, LEAST_US):
            best, by_link = t, True
    if s.again[maker] == 1 and a.evictable[t] == 1:
        gained = max(*gains(a, s, t, worst))
        total += gained
        if np.random.random() * total < gained:
            best, by_link = t, False
    return best, by_link, total
