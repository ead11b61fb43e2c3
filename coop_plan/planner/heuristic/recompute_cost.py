"""Recompute closures and next uses of tensors, through chains of evicted tensors.

The closure of a tensor is the set of ops to run again for it, given the current residents. If an
evicted tensor is needed at a position, so are the evicted tensors that it is recomputed from. Both
depend only on related tensors, so each eviction and each run marks those as dirty.
"""

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.jit import inlined
from coop_plan.planner.heuristic import columns as c
from coop_plan.planner.heuristic.eviction_state import EvictionState


@inlined
def mark_dirty(s: EvictionState, t: int) -> None:
    """Mark the closure and the next use of `t` as out of date."""
    s.tensor[c.DIRTY, t] = 1
    if s.tensor[c.IN_DIRTY_LIST, t] == 0 and s.counts[c.POOL_COUNT] > 0:
        s.tensor[c.IN_DIRTY_LIST, t] = 1
        s.tensor[c.DIRTY_LIST, s.counts[c.DIRTY_COUNT]] = t
        s.counts[c.DIRTY_COUNT] += 1


@inlined
def next_demand(a: Arrays, s: EvictionState, t: int, position: int) -> int:
    """First position at which an evicted tensor recomputed from `t` is needed."""
    found = c.NEVER
    for k in range(a.uses_ptr[t], a.uses_ptr[t + 1]):
        op = a.uses[k]
        if op > position:
            break
        for j in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
            child = a.makes[j]
            if (
                s.tensor[c.LIVE, child] == 0
                and s.tensor[c.MADE, child] == 1
                and a.outside[child] == 0
                and position < s.tensor[c.DEMAND, child] < found
            ):
                found = s.tensor[c.DEMAND, child]
    return found


@inlined
def propagate_demand(a: Arrays, s: EvictionState, t: int, position: int) -> None:
    """Tensor `t` was evicted until its next use: evicted ancestors are needed by then, too."""
    due = s.tensor[c.NEXT_USE, t]
    s.tensor[c.DEMAND, t] = due
    depth = 0
    s.stack[0] = t
    while depth >= 0:
        p = a.producer[s.stack[depth]]
        depth -= 1
        for k in range(a.reads_ptr[p], a.reads_ptr[p + 1]):
            source = a.reads[k]
            demand = s.tensor[c.DEMAND, source]
            if s.tensor[c.LIVE, source] == 0 and (due < demand or demand <= position):
                s.tensor[c.DEMAND, source] = due
                depth += 1
                s.stack[depth] = source


@inlined
def mark_relatives_dirty(a: Arrays, s: EvictionState, t: int, position: int) -> None:
    """Mark live tensors as dirty whose closure or next use depends on the residency of `t`.

    Those are its ancestors and its descendants, through evicted tensors. Ancestors are also reached
    through a limited number of tensors that nothing needs: through all of them the traversal would
    end at the first op of the program.
    """
    unneeded = 0
    for down in range(2):
        s.counts[c.STAMP] += 1
        stamp = s.counts[c.STAMP]
        depth = 0
        s.stack[0] = t
        s.tensor[c.VISITED, t] = stamp
        while depth >= 0:
            x = s.stack[depth]
            depth -= 1
            if down == 1:
                for k in range(a.uses_ptr[x], a.uses_ptr[x + 1]):
                    op = a.uses[k]
                    if op > position:
                        break
                    for j in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
                        child = a.makes[j]
                        if s.tensor[c.LIVE, child] == 1:
                            mark_dirty(s, child)
                        elif s.tensor[c.VISITED, child] != stamp and a.last_use[child] > position:
                            s.tensor[c.VISITED, child] = stamp
                            depth += 1
                            s.stack[depth] = child
            else:
                p = a.producer[x]
                for k in range(a.reads_ptr[p], a.reads_ptr[p + 1]):
                    source = a.reads[k]
                    if s.tensor[c.LIVE, source] == 1:
                        mark_dirty(s, source)
                    elif s.tensor[c.VISITED, source] != stamp:
                        s.tensor[c.VISITED, source] = stamp
                        if s.tensor[c.DEMAND, source] == c.NEVER:
                            if unneeded == 256:
                                continue
                            unneeded += 1
                        depth += 1
                        s.stack[depth] = source


@inlined
def closure_cost(a: Arrays, s: EvictionState, t: int, due: int) -> float:
    """Cost (µs) of the ops to run again for `t`, given the current residents; of 64 at most.

    Evictable tensors whose last use is before position `due` do not count as residents: they would
    have to be retained for `t`.
    """
    s.counts[c.STAMP] += 1
    stamp = s.counts[c.STAMP]
    total = 0.0
    visited = 0
    depth = 0
    s.stack[0] = a.producer[t]
    s.op[c.SEEN, a.producer[t]] = stamp
    while depth >= 0:
        op = s.stack[depth]
        depth -= 1
        total += a.cost[op]
        visited += 1
        if visited >= 64:
            break
        for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
            source = a.reads[k]
            p = a.producer[source]
            absent = s.tensor[c.LIVE, source] == 0 or (
                a.last_use[source] < due and s.tensor[c.EVICTABLE, source] == 1
            )
            if absent and s.op[c.SEEN, p] != stamp:
                s.op[c.SEEN, p] = stamp
                depth += 1
                s.stack[depth] = p
    return total


@inlined
def banish(a: Arrays, s: EvictionState, t: int, position: int) -> int:
    """Banish dead tensor `t`, which cannot be recomputed; returns -1.

    If an evicted tensor needs `t`, nothing is done, and that tensor is returned.

    Live tensors that depend on it become unevictable (DTR, appendix C.3). So none of its dead
    descendants will be needed either, and later traversals skip them.
    """
    for apply in range(2):  # check first, then apply
        s.counts[c.STAMP] += 1
        stamp = s.counts[c.STAMP]
        depth = 0
        s.stack[0] = t
        s.tensor[c.VISITED, t] = stamp
        while depth >= 0:
            parent = s.stack[depth]
            depth -= 1
            if apply == 1:
                s.tensor[c.BANISHED, parent] = 1
            for k in range(a.uses_ptr[parent], a.uses_ptr[parent + 1]):
                op = a.uses[k]
                if op > position:
                    break
                for j in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
                    child = a.makes[j]
                    if s.tensor[c.VISITED, child] == stamp or a.is_output[child] == 1:
                        continue
                    if s.tensor[c.BANISHED, child] == 1:
                        continue
                    s.tensor[c.VISITED, child] = stamp
                    if s.tensor[c.LIVE, child] == 1:
                        if apply == 1:
                            s.tensor[c.EVICTABLE, child] = 0
                    elif a.last_use[child] > position:
                        return int(child)
                    else:
                        depth += 1
                        s.stack[depth] = child
    return -1
