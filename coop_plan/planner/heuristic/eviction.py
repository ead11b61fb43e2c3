"""
The eviction step: runs the program at a logical budget and evicts what is cheapest to miss.

Nothing has an address yet. Memory is exact: a tensor is freed after its last use, unless an evicted
one will need it to be recomputed. When an op does not fit, the live tensor of least

    closure cost / (bytes x distance^alpha)

is evicted, where the closure is every op to run again for it at its next use (as things are, or
with `foresee` without what the program has no more use for by then), and the distance is
measured from now to that use in a price that the caller sets per program position. The next use of
a tensor includes those of evicted tensors that must be recomputed from it.

Closures and next uses are kept per tensor and looked at again only when something they depend on
came or went. Where many tensors are live, one look at the best of them serves several evictions;
`planner.heuristic.score_heap` knows which those are.
"""

import numpy as np

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.jit import inlined, inner, njit
from coop_plan.planner.heuristic.eviction_state import (
    ASIDE,
    CHANGED,
    CHANGED_COUNT,
    CLOSURE,
    DIRTY,
    DUE,
    EVENTS,
    EVICTABLE,
    HEAP,
    HEAP_COUNT,
    HEAPED,
    INPLACE_OUT,
    INPLACE_SOURCE,
    KEY,
    LARGE,
    LARGE_COUNT,
    LISTED,
    LIVE,
    MADE,
    MERIT,
    NEVER,
    ORDER,
    PINS,
    PLACE,
    POOL_COUNT,
    POOL_SMALL,
    POOL_UNTIL,
    RETAINED,
    RETAINED_COUNT,
    SEEN,
    SLOT,
    SMALL,
    SMALL_COUNT,
    STAMP,
    STORED,
    USED,
    WRITES,
    EvictionState,
)
from coop_plan.planner.heuristic.recompute_cost import (
    announce,
    banish,
    changed,
    closure_cost,
    mark_relatives,
    next_demand,
)
from coop_plan.planner.heuristic.score_heap import put_in, take_out


@njit
def run_eviction(
    a: Arrays, s: EvictionState, position: int, cost: float, cost_limit: float, events: int
) -> tuple[int, int, float]:
    """
    Go on with a run from a program position and its cost (µs) so far, for about so many events.

    Returns (failed op or -1, next position, cost in µs). A run that outgrows its record or costs
    more than `cost_limit` (µs) stops as failed.
    """
    enough = s.counts[EVENTS] + events
    while position < a.ops and s.counts[EVENTS] < enough:
        _note_what_is_paid(a, s, position)
        ops = _order(a, s, position)
        for step in range(ops):
            op = s.op[ORDER, step]
            cost += a.cost[op]
            if s.counts[EVENTS] >= s.event.size or cost > cost_limit:
                return position, position, cost
            need = _choose_inplace(a, s, op, position)
            if not _make_room(a, s, need, position):
                return position, position, cost
            _run(a, s, op, position)
            _release(a, s, op, position, step == ops - 1)
        if s.counts[RETAINED_COUNT] > 0:
            _release_retained(a, s, position)
        position += 1
    return -1, position, cost


@inlined
def _note_what_is_paid(a: Arrays, s: EvictionState, position: int) -> None:
    """Note what each evicted input of the op at hand takes to be there again."""
    for k in range(a.reads_ptr[position], a.reads_ptr[position + 1]):
        t = a.reads[k]
        if s.tensor[LIVE, t] == 0:
            slot = s.tensor[SLOT, t]
            while slot < a.uses_ptr[t + 1] and a.uses[slot] < position:
                slot += 1
            s.paid[slot] = closure_cost(a, s, t, -1)


@inlined
def _order(a: Arrays, s: EvictionState, goal: int) -> int:
    """
    List the ops to run for `goal`, itself last, with their inputs pinned; returns how many.

    Of what an op lacks the earliest in the program goes first. In the order of its inputs a long
    chain would make all that its links take from elsewhere before it ran the first of them.
    """
    s.counts[STAMP] += 1
    stamp = s.counts[STAMP]
    ordered = 0
    depth = 0
    pushed = goal
    while depth >= 0:
        if pushed >= 0:
            s.op[SEEN, pushed] = stamp
            s.stack[depth] = pushed
            for k in range(a.reads_ptr[pushed], a.reads_ptr[pushed + 1]):
                s.tensor[PINS, a.reads[k]] += 1
            pushed = -1
        op = s.stack[depth]
        for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
            t = a.reads[k]
            producer = a.producer[t]
            if s.tensor[LIVE, t] == 0 and s.op[SEEN, producer] != stamp:
                pushed = producer if pushed < 0 else min(pushed, producer)
        if pushed >= 0:
            depth += 1
        else:
            s.op[ORDER, ordered] = op
            ordered += 1
            depth -= 1
    return ordered


