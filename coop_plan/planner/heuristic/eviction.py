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
from coop_plan.planner.heuristic.eviction_state import NEVER, EvictionState
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
    enough = s.now.events + events
    while position < a.ops and s.now.events < enough:
        ops = _order_recomputes(a, s, position)
        for step in range(ops):
            op = s.order[step]
            cost += a.cost[op]
            if s.now.events >= s.event.size or cost > cost_limit:
                return position, position, cost
            need = _choose_inplace(a, s, op, position)
            if not _make_room(a, s, need, position):
                return position, position, cost
            _execute(a, s, op, position)
            _free_operands(a, s, op, position, step == ops - 1)
        if s.now.to_check > 0:
            _free_retained(a, s, position)
        position += 1
    return -1, position, cost


@inlined
def _order_recomputes(a: Arrays, s: EvictionState, goal: int) -> int:
    """List the ops to run for `goal`, itself last, and pin their inputs; returns their number.

    Depth-first; of an op's missing inputs, the one produced earliest comes first. In the order of
    its inputs a long chain would produce all side inputs of its links before the first link.
    """
    s.now.stamp += 1
    stamp = s.now.stamp
    ordered = 0
    depth = 0
    pushed = goal
    while depth >= 0:
        if pushed >= 0:
            s.seen[pushed] = stamp
            s.stack[depth] = pushed
            for k in range(a.reads_ptr[pushed], a.reads_ptr[pushed + 1]):
                s.tensor[a.reads[k]].pins += 1
            pushed = -1
        op = s.stack[depth]
        for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
            t = a.reads[k]
            producer = a.producer[t]
            if not s.tensor[t].is_live and s.seen[producer] != stamp:
                pushed = producer if pushed < 0 else min(pushed, producer)
        if pushed >= 0:
            depth += 1
        else:
            s.order[ordered] = op
            ordered += 1
            depth -= 1
    return ordered


@inlined
def _choose_inplace(a: Arrays, s: EvictionState, op: int, position: int) -> int:
    """List the in-place writes of `op`; returns the bytes that it needs besides its inputs.

    An input can be overwritten if this is its last use and no evicted tensor needs it.
    """
    s.now.pairs = 0
    need = int(a.workspace[op])
    for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
        t = a.makes[k]
        if a.outside[t] == 0 or s.tensor[t].is_made:
            need += a.size[t]
    for k in range(a.pairs_ptr[op], a.pairs_ptr[op + 1]):
        out, source = a.pairs_out[k], a.pairs_in[k]
        if (
            not s.tensor[out].is_live
            and s.tensor[source].is_live
            and a.last_use[source] <= position
            and s.tensor[source].pins == 1
            and s.tensor[source].is_evictable
            and next_demand(a, s, source, position) == NEVER
        ):
            free = True
            for j in range(s.now.pairs):
                if s.pair[j].out == out or s.pair[j].source == source:
                    free = False
            if free:
                s.pair[s.now.pairs].out, s.pair[s.now.pairs].source = out, source
                s.now.pairs += 1
                need -= a.size[out]
    return need


@inlined
def _make_room(a: Arrays, s: EvictionState, need: int, position: int) -> bool:
    """Evict until `need` bytes are free; False if nothing more can be evicted."""
    while s.now.used + need > s.budget:
        victim = _select_victim(a, s, s.now.used + need - s.budget, position)
        if victim < 0:
            return False
        _free(a, s, victim)
        propagate_demand(a, s, victim, position)
        mark_relatives_dirty(a, s, victim, position)
    return True


