"""Offline (Belady-style) eviction: executes the program at a logical budget and evicts by next use.

No tensor has an address yet. Memory is exact: a tensor is freed after its last use, unless an
evicted tensor will be recomputed from it. When an op does not fit, the live tensor with the least

    closure cost / (bytes x distance^alpha)

is evicted. The closure is the set of ops to run again for the tensor's next use, given the current
residents; with `foresee` tensors that will be dead by then do not count as residents. The distance
to that use is a number of program positions. A tensor's next use includes those of evicted tensors
that are recomputed from it.

Closures and next uses are cached per tensor and updated only after a change nearby. If many tensors
are live, one scan selects a pool of victims for several evictions.
"""

import numpy as np

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.jit import inlined, inner, njit
from coop_plan.planner.heuristic import columns as c
from coop_plan.planner.heuristic.eviction_state import EvictionState
from coop_plan.planner.heuristic.recompute_cost import (
    banish,
    closure_cost,
    mark_dirty,
    mark_relatives_dirty,
    next_demand,
    propagate_demand,
)


@njit
def run_evictions(
    a: Arrays, s: EvictionState, position: int, cost: float, cost_limit: float, events: int
) -> tuple[int, int, float]:
    """Continue a run from a program position and its cost (µs) for about `events` events.

    Returns (failed op or -1, next position, cost in µs). A run fails if it exceeds its record or
    `cost_limit` (µs).
    """
    enough = s.counts[c.EVENTS] + events
    while position < a.ops and s.counts[c.EVENTS] < enough:
        ops = _order_recomputes(a, s, position)
        for step in range(ops):
            op = s.op[c.ORDER, step]
            cost += a.cost[op]
            if s.counts[c.EVENTS] >= s.event.size or cost > cost_limit:
                return position, position, cost
            need = _choose_inplace(a, s, op, position)
            if not _make_room(a, s, need, position):
                return position, position, cost
            _execute(a, s, op, position)
            _free_operands(a, s, op, position, step == ops - 1)
        if s.counts[c.CHECK_COUNT] > 0:
            _free_retained(a, s, position)
        position += 1
    return -1, position, cost


@inlined
def _order_recomputes(a: Arrays, s: EvictionState, goal: int) -> int:
    """List the ops to run for `goal`, itself last, and pin their inputs; returns their number.

    Depth-first; of an op's missing inputs, the one produced earliest comes first. In the order of
    its inputs a long chain would produce all side inputs of its links before the first link.
    """
    s.counts[c.STAMP] += 1
    stamp = s.counts[c.STAMP]
    ordered = 0
    depth = 0
    pushed = goal
    while depth >= 0:
        if pushed >= 0:
            s.op[c.SEEN, pushed] = stamp
            s.stack[depth] = pushed
            for k in range(a.reads_ptr[pushed], a.reads_ptr[pushed + 1]):
                s.tensor[c.PINS, a.reads[k]] += 1
            pushed = -1
        op = s.stack[depth]
        for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
            t = a.reads[k]
            producer = a.producer[t]
            if s.tensor[c.LIVE, t] == 0 and s.op[c.SEEN, producer] != stamp:
                pushed = producer if pushed < 0 else min(pushed, producer)
        if pushed >= 0:
            depth += 1
        else:
            s.op[c.ORDER, ordered] = op
            ordered += 1
            depth -= 1
    return ordered


