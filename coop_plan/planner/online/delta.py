"""DELTA's filter and director, its prefetch and its overlap, for an online execution.

Tang et al., DELTA: Dynamically Optimizing GPU Memory beyond Tensor Recomputation, arXiv 2203.15980,
2022. Only its abstract and summaries were available, and its fork of DTR's PyTorch, whose score and
neighbourhoods are DTR's. They say what each part is for, and that the director compares the costs
of swapping and recomputing. The choices they leave open are made here:

- The *filter* releases the tensor with the least cost / (bytes x staleness), as DTR's h, with the
  cost of the cheaper action. Without it the stalest tensor is released, as in Capuchin and vDNN.
- The *director* swaps a tensor if its copies there and back take less than recomputing it and its
  evicted neighbours (e*). Without it every tensor that can be swapped is.
- *Overlap*: a share of the arena is kept free or being offloaded, by copies that begin before an
  allocation needs their bytes. Without it a copy begins when an allocation fails.
- *Prefetch*: after the first prefetch, the tensors offloaded last are prefetched ahead, a few at a
  time, as a backward pass reads them in that order. Without it compute waits for each.

Residents with homes on the host are tensors that are swapped, never recomputed. They begin the step
on the host. A copy there is valid until an op overwrites the resident: until then a release costs
no offload. After its last use an overwritten one is offloaded. All iterations read residents in one
order, so those that are read next are prefetched ahead, two at a time.
"""

import numpy as np

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.online.neighbours import neighbour_cost
from coop_plan.planner.online.space import NO_ROOM, allocate, free_bytes
from coop_plan.planner.online.state import FREE, MIN_STALENESS_US, ArenaState
from coop_plan.planner.online.transfers import (
    begin_offload,
    begin_prefetch,
    directed_to_host,
    end_offload,
    end_prefetch,
    swap_us,
)


@inlined
def _recomputable(s: ArenaState, t: int) -> bool:
    return s.tensor[t].is_evictable and s.transfers.recomputes


@inner
def filter_victim(a: Arrays, s: ArenaState, to_host: bool) -> int:
    """The tensor to release next, or -1; it is not pinned and not being copied.

    With `to_host` only tensors that the director offloads count.
    """
    best, best_score = -1, np.inf
    for block in range(s.now.blocks):
        t = s.block[block].owner
        if t == FREE or t >= s.tensor.size or s.tensor[t].pins > 0:
            continue
        if s.tensor[t].is_leaving or s.tensor[t].is_arriving:
            continue
        if to_host and (
            s.tensor[t].is_hosted or not directed_to_host(a, s, t, _recomputable(s, t))
        ):
            continue
        # Cost of the cheaper action that the director allows.
        cost = swap_us(a, s, t)
        if _recomputable(s, t) and not s.tensor[t].is_hosted and s.transfers.director:
            cost = min(cost, neighbour_cost(s, t))
        elif _recomputable(s, t) and cost == np.inf:
            cost = neighbour_cost(s, t)
        if cost == np.inf:
            continue
        staleness = max(s.now.clock_us - s.tensor[t].last_access_us, MIN_STALENESS_US)
        score = cost / (a.size[t] * staleness) if s.transfers.filter else 1.0 / staleness
        if score < best_score:
            best, best_score = t, score
    return best


@inner
def next_release(a: Arrays, s: ArenaState) -> int:
    """List the next victim; returns the number of victims, 1 or 0.

    That is the filter's choice, whose offload begins here if the director wants one, or a tensor
    whose offload ends sooner.
    """
    best, early, soonest = -1, -1, np.inf
    for block in range(s.now.blocks):
        t = s.block[block].owner
        if t == FREE or t >= s.tensor.size or s.tensor[t].pins > 0:
            continue
        if s.tensor[t].is_leaving and s.tensor[t].offload_end_us < soonest:
            best, soonest = t, s.tensor[t].offload_end_us
        if s.tensor[t].is_home and s.tensor[t].is_arriving:
            early = t
    if best < 0 or soonest > s.now.clock_us:
        t = filter_victim(a, s, False)
        if t >= 0:
            offloads = not s.tensor[t].is_hosted and directed_to_host(a, s, t, _recomputable(s, t))
            free_at = s.now.clock_us
            if offloads:
                free_at = max(free_at, s.now.out_free_us) + s.tensor[t].offload_us
            elif not s.tensor[t].is_hosted:
                free_at += neighbour_cost(s, t)
            if free_at < soonest:
                best = t
                if offloads:
                    begin_offload(a, s, t)
    if best < 0:
        best = early  # it was prefetched too early
    if best < 0:
        return 0
    s.victims[0] = best
    return 1


@inner
def start_copies_ahead(a: Arrays, s: ArenaState, position: int) -> None:
    """After an op: begin offloads and prefetches ahead of need."""
    count = s.tensor.size
    # Overlap: free bytes and those being offloaded are below the reserve.
    if s.transfers.overlap and s.now.out_free_us <= s.now.clock_us:
        spare = free_bytes(s)
        for t in range(count):
            if s.tensor[t].is_leaving:
                spare += a.size[t]
        if spare < s.reserve_bytes:
            t = filter_victim(a, s, True)
            if t >= 0:
                begin_offload(a, s, t)
    if not s.transfers.prefetch:
        return
    latest, arriving, copying, home = 0, 0, 0, 0
    for t in range(count):
        arriving += s.tensor[t].is_arriving and not s.tensor[t].is_home
        copying += s.tensor[t].is_arriving and s.tensor[t].prefetch_end_us > s.now.clock_us
    # Prefetch: the home that is read next first, as long as a free block holds it.
    while copying < 2 and home >= 0:
        home = _next_home(a, s, position)
        if home >= 0:
            at = allocate(s, a.size[home], home, False)
            if at == NO_ROOM:
                break
            begin_prefetch(s, home, at)
            copying += 1
    if not s.now.has_prefetched:
        return
    # Prefetch: the tensor offloaded last first, as long as a free block holds it.
    while arriving < 2 and latest >= 0:
        latest = -1
        for t in range(count):
            absent = not s.tensor[t].is_live and not s.tensor[t].is_home
            wanted = absent and a.last_use[t] > position
            is_latest = latest < 0 or s.tensor[t].offload_order > s.tensor[latest].offload_order
            if s.tensor[t].is_hosted and wanted and is_latest:
                latest = t
        if latest >= 0:
            at = allocate(s, a.size[latest], latest, False)
            if at == NO_ROOM:
                break
            begin_prefetch(s, latest, at)
            arriving += 1


@inner
def _next_home(a: Arrays, s: ArenaState, position: int) -> int:
    """The home not in the arena that the program reads next after op `position`, or -1."""
    found, soonest = -1, a.ops
    for t in range(s.tensor.size):
        if s.tensor[t].is_home and not s.tensor[t].is_live:
            for k in range(a.uses_ptr[t], a.uses_ptr[t + 1]):
                if a.uses[k] > position:
                    if a.uses[k] < soonest:
                        found, soonest = t, a.uses[k]
                    break
    return found


@inner
def end_copies(s: ArenaState) -> None:
    """At the end of the step: wait for all copies."""
    for t in range(s.tensor.size):
        if s.tensor[t].is_leaving:
            end_offload(s, t)
        if s.tensor[t].is_arriving:
            end_prefetch(s, t)
