"""
Skyline packing: fill the lowest stretch of time first, with the first buffer of an order inside it.

A buffer is put on the outline of those below it, never into a hole under them. That makes it fast
on large instances: the outline is a list of level stretches, the lowest comes from a heap, and the
buffer that fits inside from a scan over blocks of neighbouring births, most of which are passed
over by two numbers. (Sekiyama et al., *Profile-guided memory optimization for deep neural
networks*, 2018, use the same heuristic with the longest lifetime first.)
"""

import heapq

import numpy as np

from coop_plan.planner.core.jit import njit
from coop_plan.planner.placement.instance import Instance, Ints

BLOCK = 64


@njit
def _skyline(order: Ints, first: Ints, last: Ints, height: Ints, sections: int) -> Ints:
    """Offsets in units for the buffers of `order`, all of positive height; first is preferred."""
    count = len(order)
    offset = np.zeros(len(first), np.int64)
    by_birth = np.argsort(first[order], kind="mergesort")  # positions in `order`
    dead = last[order[by_birth]]
    rank = by_birth.copy()  # count: placed
    births = np.zeros(sections + 1, np.int64)
    for i in order:
        births[first[i] + 1] += 1
    births = births.cumsum()  # births[t]: buffers born before section t
    blocks = (count + BLOCK - 1) // BLOCK
    best_rank, first_death = np.empty(blocks, np.int64), np.empty(blocks, np.int64)
    for k in range(blocks):
        best_rank[k] = rank[k * BLOCK : (k + 1) * BLOCK].min()
        first_death[k] = dead[k * BLOCK : (k + 1) * BLOCK].min()
    # The outline: stretches [t, end[t]) at level[t], chained both ways; end[t] = 0: no stretch.
    level, end = np.zeros(sections, np.int64), np.zeros(sections, np.int64)
    start = np.zeros(sections + 1, np.int64)  # of the stretch that ends here
    end[0] = sections
    heap = [(np.int64(0), np.int64(0))]
    left = count
    while left:
        low, t = heapq.heappop(heap)
        if end[t] == 0 or level[t] != low:
            continue  # this stretch has been raised or merged away since
        stop = end[t]
        found, best = -1, count
        begin, limit = births[t], births[stop]
        for k in range(begin // BLOCK, (limit + BLOCK - 1) // BLOCK):
            if first_death[k] > stop or best_rank[k] >= best:
                continue
            for m in range(max(begin, k * BLOCK), min(limit, (k + 1) * BLOCK)):
                if rank[m] < best and dead[m] <= stop:
                    found, best = m, rank[m]
        if found < 0:
            # Nothing fits: up to the lower neighbour, and one with it.
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
    """Offsets in units. Knows lifetimes and heights only: no fixed buffers, no extra conflicts."""
    solid = order[instance.height[order] > 0]
    if not len(solid):
        return np.zeros(instance.count, np.int64)
    return _skyline(solid, instance.first, instance.last, instance.height, instance.sections)


@njit
def _drop(order: Ints, first: Ints, last: Ints, height: Ints, sections: int) -> Ints:
    """Offsets in units: each buffer of `order` falls onto the outline of those before it."""
    offset = np.zeros(len(first), np.int64)
    # The outline per section, and the largest of each block; a block may be level throughout.
    outline = np.zeros(sections, np.int64)
    highest = np.zeros((sections + BLOCK - 1) // BLOCK, np.int64)
    level = np.zeros(len(highest), np.bool_)
    for i in order:
        top = np.int64(0)
        for fill in range(2):
            t = first[i]
            while t < last[i]:
                k = t // BLOCK
                begin, stop = k * BLOCK, min(sections, (k + 1) * BLOCK)
                if t == begin and last[i] >= stop:
                    if fill:
                        highest[k], level[k] = top, True
                    else:
                        top = max(top, highest[k])
                    t = stop
                    continue
                if level[k]:
                    outline[begin:stop] = highest[k]
                    level[k] = False
                stop = min(stop, last[i])
                if fill:
                    outline[t:stop] = top
                    highest[k] = max(highest[k], top)
                else:
                    top = max(top, outline[t:stop].max())
                t = stop
            if not fill:
                offset[i] = top
                top += height[i]
    return offset


def drop(instance: Instance, order: Ints) -> Ints:
    """
    Offsets in units. In the order of a placement's offsets none lies higher than in it.

    As `skyline`, it knows lifetimes and heights only.
    """
    solid = order[instance.height[order] > 0]
    return _drop(solid, instance.first, instance.last, instance.height, instance.sections)