@inlined
def _choose_inplace(a: Arrays, s: EvictionState, op: int, position: int) -> int:
    """List the in-place writes of `op`; returns the bytes that it needs besides its inputs.

    An input can be overwritten if this is its last use and no evicted tensor needs it.
    """
    s.counts[c.WRITES] = 0
    need = int(a.workspace[op])
    for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
        t = a.makes[k]
        if a.outside[t] == 0 or s.tensor[c.MADE, t] == 1:
            need += a.size[t]
    for k in range(a.pairs_ptr[op], a.pairs_ptr[op + 1]):
        out, source = a.pairs_out[k], a.pairs_in[k]
        if (
            s.tensor[c.LIVE, out] == 0
            and s.tensor[c.LIVE, source] == 1
            and a.last_use[source] <= position
            and s.tensor[c.PINS, source] == 1
            and s.tensor[c.EVICTABLE, source] == 1
            and next_demand(a, s, source, position) == c.NEVER
        ):
            free = True
            for j in range(s.counts[c.WRITES]):
                if s.pair[c.INPLACE_OUT, j] == out or s.pair[c.INPLACE_SOURCE, j] == source:
                    free = False
            if free:
                s.pair[c.INPLACE_OUT, s.counts[c.WRITES]] = out
                s.pair[c.INPLACE_SOURCE, s.counts[c.WRITES]] = source
                s.counts[c.WRITES] += 1
                need -= a.size[out]
    return need


@inlined
def _make_room(a: Arrays, s: EvictionState, need: int, position: int) -> bool:
    """Evict until `need` bytes are free; False if nothing more can be evicted."""
    while s.counts[c.USED] + need > s.budget:
        victim = _select_victim(a, s, s.counts[c.USED] + need - s.budget, position)
        if victim < 0:
            return False
        _free(a, s, victim)
        propagate_demand(a, s, victim, position)
        mark_relatives_dirty(a, s, victim, position)
    return True


@inlined
def _select_victim(a: Arrays, s: EvictionState, missing: int, position: int) -> int:
    """The victim with the least score; -1 if nothing can be evicted.

    Attempt 0 takes the pool and the tensors that changed since it was filled. Attempt 1 takes all
    large tensors, and attempt 2 the small ones, if no large one can be evicted.
    """
    best_score = np.inf
    best, best_small = -1, True
    for attempt in range(3):
        row, length, extra = c.LARGE, s.counts[c.LARGE_COUNT], 0
        if attempt == 0:
            if s.counts[c.POOL_COUNT] == 0 or position > s.counts[c.POOL_UNTIL]:
                continue
            length, extra = s.counts[c.POOL_COUNT], s.counts[c.DIRTY_COUNT]
        elif attempt == 1:
            for i in range(s.counts[c.DIRTY_COUNT]):
                s.tensor[c.IN_DIRTY_LIST, s.tensor[c.DIRTY_LIST, i]] = 0
            s.counts[c.DIRTY_COUNT] = 0
            s.counts[c.POOL_COUNT] = s.counts[c.POOL_SMALL] = 0
            s.counts[c.POOL_UNTIL] = position + 64  # scores age
        else:
            row, length = c.SMALL, s.counts[c.SMALL_COUNT]
            s.counts[c.POOL_SMALL] = 1
        # Many candidates: fill the pool; its first entry is the victim.
        if attempt > 0 and length > s.pool_min_live:
            _fill_pool(a, s, missing, position, attempt == 2)
            if s.counts[c.POOL_COUNT] > 0:
                return int(s.pool[0])
            continue
        # Few candidates: score each.
        for i in range(length + extra):
            if attempt > 0:
                t = s.tensor[row, i]
            elif i < length:
                t = s.pool[i]
            else:
                t = s.tensor[c.DIRTY_LIST, i - length]
            if (
                s.tensor[c.LIST_INDEX, t] < 0
                or s.tensor[c.PINS, t] > 0
                or s.tensor[c.EVICTABLE, t] == 0
            ):
                continue
            small = a.size[t] < s.small
            if small and attempt == 0 and (s.counts[c.POOL_SMALL] == 0 or not best_small):
                continue
            score = _score(a, s, t, missing, position)
            if score < best_score or (best_small and not small):
                best_score, best, best_small = score, t, small
        if best >= 0:
            break
    return best


