"""Eviction rules: Coop's sliding window of adjacent blocks, DTR's and DTE's single tensor."""

import numpy as np

from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.online.neighbours import neighbour_cost
from coop_plan.planner.online.state import FREE, MIN_STALENESS_US, ArenaState, Rule


@inlined
def _cost(s: ArenaState, t: int) -> float:
    """e* / staleness, in µs per µs; infinite if `t` cannot be evicted now."""
    if t >= s.tensor.size or s.tensor[t].pins > 0 or not s.tensor[t].is_evictable:
        return np.inf
    staleness = s.now.clock_us - s.tensor[t].last_access_us
    return neighbour_cost(s, t) / max(staleness, MIN_STALENESS_US)


@inner
def cheapest_window(s: ArenaState, size: int) -> int:
    """Coop's sliding window: the cheapest run of adjacent blocks of at least `size` bytes.

    Lists its tensors as victims and returns their number. Two pointers move over the blocks in
    address order. Free blocks cost nothing; a block that cannot be evicted restarts the window
    behind it (Algorithm 1).
    """
    best_cost = np.inf
    best_start = best_end = 0
    start = window = 0
    total = 0.0
    for end in range(s.now.blocks):
        owner = s.block[end].owner
        cost = 0.0 if owner == FREE else _cost(s, owner)
        s.block[end].cost = cost
        if cost == np.inf:
            start, window, total = end + 1, 0, 0.0
            continue
        total += cost
        window += s.block[end].bytes
        # Shrink from the left as long as the window stays large enough.
        while window - s.block[start].bytes >= size:
            window -= s.block[start].bytes
            total -= s.block[start].cost
            start += 1
        if window >= size and total < best_cost:
            best_cost, best_start, best_end = total, start, end + 1
    victims = 0
    for block in range(best_start, best_end):
        if s.block[block].owner != FREE:
            s.victims[victims] = s.block[block].owner
            victims += 1
    return victims


@inner
def cheapest_tensor(s: ArenaState, rule: Rule) -> int:
    """DTR's and DTE's victim: the tensor with the least cost / (bytes × staleness).

    DTE adds adjacent free bytes to the tensor's own. Returns the number of victims, 1 or 0.
    """
    best_cost = np.inf
    victims = 0
    for block in range(s.now.blocks):
        owner = s.block[block].owner
        if owner == FREE:
            continue
        room = s.block[block].bytes
        if rule.counts_neighbours:
            if block > 0 and s.block[block - 1].owner == FREE:
                room += s.block[block - 1].bytes
            if block + 1 < s.now.blocks and s.block[block + 1].owner == FREE:
                room += s.block[block + 1].bytes
        cost = _cost(s, owner) / room
        if cost < best_cost:
            best_cost = cost
            s.victims[0] = owner
            victims = 1
    return victims
