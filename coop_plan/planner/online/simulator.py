"""Simulated eager step: recompute missing inputs, allocate, evict if an allocation fails."""

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.jit import inner, njit
from coop_plan.planner.core.lifetimes import RUN
from coop_plan.planner.online.delta import end_copies, next_release, start_copies_ahead
from coop_plan.planner.online.neighbours import mark_evicted, mark_resident
from coop_plan.planner.online.space import NO_ROOM, allocate, find, free_bytes, release
from coop_plan.planner.online.state import ArenaState, Rule
from coop_plan.planner.online.transfers import (
    begin_offload,
    begin_prefetch,
    end_offload,
    end_prefetch,
    record_event,
)
from coop_plan.planner.online.window import cheapest_tensor, cheapest_window

DONE, RECORD_FULL = -1, -2


@njit
def advance(
    a: Arrays, s: ArenaState, start: int, stop: int, max_events: int, rule: Rule, inplace: bool
) -> int:
    """Execute the ops `start` to `stop` - 1 of the program.

    Returns `DONE`, `RECORD_FULL` (run again with a longer record), or the op that does not fit.
    """
    for position in range(start, stop):
        if s.whole_closure:
            _pin_closure(a, s, position)
        status = _compute(a, s, position, max_events, rule, inplace)
        if status != DONE:
            return status
        _release_operands(a, s, position, position + 1, position)
        if s.transfers.swaps:
            start_copies_ahead(a, s, position)
            if position == a.ops - 1:
                end_copies(s)
        for i in range(s.now.retained - 1, -1, -1):  # backwards: freed ones leave the list
            _release_if_dead(a, s, s.retained[i], position)
    return DONE


@inner
def _pin_closure(a: Arrays, s: ArenaState, goal: int) -> None:
    """Pin the inputs of `goal` and of every op that must run again for it."""
    s.now.stamp += 1
    stamp = s.now.stamp
    s.op[goal].seen = stamp
    s.stack[0] = goal
    depth = 1
    while depth > 0:
        depth -= 1
        op = s.stack[depth]
        for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
            t = a.reads[k]
            s.tensor[t].pins += 1
            producer = a.producer[t]
            absent = not s.tensor[t].is_live and not s.tensor[t].is_hosted
            if absent and s.op[producer].seen != stamp:
                s.op[producer].seen = stamp
                s.stack[depth] = producer
                depth += 1


@inner
def _compute(
    a: Arrays, s: ArenaState, goal: int, max_events: int, rule: Rule, inplace: bool
) -> int:
    """Run the closure of `goal` depth first; each op unpins its inputs after its run.

    Without `whole_closure` an op pins its inputs when it is first on the stack, before missing ones
    are recomputed; that counts as an access.
    """
    s.stack[0] = goal
    depth = 1
    while depth > 0:
        op = s.stack[depth - 1]
        if not s.whole_closure and not s.op[op].is_open:
            s.op[op].is_open = True
            for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
                s.tensor[a.reads[k]].pins += 1
                s.tensor[a.reads[k]].last_access_us = s.now.clock_us
        # Push the producer of the first missing input; the op is visited again afterwards.
        missing = -1
        for k in range(a.reads_ptr[op + 1] - 1, a.reads_ptr[op] - 1, -1):
            t = a.reads[k]
            if not s.tensor[t].is_live and not s.tensor[t].is_hosted:
                missing = a.producer[t]
        if missing >= 0:
            s.stack[depth] = missing
            depth += 1
            continue
        # All inputs are live or on the host: run the op, if the record has room for it.
        s.op[op].is_open = False
        depth -= 1
        if s.now.events >= max_events:
            return goal
        if (
            s.now.events == s.event.size
            or s.now.offsets + a.makes_ptr[op + 1] - a.makes_ptr[op] > s.drop.size
            or s.now.nodes + 2 * s.tensor.size > s.drop.size
            or (s.transfers.swaps and s.now.events + 4 * s.tensor.size > s.event.size)
        ):
            return RECORD_FULL
        if s.transfers.swaps and not _prefetch_inputs(a, s, op, rule):
            return goal
        if not _execute(a, s, op, goal, rule, inplace):
            return goal
    return DONE