@inlined
def _select_victim(a: Arrays, s: EvictionState, missing: int, position: int) -> int:
    """The victim with the least score; -1 if nothing can be evicted.

    First come the pool and the tensors that changed since it was filled, then all large tensors,
    and the small ones if no large one can be evicted.
    """
    best_score = np.inf
    best, best_small = -1, True
    for row in range(-1, 2):  # of `live`, or -1: the pool
        length, extra = s.now.pool, s.now.changed
        if row < 0 and (length == 0 or position > s.now.pool_until):
            continue
        if row == 0:
            for i in range(s.now.changed):
                s.tensor[s.changed[i]].is_changed = False
            s.now.changed = s.now.pool = 0
            s.now.pool_until = position + 64  # scores age
        if row >= 0:
            length, extra, s.now.pool_has_small = s.live_count[row], 0, row == 1
        # Many candidates: fill the pool; its first entry is the victim.
        if row >= 0 and length > s.pool_min_live:
            _fill_pool(a, s, missing, position, row)
            if s.now.pool > 0:
                return s.pool[0].tensor
            continue
        # Few candidates: score each.
        for i in range(length + extra):
            if row >= 0:
                t = s.live[row, i]
            elif i < length:
                t = s.pool[i].tensor
            else:
                t = s.changed[i - length]
            if s.tensor[t].list_index < 0 or s.tensor[t].pins > 0 or not s.tensor[t].is_evictable:
                continue
            small = a.size[t] < s.small_bytes
            if small and row < 0 and (not s.now.pool_has_small or not best_small):
                continue
            score = _score(a, s, t, missing, position)
            if score < best_score or (best_small and not small):
                best_score, best, best_small = score, t, small
        if best >= 0:
            break
    return best


@inner
def _fill_pool(a: Arrays, s: EvictionState, missing: int, position: int, row: int) -> None:
    """Fill the pool with the victims of least score of a row of `live`."""
    worst = np.inf
    for i in range(s.live_count[row]):
        t = s.live[row, i]
        if s.tensor[t].pins > 0 or not s.tensor[t].is_evictable:
            continue
        score = _score(a, s, t, missing, position)
        if score < worst:
            worst = _add_to_pool(s, t, score)


@inlined
def _add_to_pool(s: EvictionState, t: int, score: float) -> float:
    """Insert `t` into the sorted pool; returns the score from which the pool takes no more."""
    at = min(s.now.pool, s.pool.size - 1)
    while at > 0 and s.pool[at - 1].score > score:
        s.pool[at] = s.pool[at - 1]
        at -= 1
    s.pool[at].score, s.pool[at].tensor = score, t
    s.now.pool = min(s.now.pool + 1, s.pool.size)
    if s.now.pool < s.pool.size:
        return np.inf
    return s.pool[s.pool.size - 1].score


@inlined
def _score(a: Arrays, s: EvictionState, t: int, missing: int, position: int) -> float:
    """Closure cost x weight / (bytes x distance^alpha), for `missing` bytes to be freed."""
    # Closure cost and next use are cached until something nearby changes.
    tensor = s.tensor[t]
    if tensor.is_dirty:
        tensor.is_dirty = False
        slot = tensor.slot
        while slot < a.uses_ptr[t + 1] and a.uses[slot] <= position:
            slot += 1
        tensor.slot = slot
        due = next_demand(a, s, t, position)
        if slot < a.uses_ptr[t + 1]:
            due = min(due, a.uses[slot])
        tensor.next_use = due
        tensor.closure_us = closure_cost(a, s, t, due if s.foresee else -1) * s.weight[slot]
        tensor.density = tensor.closure_us / a.size[t]
    distance = s.power[min(tensor.next_use, a.ops) - position]
    if s.cap and a.size[t] > missing:
        return float(tensor.closure_us / (missing * distance))
    return float(tensor.density / distance)


@inlined
def _free(a: Arrays, s: EvictionState, t: int) -> None:
    """End the lifetime of live tensor `t`."""
    _unlist(a, s, t)
    s.tensor[t].is_live = False
    s.now.used -= a.size[t]


@inlined
def _list(a: Arrays, s: EvictionState, t: int) -> None:
    """Append `t` to its list of live tensors."""
    row = int(a.size[t] < s.small_bytes)
    s.live[row, s.live_count[row]], s.tensor[t].list_index = t, s.live_count[row]
    s.live_count[row] += 1


