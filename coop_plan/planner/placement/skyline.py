"""
Skyline packing: fill the lowest segment of the contour with the first buffer that fits inside it.

A buffer is placed on the contour of those below it, never into a hole. That is fast on large
instances: the contour is a list of level segments, a heap yields the lowest, and the buffer is
found by a scan over blocks of consecutive births, most of which two aggregates rule out. (Sekiyama
et al., *Profile-guided memory optimization for deep neural networks*, 2018, use the same heuristic
with the longest lifetime first.)
"""

import heapq

import numpy as np

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.jit import njit
from coop_plan.planner.placement.instance import Instance

BLOCK = 64
"""Buffers, or sections, per block of the aggregates below."""


@njit
def _skyline(order: Ints, first: Ints, last: Ints, height: Ints, sections: int) -> Ints:
    """Offsets in units for the buffers of `order`, all of positive height; earlier ones win."""
    count = len(order)
    offset = np.zeros(len(first), np.int64)
    # Candidates by birth, as positions in `order`; a placed one gets rank `count`.
    by_birth = np.argsort(first[order], kind="mergesort")
    dead = last[order[by_birth]]
    rank = by_birth.copy()
    births = np.zeros(sections + 1, np.int64)
    for i in order:
        births[first[i] + 1] += 1
    births = births.cumsum()  # births[t]: buffers born before section t
    # Per block of candidates: the best rank and the first death.
    blocks = (count + BLOCK - 1) // BLOCK
    best_rank, first_death = np.empty(blocks, np.int64), np.empty(blocks, np.int64)
    for k in range(blocks):
        best_rank[k] = rank[k * BLOCK : (k + 1) * BLOCK].min()
        first_death[k] = dead[k * BLOCK : (k + 1) * BLOCK].min()
    # The contour: segments [t, end[t]) at level[t], doubly linked; end[t] = 0: no segment at t.
    level, end = np.zeros(sections, np.int64), np.zeros(sections, np.int64)
    start = np.zeros(sections + 1, np.int64)  # of the segment that ends here
    end[0] = sections
    heap = [(np.int64(0), np.int64(0))]
    left = count
    while left:
        low, t = heapq.heappop(heap)
        if end[t] == 0 or level[t] != low:
            continue  # the segment has been raised or merged since it was pushed
        stop = end[t]
        # The first buffer of the order with a lifetime inside [t, stop).
        found, best = -1, count
        begin, limit = births[t], births[stop]
        for k in range(begin // BLOCK, (limit + BLOCK - 1) // BLOCK):
            if first_death[k] > stop or best_rank[k] >= best:
                continue
            for m in range(max(begin, k * BLOCK), min(limit, (k + 1) * BLOCK)):
                if rank[m] < best and dead[m] <= stop:
                    found, best = m, rank[m]
        if found < 0:
            # No buffer fits: raise the segment to its lower neighbour and merge both.
            left_level = level[start[t]] if t > 0 else np.int64(1) << 60
            right_level = level[stop] if stop < sections else np.int64(1) << 60
            level[t] = min(left_level, right_level)
            if right_level == level[t]:
                end[t] = end[stop]
                end[stop] = 0
            if left_level == level[t]:
                before = start[t]
                end[before] = end[t]
                end[t] = 0
                t = before
            start[end[t]] = t
            heapq.heappush(heap, (level[t], t))
            continue
        # Place it, remove it from its block, and split the segment around its lifetime.
        i = order[best]
        offset[i] = low
        a, b = first[i], last[i]
        left -= 1
        rank[found], dead[found] = count, np.int64(1) << 60
        k = found // BLOCK
        best_rank[k] = rank[k * BLOCK : (k + 1) * BLOCK].min()
        first_death[k] = dead[k * BLOCK : (k + 1) * BLOCK].min()
        if a > t:
            end[t], start[a] = a, t
            heapq.heappush(heap, (low, t))
        if b < stop:
            level[b], end[b], start[stop] = low, stop, b
            heapq.heappush(heap, (low, b))
        level[a], end[a], start[b] = low + height[i], b, a
        heapq.heappush(heap, (level[a], a))
    return offset


def skyline(instance: Instance, order: Ints) -> Ints:
    """Offsets in units of an `is_plain` instance."""
    solid = order[instance.height[order] > 0]
    if not len(solid):
        return np.zeros(instance.count, np.int64)
    return _skyline(solid, instance.first, instance.last, instance.height, instance.sections)
