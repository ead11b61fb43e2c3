"""
DELTA's filter and director, its prefetch and its overlap, for an execution that knows no future.

Tang et al., DELTA: Dynamically Optimizing GPU Memory beyond Tensor Recomputation, arXiv 2203.15980,
2022. Of the paper only its abstract and summaries were at hand, which say what its parts are for
and that a tensor is swapped or computed again by comparing what both cost; and its fork of
DTR's PyTorch, whose score and neighbourhoods are DTR's. What they leave open is chosen here:

- The *filter* releases the tensor of least cost / (bytes x staleness), as DTR's h, where the cost
  is that of the cheaper action; without it the stalest goes, as in Capuchin and vDNN.
- The *director* swaps a tensor if its copies there and back take less than it and its evicted
  neighbours (e*) take to be computed again; without it all that may be swapped is.
- *Overlap*: a share of the arena is kept free or on its way to the host, by copies that begin while
  nobody asks for their bytes; without it a copy begins when an allocation fails.
- *Prefetch*: once something was fetched, what left last is fetched ahead, a few tensors at a time,
  where holes take them, as a backward pass wants things in that order; without it compute waits.
"""

import numpy as np

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.online.neighbours import neighbour_cost
from coop_plan.planner.online.space import NO_ROOM, allocate, free_bytes
from coop_plan.planner.online.state import (
    AWAY,
    BLOCKS,
    CLOCK,
    EVICTABLE,
    FETCHED,
    FLYING,
    FREE,
    HOSTED,
    LAST_ACCESS,
    LEAVING,
    LIVE,
    OUT_FREE,
    OWNER,
    PINS,
    SWAPPED,
    VICTIM,
    ArenaState,
)
from coop_plan.planner.online.transfers import (
    DIRECTS,
    FILTERS,
    OVERLAPS,
    PREFETCHES,
    RECOMPUTES,
    begin_fetch,
    begin_offload,
    directed_to_host,
    end_fetch,
    end_offload,
    swap_us,
)


@inlined
def _recomputable(s: ArenaState, t: int) -> bool:
    return s.tensor[EVICTABLE, t] == 1 and s.transfers & RECOMPUTES != 0


@inner
def filtered(a: Arrays, s: ArenaState, to_host: bool) -> int:
    """
    The tensor to release next, or -1; not one that is pinned or being copied.

    With `to_host`, of those that the director wants to copy there.
    """
    best, best_score = -1, np.inf
    for block in range(s.counts[BLOCKS]):
        t = s.block[OWNER, block]
        if t == FREE or t >= s.times.shape[1] or s.tensor[PINS, t] > 0:
            continue
        if s.tensor[LEAVING, t] == 1 or s.tensor[FLYING, t] == 1:
            continue
        if to_host and (
            s.tensor[HOSTED, t] == 1 or not directed_to_host(a, s, t, _recomputable(s, t))
        ):
            continue
        cost = swap_us(a, s, t)
        if _recomputable(s, t) and s.tensor[HOSTED, t] == 0 and s.transfers & DIRECTS != 0:
            cost = min(cost, neighbour_cost(s, t))
        elif _recomputable(s, t) and cost == np.inf:
            cost = neighbour_cost(s, t)
        if cost == np.inf:
            continue
        staleness = max(s.total[CLOCK] - s.times[LAST_ACCESS, t], s.min_staleness_us)
        score = cost / (a.size[t] * staleness) if s.transfers & FILTERS != 0 else 1.0 / staleness
        if score < best_score:
            best, best_score = t, score
    return best


@inner
def released(a: Arrays, s: ArenaState) -> int:
    """
    List as a victim what the filter says, or what has nearly left; returns how many, 1 or 0.

    A copy to the host is begun where the director wants one, unless waiting for one that is under
    way is over sooner.
    """
    best, soonest = -1, np.inf
    for block in range(s.counts[BLOCKS]):
        t = s.block[OWNER, block]
        if t == FREE or t >= s.times.shape[1] or s.tensor[PINS, t] > 0:
            continue
        if s.tensor[LEAVING, t] == 1 and s.times[AWAY, t] < soonest:
            best, soonest = t, s.times[AWAY, t]
    if best < 0 or soonest > s.total[CLOCK]:
        t = filtered(a, s, False)
        if t >= 0:
            copied = s.tensor[HOSTED, t] == 0 and directed_to_host(a, s, t, _recomputable(s, t))
            over = s.total[CLOCK]
            if copied:
                over = max(over, s.total[OUT_FREE]) + s.out_us[t]
            elif s.tensor[HOSTED, t] == 0:
                over += neighbour_cost(s, t)
            if over < soonest:
                best = t
                if copied:
                    begin_offload(a, s, t)
    if best < 0:
        return 0
    s.block[VICTIM, 0] = best
    return 1


@inner
def look_ahead(a: Arrays, s: ArenaState, position: int) -> None:
    """After an op: begin copies to the host, or from it, before anybody asks for them."""
    count = s.times.shape[1]
    if s.transfers & OVERLAPS != 0 and s.total[OUT_FREE] <= s.total[CLOCK]:
        spare = free_bytes(s)
        for t in range(count):
            if s.tensor[LEAVING, t] == 1:
                spare += a.size[t]
        if spare < s.ahead:
            t = filtered(a, s, True)
            if t >= 0:
                begin_offload(a, s, t)
    if s.transfers & PREFETCHES == 0 or s.counts[FETCHED] == 0:
        return
    last, flying = 0, 0
    for t in range(count):
        flying += s.tensor[FLYING, t]
    while flying < s.prefetched and last >= 0:
        last = -1
        for t in range(count):
            wanted = s.tensor[LIVE, t] == 0 and a.last_use[t] > position
            latest = last < 0 or s.tensor[SWAPPED, t] > s.tensor[SWAPPED, last]
            if s.tensor[HOSTED, t] == 1 and wanted and latest:
                last = t
        if last >= 0:
            at = allocate(s, a.size[last], last, False)
            if at == NO_ROOM:
                break
            begin_fetch(s, last, at)
            flying += 1


@inner
def end_copies(s: ArenaState) -> None:
    """At the end of the step: wait for all that is still being copied."""
    for t in range(s.times.shape[1]):
        if s.tensor[LEAVING, t] == 1:
            end_offload(s, t)
        if s.tensor[FLYING, t] == 1:
            end_fetch(s, t)