@inlined
def _unlist(a: Arrays, s: EvictionState, t: int) -> None:
    """Remove `t` from its list of live tensors."""
    index = s.tensor[t].list_index
    if index < 0:
        return
    row = int(a.size[t] < s.small_bytes)
    s.live_count[row] -= 1
    last = s.live[row, s.live_count[row]]
    s.live[row, index] = last
    s.tensor[last].list_index = index
    s.tensor[t].list_index = -1


@inlined
def _execute(a: Arrays, s: EvictionState, op: int, position: int) -> None:
    """Record the event, end overwritten inputs, make the outputs live and unpin the inputs."""
    s.event[s.now.events] = op
    s.now.events += 1
    for j in range(s.now.pairs):
        source = s.pair[j].source
        _unlist(a, s, source)
        s.tensor[source].is_live = False
        s.tensor[source].demand = NEVER
        s.now.used -= a.size[source]
        mark_relatives_dirty(a, s, source, position)
    for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
        t = a.makes[k]
        if not s.tensor[t].is_live and a.outside[t] == 0:
            s.tensor[t].is_live = True
            s.now.used += a.size[t]
            while s.tensor[t].first_waiting >= 0:
                waiting = s.tensor[t].first_waiting
                s.tensor[t].first_waiting = s.tensor[waiting].next_waiting
                _add_to_check(s, waiting)
            if a.size[t] > 0:
                _list(a, s, t)
            mark_dirty(s, t)
            if s.tensor[t].is_made:
                mark_relatives_dirty(a, s, t, position)
        s.tensor[t].is_made = True
    for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
        s.tensor[a.reads[k]].pins -= 1
        mark_dirty(s, a.reads[k])


@inlined
def _free_operands(a: Arrays, s: EvictionState, op: int, position: int, is_goal: bool) -> None:
    """Free the operands of `op` that nothing will read."""
    reads = a.reads_ptr[op + 1] - a.reads_ptr[op]
    makes = a.makes_ptr[op + 1] - a.makes_ptr[op]
    for k in range(reads + makes):
        t = a.reads[a.reads_ptr[op] + k] if k < reads else a.makes[a.makes_ptr[op] + k - reads]
        if not s.tensor[t].is_live or s.tensor[t].pins > 0 or a.last_use[t] > position:
            continue
        if not s.tensor[t].is_evictable:
            if a.is_output[t] == 0 and not s.tensor[t].is_retained:
                s.tensor[t].is_retained = True
                _add_to_check(s, t)
            continue
        if not is_goal and a.last_use[t] == position:
            continue  # the op of this position will read it
        if next_demand(a, s, t, position) < NEVER or a.size[t] == 0:
            continue  # an evicted tensor will be recomputed from it
        _free(a, s, t)
        s.tensor[t].demand = NEVER


@inlined
def _add_to_check(s: EvictionState, t: int) -> None:
    """Insert a retained tensor into the list to check, which ascends."""
    at = s.now.to_check
    while at > 0 and s.to_check[at - 1] > t:
        s.to_check[at] = s.to_check[at - 1]
        at -= 1
    s.to_check[at] = t
    s.now.to_check += 1


@inlined
def _free_retained(a: Arrays, s: EvictionState, position: int) -> None:
    """Free dead tensors that cannot be recomputed once no evicted tensor needs them.

    One that is needed waits until that tensor is live, so a position costs nothing for it.
    """
    kept = 0
    for i in range(s.now.to_check):
        t = s.to_check[i]
        if s.tensor[t].pins > 0:
            s.to_check[kept] = t
            kept += 1
            continue
        needs_it = banish(a, s, t, position)
        if needs_it >= 0:
            s.tensor[t].next_waiting = s.tensor[needs_it].first_waiting
            s.tensor[needs_it].first_waiting = t
        else:
            s.tensor[t].is_retained = False
            _free(a, s, t)
    s.now.to_check = kept