@inlined
def _choose_inplace(a: Arrays, s: EvictionState, op: int, position: int) -> int:
    """
    List the in-place writes of `op`; returns the bytes it needs beside its inputs.

    An input may be overwritten if it ends here and nothing evicted will want it.
    """
    s.counts[WRITES] = 0
    need = int(a.workspace[op])
    for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
        t = a.makes[k]
        if a.outside[t] == 0 or s.tensor[MADE, t] == 1:
            need += a.size[t]
    for k in range(a.pairs_ptr[op], a.pairs_ptr[op + 1]):
        out, source = a.pairs_out[k], a.pairs_in[k]
        if (
            s.tensor[LIVE, out] == 0
            and s.tensor[LIVE, source] == 1
            and a.last_use[source] <= position
            and s.tensor[PINS, source] == 1
            and s.tensor[EVICTABLE, source] == 1
            and next_demand(a, s, source, position) == NEVER
        ):
            free = True
            for j in range(s.counts[WRITES]):
                if s.pair[INPLACE_OUT, j] == out or s.pair[INPLACE_SOURCE, j] == source:
                    free = False
            if free:
                s.pair[INPLACE_OUT, s.counts[WRITES]] = out
                s.pair[INPLACE_SOURCE, s.counts[WRITES]] = source
                s.counts[WRITES] += 1
                need -= a.size[out]
    return need


@inlined
def _make_room(a: Arrays, s: EvictionState, need: int, position: int) -> bool:
    """Evict until `need` bytes are free; False when nothing more can be evicted."""
    while s.counts[USED] + need > s.budget:
        victim = _victim(a, s, s.counts[USED] + need - s.budget, position)
        if victim < 0:
            return False
        slot = s.tensor[SLOT, victim]
        if slot < a.uses_ptr[victim + 1]:
            s.expected[slot] = s.value[CLOSURE, victim]
        _drop(a, s, victim)
        announce(a, s, victim, position)
        mark_relatives(a, s, victim, position)
    return True


@inlined
def _victim(a: Arrays, s: EvictionState, short: int, position: int) -> int:
    """
    The tensor of least score: of the pool and what changed since, of all large ones, of all.

    A pool of small ones was made when no large one could go; one that can go since has changed.
    """
    best_score = np.inf
    best, best_small = -1, True
    for attempt in range(3):
        row, length, extra = LARGE, s.counts[LARGE_COUNT], 0
        if attempt == 0:
            if s.counts[POOL_COUNT] == 0 or position > s.counts[POOL_UNTIL]:
                continue
            length, extra = s.counts[POOL_COUNT], s.counts[CHANGED_COUNT]
        elif attempt == 1:
            _renew(a, s, position)
            s.counts[POOL_COUNT] = s.counts[POOL_SMALL] = 0
            s.counts[POOL_UNTIL] = position + s.pool_ops
        else:
            row, length = SMALL, s.counts[SMALL_COUNT]
            s.counts[POOL_SMALL] = 1
        if attempt > 0 and length > s.pool_from:
            _fill(a, s, short, position, attempt == 2)
            if s.counts[POOL_COUNT] > 0:
                return int(s.pool[0])
            continue
        for i in range(length + extra):
            if attempt > 0:
                t = s.tensor[row, i]
            elif i < length:
                t = s.pool[i]
            else:
                t = s.tensor[CHANGED, i - length]
            if s.tensor[PLACE, t] < 0 or s.tensor[PINS, t] > 0 or s.tensor[EVICTABLE, t] == 0:
                continue
            small = a.size[t] < s.small
            if small and attempt == 0 and (s.counts[POOL_SMALL] == 0 or not best_small):
                continue
            score = _score(a, s, t, short, position)
            if score < best_score or (best_small and not small):
                best_score, best, best_small = score, t, small
        if best >= 0:
            break
    return best