@inner
def _fill_pool(a: Arrays, s: EvictionState, missing: int, position: int, small: bool) -> None:
    """Fill the pool with the victims of least score, from the small tensors if `small`."""
    worst = np.inf
    for i in range(s.counts[c.SMALL_COUNT] if small else s.counts[c.LARGE_COUNT]):
        t = s.tensor[c.SMALL if small else c.LARGE, i]
        if s.tensor[c.PINS, t] > 0 or s.tensor[c.EVICTABLE, t] == 0:
            continue
        score = _score(a, s, t, missing, position)
        if score < worst:
            worst = _add_to_pool(s, t, score)


@inlined
def _add_to_pool(s: EvictionState, t: int, score: float) -> float:
    """Insert `t` into the sorted pool; returns the score from which the pool takes no more."""
    at = min(s.counts[c.POOL_COUNT], s.pool.size - 1)
    while at > 0 and s.pool_score[at - 1] > score:
        s.pool_score[at] = s.pool_score[at - 1]
        s.pool[at] = s.pool[at - 1]
        at -= 1
    s.pool_score[at] = score
    s.pool[at] = t
    s.counts[c.POOL_COUNT] = min(s.counts[c.POOL_COUNT] + 1, s.pool.size)
    if s.counts[c.POOL_COUNT] < s.pool.size:
        return np.inf
    return float(s.pool_score[s.pool.size - 1])


@inlined
def _score(a: Arrays, s: EvictionState, t: int, missing: int, position: int) -> float:
    """Closure cost x weight / (bytes x distance^alpha), for `missing` bytes to be freed."""
    # Closure cost and next use are cached until something nearby changes.
    if s.tensor[c.DIRTY, t] == 1:
        s.tensor[c.DIRTY, t] = 0
        slot = s.tensor[c.SLOT, t]
        while slot < a.uses_ptr[t + 1] and a.uses[slot] <= position:
            slot += 1
        s.tensor[c.SLOT, t] = slot
        due = next_demand(a, s, t, position)
        if slot < a.uses_ptr[t + 1]:
            due = min(due, a.uses[slot])
        s.tensor[c.NEXT_USE, t] = due
        foreseen = s.tensor[c.NEXT_USE, t] if s.foresee else -1
        s.value[c.CLOSURE, t] = closure_cost(a, s, t, foreseen) * s.weight[slot]
        s.value[c.DENSITY, t] = s.value[c.CLOSURE, t] / a.size[t]
    distance = s.power[min(s.tensor[c.NEXT_USE, t], a.ops) - position]
    if s.cap and a.size[t] > missing:
        return float(s.value[c.CLOSURE, t] / (missing * distance))
    return float(s.value[c.DENSITY, t] / distance)


@inlined
def _free(a: Arrays, s: EvictionState, t: int) -> None:
    """End the lifetime of live tensor `t`."""
    _unlist(a, s, t)
    s.tensor[c.LIVE, t] = 0
    s.counts[c.USED] -= a.size[t]


@inlined
def _unlist(a: Arrays, s: EvictionState, t: int) -> None:
    """Remove `t` from its list of live tensors."""
    index = s.tensor[c.LIST_INDEX, t]
    if index < 0:
        return
    row, count = (c.SMALL, c.SMALL_COUNT) if a.size[t] < s.small else (c.LARGE, c.LARGE_COUNT)
    s.counts[count] -= 1
    last = s.tensor[row, s.counts[count]]
    s.tensor[row, index] = last
    s.tensor[c.LIST_INDEX, last] = index
    s.tensor[c.LIST_INDEX, t] = -1