@inner
def _execute(a: Arrays, s: ArenaState, op: int, position: int, rule: Rule, inplace: bool) -> bool:
    """Run `op` once; False if an output or the workspace does not fit."""
    low, high = a.makes_ptr[op], a.makes_ptr[op + 1]
    no_tensor = s.tensor.size
    s.now.transient = 0
    first = s.now.inplace
    # In-place pairs first, so that their outputs need no allocation. Outputs are pinned until the
    # op is done.
    if inplace:
        _choose_inplace(a, s, op, position)
    for k in range(low, high):
        t = a.makes[k]
        s.tensor[t].was_live = s.tensor[t].is_live
        s.tensor[t].pins += 1
    at = 0
    for k in range(low, high + 1):  # the outputs, then the workspace
        t, size, source, is_transient = no_tensor, a.workspace[op], -1, True
        if k < high:
            t = a.makes[k]
            if a.outside[t] == 1 and not s.tensor[t].is_written:
                continue
            size = a.size[t]
            # A rerun's copy of an output that is live, or outside, is freed after this op.
            is_transient = s.tensor[t].was_live or a.outside[t] == 1
            for j in range(first, s.now.inplace):
                if s.inplace[j].out == t:
                    source = s.inplace[j].source
        if source >= 0:
            at = s.tensor[source].offset
            s.block[find(s, at)].owner = t
            s.tensor[source].is_live = False
            mark_evicted(s, source)
        else:
            at = _allocate(a, s, size, no_tensor if is_transient else t, op, rule)
            if at == NO_ROOM:
                return False
        if k < high:
            s.offsets[s.now.offsets] = at
            s.now.offsets += 1
        if not is_transient:
            s.tensor[t].offset = at
            s.tensor[t].is_live = True
            mark_resident(s, t)
        elif size > 0:
            s.transient[s.now.transient] = at
            s.now.transient += 1
    # Compute waits for prefetches of its inputs, and for offloads of those that it overwrites.
    if s.transfers.swaps:
        for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
            t = a.reads[k]
            if s.tensor[t].is_arriving:
                end_prefetch(s, t)
            if s.overwrites[k] and s.tensor[t].is_leaving:
                end_offload(s, t)
            s.tensor[t].is_hosted &= not s.overwrites[k]
    # Record the event; the clock is the sum of costs and waits.
    record_event(s, RUN, op, at)
    began = s.now.clock_us
    s.now.clock_us += a.cost[op]
    accessed = began if s.whole_closure else s.now.clock_us
    # Free transient outputs and the workspace; unpin and date the operands.
    for i in range(s.now.transient):
        release(s, s.transient[i])
    for k in range(low, high):
        t = a.makes[k]
        s.tensor[t].pins -= 1
        new = not s.tensor[t].was_live if s.whole_closure else not s.tensor[t].is_written
        if new:
            s.tensor[t].last_access_us = accessed
        s.tensor[t].is_written = True
        s.tensor[t].was_live = False
    for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
        s.tensor[a.reads[k]].pins -= 1
        if s.whole_closure:
            s.tensor[a.reads[k]].last_access_us = accessed
    if s.whole_closure:
        _release_operands(a, s, op, position, position)
    return True


@inner
def _prefetch_inputs(a: Arrays, s: ArenaState, op: int, rule: Rule) -> bool:
    """Begin to prefetch the inputs of `op` that are on the host; False if one does not fit."""
    for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
        t = a.reads[k]
        if not s.tensor[t].is_live:
            at = _allocate(a, s, a.size[t], t, op, rule)
            if at == NO_ROOM:
                return False
            begin_prefetch(s, t, at)
    return True


@inner
def _choose_inplace(a: Arrays, s: ArenaState, op: int, position: int) -> None:
    """Record in-place pairs whose input has no reader left, in the program or in the closure."""
    first = s.now.inplace
    for k in range(a.pairs_ptr[op], a.pairs_ptr[op + 1]):
        out, source = a.pairs_out[k], a.pairs_in[k]
        if (
            a.last_use[source] <= position
            and s.tensor[source].pins == 1
            and s.tensor[source].is_evictable
            and not s.tensor[out].is_live
            and not s.tensor[source].is_leaving
        ):
            free = True
            for j in range(first, s.now.inplace):
                if s.inplace[j].out in (out, source) or s.inplace[j].source in (out, source):
                    free = False
            if free:
                pair = s.inplace[s.now.inplace]
                pair.event, pair.out, pair.source = s.now.events, out, source
                s.now.inplace += 1