@inner
def _fill(a: Arrays, s: EvictionState, short: int, position: int, small: bool) -> None:
    """
    Fill the pool with the least scores of the heap, of large tensors or, where none can go, of all.

    Scores rise as uses come nearer, so the older ones in the heap are not above what they are now.
    Where there is no heap all are looked at: few are live, or bytes are capped and scores follow
    what is short.
    """
    worst = np.inf
    if s.counts[HEAPED] == 0:
        for i in range(s.counts[SMALL_COUNT] if small else s.counts[LARGE_COUNT]):
            t = s.tensor[SMALL if small else LARGE, i]
            if s.tensor[PINS, t] > 0 or s.tensor[EVICTABLE, t] == 0:
                continue
            score = _score(a, s, t, short, position)
            if score < worst:
                worst = _keep(s, t, score)
        return
    aside = 0
    while s.counts[HEAP_COUNT] > 0:
        t = s.tensor[HEAP, 0]
        if s.value[KEY, t] >= worst or (a.size[t] < s.small and not small):
            break
        if s.tensor[EVICTABLE, t] == 0:
            take_out(a, s, t)
            continue
        if s.tensor[PINS, t] == 0:
            key = _score(a, s, t, short, position)
            if key > s.value[KEY, t]:
                put_in(a, s, t, key)
                continue
            worst = _keep(s, t, key)
        take_out(a, s, t)
        s.tensor[ASIDE, aside] = t
        aside += 1
    for i in range(aside):
        put_in(a, s, s.tensor[ASIDE, i], s.value[KEY, s.tensor[ASIDE, i]])


@inner
def _renew(a: Arrays, s: EvictionState, position: int) -> None:
    """Forget what changed, or put it into the heap by its score now, the first time all of it."""
    live = s.counts[LARGE_COUNT] + s.counts[SMALL_COUNT]
    if s.counts[HEAPED] == 0 and not s.cap and live > s.heap_from:
        s.counts[HEAPED] = 1
        for row, count in ((LARGE, LARGE_COUNT), (SMALL, SMALL_COUNT)):
            for i in range(s.counts[count]):
                changed(s, s.tensor[row, i])
    left = 0
    for i in range(s.counts[CHANGED_COUNT]):
        t = s.tensor[CHANGED, i]
        if s.counts[HEAPED] == 1 and s.tensor[PLACE, t] >= 0 and s.tensor[PINS, t] > 0:
            s.tensor[CHANGED, left] = t
            left += 1
            continue
        s.tensor[LISTED, t] = 0
        if s.counts[HEAPED] == 1 and s.tensor[PLACE, t] >= 0 and s.tensor[EVICTABLE, t] == 1:
            put_in(a, s, t, _score(a, s, t, 1, position))
    s.counts[CHANGED_COUNT] = left


@inlined
def _keep(s: EvictionState, t: int, score: float) -> float:
    """Sort `t` into the pool; returns the score above which the pool takes no more."""
    at = min(s.counts[POOL_COUNT], s.pool.size - 1)
    while at > 0 and s.pool_score[at - 1] > score:
        s.pool_score[at] = s.pool_score[at - 1]
        s.pool[at] = s.pool[at - 1]
        at -= 1
    s.pool_score[at] = score
    s.pool[at] = t
    s.counts[POOL_COUNT] = min(s.counts[POOL_COUNT] + 1, s.pool.size)
    if s.counts[POOL_COUNT] < s.pool.size:
        return np.inf
    return float(s.pool_score[s.pool.size - 1])


@inlined
def _score(a: Arrays, s: EvictionState, t: int, short: int, position: int) -> float:
    """Closure cost x weight / (bytes x distance^alpha), for `short` bytes to be freed."""
    if s.tensor[DIRTY, t] == 1:
        s.tensor[DIRTY, t] = 0
        slot = s.tensor[SLOT, t]
        while slot < a.uses_ptr[t + 1] and a.uses[slot] <= position:
            slot += 1
        s.tensor[SLOT, t] = slot
        due = next_demand(a, s, t, position)
        if slot < a.uses_ptr[t + 1]:
            due = min(due, a.uses[slot])
        s.tensor[DUE, t] = due
        foreseen = s.tensor[DUE, t] if s.foresee else -1
        s.value[CLOSURE, t] = closure_cost(a, s, t, foreseen) * s.weight[slot]
        s.value[MERIT, t] = s.value[CLOSURE, t] / a.size[t]
    n = a.ops
    distance = s.price[min(s.tensor[DUE, t], n)] - s.price[position] + s.least_distance
    if s.alpha == 0.5:
        distance = np.sqrt(distance)
    elif s.alpha == 0.25:
        distance = np.sqrt(np.sqrt(distance))
    elif s.alpha != 1.0:
        distance = distance**s.alpha
    if s.cap and a.size[t] > short:
        return float(s.value[CLOSURE, t] / (short * distance))
    return float(s.value[MERIT, t] / distance)