@inlined
def _execute(a: Arrays, s: EvictionState, op: int, position: int) -> None:
    """Record the event, end overwritten inputs, make the outputs live and unpin the inputs."""
    s.event[s.counts[c.EVENTS]] = op
    s.counts[c.EVENTS] += 1
    for j in range(s.counts[c.WRITES]):
        source = s.pair[c.INPLACE_SOURCE, j]
        _unlist(a, s, source)
        s.tensor[c.LIVE, source] = 0
        s.tensor[c.DEMAND, source] = c.NEVER
        s.counts[c.USED] -= a.size[source]
        mark_relatives_dirty(a, s, source, position)
    for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
        t = a.makes[k]
        if s.tensor[c.LIVE, t] == 0 and a.outside[t] == 0:
            s.tensor[c.LIVE, t] = 1
            s.counts[c.USED] += a.size[t]
            while s.tensor[c.FIRST_WAITING, t] >= 0:
                waiting = s.tensor[c.FIRST_WAITING, t]
                s.tensor[c.FIRST_WAITING, t] = s.tensor[c.NEXT_WAITING, waiting]
                _add_to_check(s, waiting)
            if a.size[t] > 0:
                row, count = (
                    (c.SMALL, c.SMALL_COUNT) if a.size[t] < s.small else (c.LARGE, c.LARGE_COUNT)
                )
                s.tensor[row, s.counts[count]] = t
                s.tensor[c.LIST_INDEX, t] = s.counts[count]
                s.counts[count] += 1
            mark_dirty(s, t)
            if s.tensor[c.MADE, t] == 1:
                mark_relatives_dirty(a, s, t, position)
        s.tensor[c.MADE, t] = 1
    for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
        s.tensor[c.PINS, a.reads[k]] -= 1
        mark_dirty(s, a.reads[k])


@inlined
def _free_operands(a: Arrays, s: EvictionState, op: int, position: int, is_goal: bool) -> None:
    """Free the operands of `op` that nothing will read."""
    reads = a.reads_ptr[op + 1] - a.reads_ptr[op]
    makes = a.makes_ptr[op + 1] - a.makes_ptr[op]
    for k in range(reads + makes):
        t = a.reads[a.reads_ptr[op] + k] if k < reads else a.makes[a.makes_ptr[op] + k - reads]
        if s.tensor[c.LIVE, t] == 0 or s.tensor[c.PINS, t] > 0 or a.last_use[t] > position:
            continue
        if s.tensor[c.EVICTABLE, t] == 0:
            if a.is_output[t] == 0 and s.tensor[c.RETAINED, t] == 0:
                s.tensor[c.RETAINED, t] = 1
                _add_to_check(s, t)
            continue
        if not is_goal and a.last_use[t] == position:
            continue  # the op of this position will read it
        if next_demand(a, s, t, position) < c.NEVER or a.size[t] == 0:
            continue  # an evicted tensor will be recomputed from it
        _free(a, s, t)
        s.tensor[c.DEMAND, t] = c.NEVER


@inlined
def _add_to_check(s: EvictionState, t: int) -> None:
    """Insert a retained tensor into the list to check, which ascends."""
    at = s.counts[c.CHECK_COUNT]
    while at > 0 and s.tensor[c.TO_CHECK, at - 1] > t:
        s.tensor[c.TO_CHECK, at] = s.tensor[c.TO_CHECK, at - 1]
        at -= 1
    s.tensor[c.TO_CHECK, at] = t
    s.counts[c.CHECK_COUNT] += 1


@inlined
def _free_retained(a: Arrays, s: EvictionState, position: int) -> None:
    """Free dead tensors that cannot be recomputed once no evicted tensor needs them.

    One that is needed waits until that tensor is live, so a position costs nothing for it.
    """
    kept = 0
    for i in range(s.counts[c.CHECK_COUNT]):
        t = s.tensor[c.TO_CHECK, i]
        if s.tensor[c.PINS, t] > 0:
            s.tensor[c.TO_CHECK, kept] = t
            kept += 1
            continue
        needs_it = banish(a, s, t, position)
        if needs_it >= 0:
            s.tensor[c.NEXT_WAITING, t] = s.tensor[c.FIRST_WAITING, needs_it]
            s.tensor[c.FIRST_WAITING, needs_it] = t
        else:
            s.tensor[c.RETAINED, t] = 0
            _free(a, s, t)
    s.counts[c.CHECK_COUNT] = kept
