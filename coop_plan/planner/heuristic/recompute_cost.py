"""Recompute closures and next uses of tensors, through chains of evicted tensors.

The closure of a tensor is the set of ops to run again for it, given the current residents. If an
evicted tensor is needed at a position, so are the evicted tensors that it is recomputed from. Both
depend only on related tensors, so each eviction and each run marks those as dirty.
"""

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.jit import inlined
from coop_plan.planner.heuristic.eviction_state import NEVER, EvictionState


@inlined
def mark_dirty(s: EvictionState, t: int) -> None:
    """Mark the closure and the next use of `t` as out of date."""
    s.tensor[t].is_dirty = True
    if not s.tensor[t].is_changed and s.now.pool > 0:
        s.tensor[t].is_changed = True
        s.changed[s.now.changed] = t
        s.now.changed += 1


@inlined
def next_demand(a: Arrays, s: EvictionState, t: int, position: int) -> int:
    """First position at which an evicted tensor recomputed from `t` is needed."""
    found = NEVER
    for k in range(a.uses_ptr[t], a.uses_ptr[t + 1]):
        op = a.uses[k]
        if op > position:
            break
        for j in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
            child = a.makes[j]
            if (
                not s.tensor[child].is_live
                and s.tensor[child].is_made
                and a.outside[child] == 0
                and position < s.tensor[child].demand < found
            ):
                found = s.tensor[child].demand
    return found


@inlined
def propagate_demand(a: Arrays, s: EvictionState, t: int, position: int) -> None:
    """Tensor `t` was evicted until its next use: evicted ancestors are needed by then, too."""
    due = s.tensor[t].next_use
    s.tensor[t].demand = due
    depth = 0
    s.stack[0] = t
    while depth >= 0:
        p = a.producer[s.stack[depth]]
        depth -= 1
        for k in range(a.reads_ptr[p], a.reads_ptr[p + 1]):
            source = a.reads[k]
            demand = s.tensor[source].demand
            if not s.tensor[source].is_live and (due < demand or demand <= position):
                s.tensor[source].demand = due
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
        s.now.stamp += 1
        stamp = s.now.stamp
        depth = 0
        s.stack[0] = t
        s.tensor[t].visited = stamp
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
                        if s.tensor[child].is_live:
                            mark_dirty(s, child)
                        elif s.tensor[child].visited != stamp and a.last_use[child] > position:
                            s.tensor[child].visited = stamp
                            depth += 1
                            s.stack[depth] = child
            else:
                p = a.producer[x]
                for k in range(a.reads_ptr[p], a.reads_ptr[p + 1]):
                    source = a.reads[k]
                    if s.tensor[source].is_live:
                        mark_dirty(s, source)
                    elif s.tensor[source].visited != stamp:
                        s.tensor[source].visited = stamp
                        if s.tensor[source].demand == NEVER:
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
    s.now.stamp += 1
    stamp = s.now.stamp
    total = 0.0
    visited = 0
    depth = 0
    s.stack[0] = a.producer[t]
    s.seen[a.producer[t]] = stamp
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
            absent = not s.tensor[source].is_live or (
                a.last_use[source] < due and s.tensor[source].is_evictable
            )
            if absent and s.seen[p] != stamp:
                s.seen[p] = stamp
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
        s.now.stamp += 1
        stamp = s.now.stamp
        depth = 0
        s.stack[0] = t
        s.tensor[t].visited = stamp
        while depth >= 0:
            parent = s.stack[depth]
            depth -= 1
            if apply == 1:
                s.tensor[parent].is_banished = True
            for k in range(a.uses_ptr[parent], a.uses_ptr[parent + 1]):
                op = a.uses[k]
                if op > position:
                    break
                for j in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
                    child = a.makes[j]
                    if s.tensor[child].visited == stamp or a.is_output[child] == 1:
                        continue
                    if s.tensor[child].is_banished:
                        continue
                    s.tensor[child].visited = stamp
                    if s.tensor[child].is_live:
                        if apply == 1:
                            s.tensor[child].is_evictable = False
                    elif a.last_use[child] > position:
                        return int(child)
                    else:
                        depth += 1
                        s.stack[depth] = child
    return -1