@inlined
def _drop(a: Arrays, s: EvictionState, t: int) -> None:
    """End live tensor `t`."""
    _take_off(a, s, t)
    s.tensor[LIVE, t] = 0
    s.counts[USED] -= a.size[t]


@inlined
def _take_off(a: Arrays, s: EvictionState, t: int) -> None:
    """Take `t` off its list of live tensors."""
    place = s.tensor[PLACE, t]
    if place < 0:
        return
    row, count = (SMALL, SMALL_COUNT) if a.size[t] < s.small else (LARGE, LARGE_COUNT)
    s.counts[count] -= 1
    last = s.tensor[row, s.counts[count]]
    s.tensor[row, place] = last
    s.tensor[PLACE, last] = place
    s.tensor[PLACE, t] = -1
    take_out(a, s, t)


@inlined
def _run(a: Arrays, s: EvictionState, op: int, position: int) -> None:
    """Record the event, end what is overwritten, bring the outputs to life, unpin the inputs."""
    s.event[s.counts[EVENTS]] = op
    s.counts[EVENTS] += 1
    for j in range(s.counts[WRITES]):
        source = s.pair[INPLACE_SOURCE, j]
        _take_off(a, s, source)
        s.tensor[LIVE, source] = 0
        s.tensor[STORED, source] = NEVER
        s.counts[USED] -= a.size[source]
        mark_relatives(a, s, source, position)
    for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
        t = a.makes[k]
        if s.tensor[LIVE, t] == 0 and a.outside[t] == 0:
            s.tensor[LIVE, t] = 1
            s.counts[USED] += a.size[t]
            if a.size[t] > 0:
                row, count = (SMALL, SMALL_COUNT) if a.size[t] < s.small else (LARGE, LARGE_COUNT)
                s.tensor[row, s.counts[count]] = t
                s.tensor[PLACE, t] = s.counts[count]
                s.counts[count] += 1
            changed(s, t)
            if s.tensor[MADE, t] == 1:
                mark_relatives(a, s, t, position)
        s.tensor[MADE, t] = 1
    for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
        s.tensor[PINS, a.reads[k]] -= 1
        changed(s, a.reads[k])


@inlined
def _release(a: Arrays, s: EvictionState, op: int, position: int, is_goal: bool) -> None:
    """Let go of what `op` touched and nothing will read."""
    reads = a.reads_ptr[op + 1] - a.reads_ptr[op]
    makes = a.makes_ptr[op + 1] - a.makes_ptr[op]
    for k in range(reads + makes):
        t = a.reads[a.reads_ptr[op] + k] if k < reads else a.makes[a.makes_ptr[op] + k - reads]
        if s.tensor[LIVE, t] == 0 or s.tensor[PINS, t] > 0 or a.last_use[t] > position:
            continue
        if s.tensor[EVICTABLE, t] == 0:
            if a.is_output[t] == 0 and s.tensor[RETAINED, t] == 0:
                s.tensor[RETAINED, t] = 1
                s.counts[RETAINED_COUNT] += 1
            continue
        if not is_goal and a.last_use[t] == position:
            continue  # this position's own op has still to read it
        if next_demand(a, s, t, position) < NEVER or a.size[t] == 0:
            continue  # an evicted tensor will be made from it
        _drop(a, s, t)
        s.tensor[STORED, t] = NEVER


@inlined
def _release_retained(a: Arrays, s: EvictionState, position: int) -> None:
    """Let go of tensors that cannot be recomputed once no evicted one needs them."""
    for t in range(a.size.size):
        if s.tensor[RETAINED, t] == 0 or s.tensor[LIVE, t] == 0 or s.tensor[PINS, t] > 0:
            continue
        if banish(a, s, t, position):
            s.tensor[RETAINED, t] = 0
            s.counts[RETAINED_COUNT] -= 1
            _drop(a, s, t)