@inner
def _allocate(a: Arrays, s: ArenaState, size: int, owner: int, op: int, rule: Rule) -> int:
    """Offset of `size` bytes after as many evictions as needed, or `NO_ROOM`."""
    if size == 0:
        return 0
    at = allocate(s, size, owner, s.op[op].from_right)
    if at != NO_ROOM:
        return at
    while at == NO_ROOM:
        if s.transfers.swaps:
            victims = next_release(a, s)
        else:
            victims = cheapest_window(s, size) if rule.window else cheapest_tensor(s, rule)
        if victims == 0:
            return NO_ROOM
        s.now.evicted += victims
        for i in range(victims):
            _free(a, s, s.victims[i])
        at = allocate(s, size, owner, s.op[op].from_right)
    # The free ratio counts the requested block as free, as OneFlow's does.
    s.now.free_ratios += (free_bytes(s) + size) / s.capacity
    s.now.failures += 1
    return at


@inner
def _free(a: Arrays, s: ArenaState, t: int) -> None:
    """End the lifetime of `t` after the last event so far; waits for a copy of it."""
    if s.tensor[t].is_leaving:
        end_offload(s, t)
    if s.tensor[t].is_arriving:
        end_prefetch(s, t)
    s.drop[s.now.drops].event, s.drop[s.now.drops].tensor = s.now.events - 1, t
    s.now.drops += 1
    s.tensor[t].is_live = False
    if a.size[t] > 0:
        release(s, s.tensor[t].offset)
    if not s.tensor[t].is_hosted:
        mark_evicted(s, t)


@inner
def _release_operands(a: Arrays, s: ArenaState, op: int, before: int, position: int) -> None:
    """Free operands of `op` whose last use in the program is before op `before`."""
    for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
        if a.last_use[a.reads[k]] < before:
            _release_if_dead(a, s, a.reads[k], position)
    for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
        if a.last_use[a.makes[k]] < before:
            _release_if_dead(a, s, a.makes[k], position)


@inner
def _release_if_dead(a: Arrays, s: ArenaState, t: int, position: int) -> None:
    """Free `t` if the program does not read it after op `position` and it is not pinned.

    A tensor that cannot be recomputed is banished (DTR, appendix C.3): it is freed only if no
    evicted tensor needs it, and tensors computed from it become unevictable. A resident with a home
    that an op overwrote is offloaded to it; it is freed when an allocation needs its bytes.
    """
    if a.last_use[t] > position or s.tensor[t].pins > 0 or not s.tensor[t].is_live:
        return
    if s.tensor[t].is_home and not s.tensor[t].is_hosted:
        if not s.tensor[t].is_leaving:
            begin_offload(a, s, t)
    elif s.tensor[t].is_evictable or s.tensor[t].is_home:
        _free(a, s, t)
    elif _banish(a, s, t, position):
        if s.tensor[t].is_retained:
            _remove_retained(s, t)
        _free(a, s, t)
    else:
        _retain(s, t)


@inner
def _retain(s: ArenaState, t: int) -> None:
    """Check after every op if `t` can be freed."""
    if not s.tensor[t].is_retained:
        s.tensor[t].is_retained = True
        s.retained[s.now.retained] = t
        s.now.retained += 1


@inner
def _remove_retained(s: ArenaState, t: int) -> None:
    s.tensor[t].is_retained = False
    kept = 0
    for i in range(s.now.retained):
        if s.retained[i] != t:
            s.retained[kept] = s.retained[i]
            kept += 1
    s.now.retained = kept


@inner
def _banish(a: Arrays, s: ArenaState, t: int, position: int) -> bool:
    """False if an evicted tensor needs `t`; else live tensors computed from it become unevictable.

    Traverses the descendants of `t` through evicted tensors.
    """
    s.now.stamp += 1
    stamp = s.now.stamp
    s.tensor[t].visited = stamp
    s.to_visit[0] = t
    depth, found = 1, 0
    while depth > 0:
        depth -= 1
        x = s.to_visit[depth]
        for k in range(a.uses_ptr[x], a.uses_ptr[x + 1]):
            op = a.uses[k]
            if op > position:
                break
            for j in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
                child = a.makes[j]
                if s.tensor[child].visited == stamp or a.is_output[child] == 1:
                    continue
                s.tensor[child].visited = stamp
                if s.tensor[child].is_live or s.tensor[child].is_hosted:
                    s.victims[found] = child
                    found += 1
                elif a.last_use[child] > position:
                    return False
                else:
                    s.to_visit[depth] = child
                    depth += 1
    for i in range(found):
        child = s.victims[i]
        s.tensor[child].is_evictable = False
        if a.last_use[child] <= position:  # live for recomputes only, now unevictable
            _retain(s, child)
    return True
