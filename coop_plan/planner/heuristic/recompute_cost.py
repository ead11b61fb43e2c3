"""
Closures, next uses and dependants of tensors through evicted tensors.

A closure is all the ops to run again for a tensor as things are now. An evicted tensor that is to
be there again by a position passes that demand on to what it is made from. Both change only with
what comes and goes around them, so whoever evicts or computes marks the live tensors concerned.
"""

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.jit import inlined
from coop_plan.planner.heuristic.eviction_state import (
    CHANGED,
    CHANGED_COUNT,
    DIRTY,
    DUE,
    EVICTABLE,
    HEAPED,
    LISTED,
    LIVE,
    MADE,
    MARK,
    NEVER,
    POOL_COUNT,
    SEEN,
    STAMP,
    STORED,
    EvictionState,
)


@inlined
def changed(s: EvictionState, t: int) -> None:
    """The closure or the next use of `t` may not be what they were."""
    s.tensor[DIRTY, t] = 1
    if s.tensor[LISTED, t] == 0 and (s.counts[POOL_COUNT] > 0 or s.counts[HEAPED] == 1):
        s.tensor[LISTED, t] = 1
        s.tensor[CHANGED, s.counts[CHANGED_COUNT]] = t
        s.counts[CHANGED_COUNT] += 1


@inlined
def next_demand(a: Arrays, s: EvictionState, t: int, position: int) -> int:
    """First position at which an evicted tensor made from `t` is to be there again."""
    found = NEVER
    for k in range(a.uses_ptr[t], a.uses_ptr[t + 1]):
        op = a.uses[k]
        if op > position:
            break
        for j in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
            child = a.makes[j]
            if (
                s.tensor[LIVE, child] == 0
                and s.tensor[MADE, child] == 1
                and a.outside[child] == 0
                and position < s.tensor[STORED, child] < found
            ):
                found = s.tensor[STORED, child]
    return found


@inlined
def announce(a: Arrays, s: EvictionState, t: int, position: int) -> None:
    """Tensor `t` is gone until its next use: gone tensors it is made from are needed by then."""
    due = s.tensor[DUE, t]
    s.tensor[STORED, t] = due
    depth = 0
    s.stack[0] = t
    while depth >= 0:
        p = a.producer[s.stack[depth]]
        depth -= 1
        for k in range(a.reads_ptr[p], a.reads_ptr[p + 1]):
            source = a.reads[k]
            known = s.tensor[STORED, source]
            if s.tensor[LIVE, source] == 0 and (due < known or known <= position):
                s.tensor[STORED, source] = due
                depth += 1
                s.stack[depth] = source


@inlined
def mark_relatives(a: Arrays, s: EvictionState, t: int, position: int) -> None:
    """
    Tensor `t` came or went: mark live tensors whose closure or next use may have changed.

    Those are its descendants and its ancestors, through tensors that are gone.
    """
    for down in range(2):
        s.counts[STAMP] += 1
        stamp = s.counts[STAMP]
        depth = 0
        s.stack[0] = t
        s.tensor[MARK, t] = stamp
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
                        if s.tensor[LIVE, child] == 1:
                            changed(s, child)
                        elif s.tensor[MARK, child] != stamp and a.last_use[child] > position:
                            s.tensor[MARK, child] = stamp
                            depth += 1
                            s.stack[depth] = child
            else:
                p = a.producer[x]
                for k in range(a.reads_ptr[p], a.reads_ptr[p + 1]):
                    source = a.reads[k]
                    if s.tensor[LIVE, source] == 1:
                        changed(s, source)
                    elif s.tensor[MARK, source] != stamp:
                        s.tensor[MARK, source] = stamp
                        depth += 1
                        s.stack[depth] = source


@inlined
def closure_cost(a: Arrays, s: EvictionState, t: int, due: int) -> float:
    """
    Cost in µs of the ops to run again for `t` as things are now.

    What the program does not need any more at position `due` counts as gone, too: it would have to
    be kept for `t`.
    """
    s.counts[STAMP] += 1
    stamp = s.counts[STAMP]
    total = 0.0
    visited = 0
    depth = 0
    s.stack[0] = a.producer[t]
    s.op[SEEN, a.producer[t]] = stamp
    while depth >= 0:
        op = s.stack[depth]
        depth -= 1
        total += a.cost[op]
        visited += 1
        if visited >= s.closure_ops:
            break
        for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
            source = a.reads[k]
            p = a.producer[source]
            evicted = s.tensor[LIVE, source] == 0 or (
                a.last_use[source] < due and s.tensor[EVICTABLE, source] == 1
            )
            if evicted and s.op[SEEN, p] != stamp:
                s.op[SEEN, p] = stamp
                depth += 1
                s.stack[depth] = p
    return total


@inlined
def banish(a: Arrays, s: EvictionState, t: int, position: int) -> bool:
    """
    Let go of `t`, which cannot be recomputed, if no dropped tensor will need it.

    Live tensors that depend on it can then no longer be evicted (DTR, appendix C.3).
    """
    for mark in range(2):  # look first, then mark
        s.counts[STAMP] += 1
        stamp = s.counts[STAMP]
        depth = 0
        s.stack[0] = t
        s.tensor[MARK, t] = stamp
        while depth >= 0:
            parent = s.stack[depth]
            depth -= 1
            for k in range(a.uses_ptr[parent], a.uses_ptr[parent + 1]):
                op = a.uses[k]
                if op > position:
                    break
                for j in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
                    child = a.makes[j]
                    if s.tensor[MARK, child] == stamp or a.is_output[child] == 1:
                        continue
                    s.tensor[MARK, child] = stamp
                    if s.tensor[LIVE, child] == 1:
                        if mark == 1:
                            s.tensor[EVICTABLE, child] = 0
                    elif a.last_use[child] > position:
                        return False
                    else:
                        depth += 1
                        s.stack[depth] = child
    return True
