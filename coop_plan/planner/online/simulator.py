"""Simulated eager step: recompute missing inputs, allocate, evict if an allocation fails."""

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.jit import inner, njit
from coop_plan.planner.core.lifetimes import RUN
from coop_plan.planner.online import columns as c
from coop_plan.planner.online.delta import end_copies, next_release, start_copies_ahead
from coop_plan.planner.online.neighbours import mark_evicted, mark_resident
from coop_plan.planner.online.space import NO_ROOM, allocate, find, free_bytes, release
from coop_plan.planner.online.state import ArenaState, Rule
from coop_plan.planner.online.transfers import begin_prefetch, end_offload, end_prefetch
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
        if s.whole_closure == 1:
            _pin_closure(a, s, position)
        status = _compute(a, s, position, max_events, rule, inplace)
        if status != DONE:
            return status
        _release_operands(a, s, position, position + 1, position)
        if s.transfers.swaps:
            start_copies_ahead(a, s, position)
            if position == a.ops - 1:
                end_copies(s)
        for i in range(s.counts[c.RETAINED] - 1, -1, -1):  # backwards: freed ones leave the list
            _release_if_dead(a, s, s.tensor[c.RETAINED_LIST, i], position)
    return DONE


@inner
def _pin_closure(a: Arrays, s: ArenaState, goal: int) -> None:
    """Pin the inputs of `goal` and of every op that must run again for it."""
    s.counts[c.STAMP] += 1
    stamp = s.counts[c.STAMP]
    s.op[c.SEEN, goal] = stamp
    s.stack[0] = goal
    depth = 1
    while depth > 0:
        depth -= 1
        op = s.stack[depth]
        for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
            t = a.reads[k]
            s.tensor[c.PINS, t] += 1
            producer = a.producer[t]
            absent = s.tensor[c.LIVE, t] == 0 and s.tensor[c.HOSTED, t] == 0
            if absent and s.op[c.SEEN, producer] != stamp:
                s.op[c.SEEN, producer] = stamp
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
        if s.whole_closure == 0 and s.op[c.IS_OPEN, op] == 0:
            s.op[c.IS_OPEN, op] = 1
            for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
                s.tensor[c.PINS, a.reads[k]] += 1
                s.times[c.LAST_ACCESS, a.reads[k]] = s.total[c.CLOCK]
        # Push the producer of the first missing input; the op is visited again afterwards.
        missing = -1
        for k in range(a.reads_ptr[op + 1] - 1, a.reads_ptr[op] - 1, -1):
            t = a.reads[k]
            if s.tensor[c.LIVE, t] == 0 and s.tensor[c.HOSTED, t] == 0:
                missing = a.producer[t]
        if missing >= 0:
            s.stack[depth] = missing
            depth += 1
            continue
        # All inputs are live or on the host: run the op, if the record has room for it.
        s.op[c.IS_OPEN, op] = 0
        depth -= 1
        if s.counts[c.EVENTS] >= max_events:
            return goal
        if (
            s.counts[c.EVENTS] == s.event.shape[1]
            or s.counts[c.OFFSETS] + a.makes_ptr[op + 1] - a.makes_ptr[op] > s.record.shape[1]
            or s.counts[c.NODES] + 2 * s.times.shape[1] > s.record.shape[1]
            or (s.transfers.swaps and s.counts[c.EVENTS] + 3 * s.times.shape[1] > s.event.shape[1])
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
    no_tensor = s.times.shape[1]
    s.counts[c.TRANSIENT] = 0
    first = s.counts[c.WRITES]
    # In-place pairs first, so that their outputs need no allocation. Outputs are pinned until the
    # op is done.
    if inplace:
        _choose_inplace(a, s, op, position)
    for k in range(low, high):
        t = a.makes[k]
        s.tensor[c.WAS_LIVE, t] = s.tensor[c.LIVE, t]
        s.tensor[c.PINS, t] += 1
    at = 0
    for k in range(low, high + 1):  # the outputs, then the workspace
        t, size, source, is_transient = no_tensor, a.workspace[op], -1, True
        if k < high:
            t = a.makes[k]
            if a.outside[t] == 1 and s.tensor[c.WRITTEN, t] == 0:
                continue
            size = a.size[t]
            # A rerun's copy of an output that is live, or outside, is freed after this op.
            is_transient = s.tensor[c.WAS_LIVE, t] == 1 or a.outside[t] == 1
            for j in range(first, s.counts[c.WRITES]):
                if s.record[c.INPLACE_OUT, j] == t:
                    source = s.record[c.INPLACE_SOURCE, j]
        if source >= 0:
            at = s.tensor[c.ADDRESS, source]
            s.block[c.OWNER, find(s, at)] = t
            s.tensor[c.LIVE, source] = 0
            mark_evicted(s, source)
        else:
            at = _allocate(a, s, size, no_tensor if is_transient else t, op, rule)
            if at == NO_ROOM:
                return False
        if k < high:
            s.record[c.OFFSET, s.counts[c.OFFSETS]] = at
            s.counts[c.OFFSETS] += 1
        if not is_transient:
            s.tensor[c.ADDRESS, t] = at
            s.tensor[c.LIVE, t] = 1
            mark_resident(s, t)
        elif size > 0:
            s.transient[s.counts[c.TRANSIENT]] = at
            s.counts[c.TRANSIENT] += 1
    # Compute waits for prefetches of its inputs.
    if s.transfers.swaps:
        for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
            if s.tensor[c.ARRIVING, a.reads[k]] == 1:
                end_prefetch(s, a.reads[k])
    # Record the event; the clock is the sum of costs and waits.
    s.event[c.EVENT_DO, s.counts[c.EVENTS]] = RUN
    s.event[c.EVENT_OP, s.counts[c.EVENTS]] = op
    s.event[c.EVENT_WORKSPACE, s.counts[c.EVENTS]] = at
    s.counts[c.EVENTS] += 1
    began = s.total[c.CLOCK]
    s.total[c.CLOCK] += a.cost[op]
    accessed = began if s.whole_closure == 1 else s.total[c.CLOCK]
    # Free transient outputs and the workspace; unpin and date the operands.
    for i in range(s.counts[c.TRANSIENT]):
        release(s, s.transient[i])
    for k in range(low, high):
        t = a.makes[k]
        s.tensor[c.PINS, t] -= 1
        new = s.tensor[c.WAS_LIVE, t] == 0 if s.whole_closure == 1 else s.tensor[c.WRITTEN, t] == 0
        if new:
            s.times[c.LAST_ACCESS, t] = accessed
        s.tensor[c.WRITTEN, t] = 1
        s.tensor[c.WAS_LIVE, t] = 0
    for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
        s.tensor[c.PINS, a.reads[k]] -= 1
        if s.whole_closure == 1:
            s.times[c.LAST_ACCESS, a.reads[k]] = accessed
    if s.whole_closure == 1:
        _release_operands(a, s, op, position, position)
    return True


@inner
def _prefetch_inputs(a: Arrays, s: ArenaState, op: int, rule: Rule) -> bool:
    """Begin to prefetch the inputs of `op` that are on the host; False if one does not fit."""
    for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
        t = a.reads[k]
        if s.tensor[c.LIVE, t] == 0:
            at = _allocate(a, s, a.size[t], t, op, rule)
            if at == NO_ROOM:
                return False
            begin_prefetch(s, t, at)
    return True


@inner
def _choose_inplace(a: Arrays, s: ArenaState, op: int, position: int) -> None:
    """Record in-place pairs whose input has no reader left, in the program or in the closure."""
    first = s.counts[c.WRITES]
    for k in range(a.pairs_ptr[op], a.pairs_ptr[op + 1]):
        out, source = a.pairs_out[k], a.pairs_in[k]
        if (
            a.last_use[source] <= position
            and s.tensor[c.PINS, source] == 1
            and s.tensor[c.EVICTABLE, source] == 1
            and s.tensor[c.LIVE, out] == 0
            and s.tensor[c.LEAVING, source] == 0
        ):
            free = True
            for j in range(first, s.counts[c.WRITES]):
                if s.record[c.INPLACE_OUT, j] in (out, source) or s.record[c.INPLACE_SOURCE, j] in (
                    out,
                    source,
                ):
                    free = False
            if free:
                s.record[c.INPLACE_EVENT, s.counts[c.WRITES]] = s.counts[c.EVENTS]
                s.record[c.INPLACE_OUT, s.counts[c.WRITES]] = out
                s.record[c.INPLACE_SOURCE, s.counts[c.WRITES]] = source
                s.counts[c.WRITES] += 1


@inner
def _allocate(a: Arrays, s: ArenaState, size: int, owner: int, op: int, rule: Rule) -> int:
    """Offset of `size` bytes after as many evictions as needed, or `NO_ROOM`."""
    if size == 0:
        return 0
    at = allocate(s, size, owner, s.op[c.FROM_RIGHT, op] == 1)
    if at != NO_ROOM:
        return at
    while at == NO_ROOM:
        if s.transfers.swaps:
            victims = next_release(a, s)
        else:
            victims = cheapest_window(s, size) if rule.window else cheapest_tensor(s, rule)
        if victims == 0:
            return NO_ROOM
        s.counts[c.EVICTED] += victims
        for i in range(victims):
            _free(a, s, s.block[c.VICTIM, i])
        at = allocate(s, size, owner, s.op[c.FROM_RIGHT, op] == 1)
    # The free ratio counts the requested block as free, as OneFlow's does.
    s.total[c.FREE_RATIOS] += (free_bytes(s) + size) / s.capacity
    s.counts[c.FAILURES] += 1
    return at


@inner
def _free(a: Arrays, s: ArenaState, t: int) -> None:
    """End the lifetime of `t` after the last event so far; waits for a copy of it."""
    if s.tensor[c.LEAVING, t] == 1:
        end_offload(s, t)
    if s.tensor[c.ARRIVING, t] == 1:
        end_prefetch(s, t)
    s.record[c.DROPPED, s.counts[c.DROPS]] = t
    s.record[c.DROP_EVENT, s.counts[c.DROPS]] = s.counts[c.EVENTS] - 1
    s.counts[c.DROPS] += 1
    s.tensor[c.LIVE, t] = 0
    if a.size[t] > 0:
        release(s, s.tensor[c.ADDRESS, t])
    if s.tensor[c.HOSTED, t] == 0:
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
    evicted tensor needs it, and tensors computed from it become unevictable.
    """
    if a.last_use[t] > position or s.tensor[c.PINS, t] > 0 or s.tensor[c.LIVE, t] == 0:
        return
    if s.tensor[c.EVICTABLE, t] == 1:
        _free(a, s, t)
    elif _banish(a, s, t, position):
        if s.tensor[c.IS_RETAINED, t] == 1:
            _remove_retained(s, t)
        _free(a, s, t)
    else:
        _retain(s, t)


@inner
def _retain(s: ArenaState, t: int) -> None:
    """Check after every op if `t` can be freed."""
    if s.tensor[c.IS_RETAINED, t] == 0:
        s.tensor[c.IS_RETAINED, t] = 1
        s.tensor[c.RETAINED_LIST, s.counts[c.RETAINED]] = t
        s.counts[c.RETAINED] += 1


@inner
def _remove_retained(s: ArenaState, t: int) -> None:
    s.tensor[c.IS_RETAINED, t] = 0
    kept = 0
    for i in range(s.counts[c.RETAINED]):
        if s.tensor[c.RETAINED_LIST, i] != t:
            s.tensor[c.RETAINED_LIST, kept] = s.tensor[c.RETAINED_LIST, i]
            kept += 1
    s.counts[c.RETAINED] = kept


@inner
def _banish(a: Arrays, s: ArenaState, t: int, position: int) -> bool:
    """False if an evicted tensor needs `t`; else live tensors computed from it become unevictable.

    Traverses the descendants of `t` through evicted tensors.
    """
    s.counts[c.STAMP] += 1
    stamp = s.counts[c.STAMP]
    s.tensor[c.VISITED, t] = stamp
    s.tensor[c.TO_VISIT, 0] = t
    depth, found = 1, 0
    while depth > 0:
        depth -= 1
        x = s.tensor[c.TO_VISIT, depth]
        for k in range(a.uses_ptr[x], a.uses_ptr[x + 1]):
            op = a.uses[k]
            if op > position:
                break
            for j in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
                child = a.makes[j]
                if s.tensor[c.VISITED, child] == stamp or a.is_output[child] == 1:
                    continue
                s.tensor[c.VISITED, child] = stamp
                if s.tensor[c.LIVE, child] == 1 or s.tensor[c.HOSTED, child] == 1:
                    s.block[c.VICTIM, found] = child
                    found += 1
                elif a.last_use[child] > position:
                    return False
                else:
                    s.tensor[c.TO_VISIT, depth] = child
                    depth += 1
    for i in range(found):
        child = s.block[c.VICTIM, i]
        s.tensor[c.EVICTABLE, child] = 0
        if a.last_use[child] <= position:  # live for recomputes only, now unevictable
            _retain(s, child)
    return True
