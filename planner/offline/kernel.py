"""
The clairvoyant step: runs the program at a logical budget and evicts what is cheapest to miss.

Nothing has an address yet. Memory is exact: a tensor is freed after its last use, unless an evicted
one will need it to be recomputed. When an op does not fit, the live tensor of least

    closure cost / (bytes x distance^alpha)

is evicted, where the closure is every op to run again for it at its next use, and the distance is
measured from now to that use in a price that the caller sets per program position. The next use of
a tensor includes those of evicted tensors that must be recomputed from it.

Closures and next uses are kept per tensor and looked at again only when something they depend on
came or went; tensors too small to matter are victims only when no other is left.
"""

import numpy as np

from planner._numba import njit
from planner.offline.arrays import Arrays, Flags, Floats, Ints

NEVER = 1 << 40
"""A next use that does not come."""

CLOSURE_OPS = 64
"""Ops after which the estimate of a closure's cost stops growing."""


@njit
def simulate(
    a: Arrays,
    budget: int,
    price: Floats,
    weight: Floats,
    alpha: float,
    cap: bool,
    small: int,
    max_events: int,
    cost_limit: float,
    ev_op: Ints,
    ev_mem: Ints,
    dr_tensor: Ints,
    dr_event: Ints,
    dr_slot: Ints,
    in_event: Ints,
    in_out: Ints,
    in_source: Ints,
) -> tuple[int, float, int, int, int]:
    """
    One run; returns (failed op or -1, cost in µs, events, drops, in-place writes).

    `price` has a prefix sum per program position, `weight` a factor per row entry of `uses` (plus
    one for tensors without a further use). `cap` counts no more bytes of a victim than are short;
    tensors below `small` bytes are looked at last. Arrays from `ev_op` on receive the schedule: the
    op and the bytes in use of each event; tensor, last event and use slot of each drop; event,
    output and input of each in-place write. A run that costs more than `cost_limit` (µs) stops as
    failed.
    """
    n = a.cost.size
    count = a.size.size
    live = np.zeros(count, dtype=np.uint8)
    made_once = np.zeros(count, dtype=np.uint8)
    pins = np.zeros(count, dtype=np.int64)
    evictable = a.evictable.copy()
    slot = a.uses_ptr[:-1].copy()
    stored = np.full(count, NEVER, dtype=np.int64)
    dirty = np.ones(count, dtype=np.uint8)
    due_of = np.full(count, NEVER, dtype=np.int64)
    merit = np.zeros(count, dtype=np.float64)  # closure cost x weight / bytes
    closure_of = np.zeros(count, dtype=np.float64)
    # Live tensors that may become victims: the larger ones, and the small ones.
    alive = np.empty((2, count), dtype=np.int64)
    alive_at = np.full(count, -1, dtype=np.int64)
    n_alive = np.zeros(2, dtype=np.int64)
    retained = np.zeros(count, dtype=np.uint8)
    n_retained = 0
    seen = np.zeros(n, dtype=np.int64)
    stamp = 0
    tseen = np.zeros(count, dtype=np.int64)
    order = np.empty(n, dtype=np.int64)
    stack = np.empty(max(n, count) + 1, dtype=np.int64)
    cursor = np.empty(n + 1, dtype=np.int64)
    used = 0
    cost = 0.0
    n_ev = n_dr = n_in = 0

    for position in range(n):
        # The ops to run again for this one, in order, with their inputs pinned.
        stamp += 1
        n_order = 0
        depth = 0
        stack[0] = position
        cursor[0] = a.reads_ptr[position]
        seen[position] = stamp
        for k in range(a.reads_ptr[position], a.reads_ptr[position + 1]):
            pins[a.reads[k]] += 1
        while depth >= 0:
            op = stack[depth]
            pushed = False
            while cursor[depth] < a.reads_ptr[op + 1]:
                t = a.reads[cursor[depth]]
                cursor[depth] += 1
                if live[t] == 0:
                    p = a.producer[t]
                    if seen[p] != stamp:
                        seen[p] = stamp
                        for k in range(a.reads_ptr[p], a.reads_ptr[p + 1]):
                            pins[a.reads[k]] += 1
                        depth += 1
                        stack[depth] = p
                        cursor[depth] = a.reads_ptr[p]
                        pushed = True
                        break
            if not pushed:
                order[n_order] = op
                n_order += 1
                depth -= 1

        for step in range(n_order):
            op = order[step]
            cost += a.cost[op]
            if n_ev >= max_events or cost > cost_limit:
                return position, cost, n_ev, n_dr, n_in
            # In-place writes: the input ends here and nothing evicted will want it.
            first_in = n_in
            for k in range(a.pairs_ptr[op], a.pairs_ptr[op + 1]):
                out, source = a.pairs_out[k], a.pairs_in[k]
                if (
                    live[out] == 0
                    and live[source] == 1
                    and a.last_use[source] <= position
                    and pins[source] == 1
                    and evictable[source] == 1
                    and _demand(a, source, position, stored, live, made_once) == NEVER
                ):
                    clash = False
                    for j in range(first_in, n_in):
                        if in_out[j] == out or in_source[j] == source:
                            clash = True
                    if not clash:
                        in_event[n_in] = n_ev
                        in_out[n_in] = out
                        in_source[n_in] = source
                        n_in += 1
            need = a.workspace[op]
            for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
                t = a.makes[k]
                if a.outside[t] == 0 or made_once[t] == 1:
                    need += a.size[t]
            for j in range(first_in, n_in):
                need -= a.size[in_out[j]]

            while used + need > budget:
                victim = -1
                best = np.inf
                short = float(used + need - budget)
                for group in range(2):
                    for i in range(n_alive[group]):
                        t = alive[group, i]
                        if pins[t] > 0 or evictable[t] == 0:
                            continue
                        if dirty[t] == 1:
                            dirty[t] = 0
                            s = slot[t]
                            while s < a.uses_ptr[t + 1] and a.uses[s] <= position:
                                s += 1
                            slot[t] = s
                            due = _demand(a, t, position, stored, live, made_once)
                            if s < a.uses_ptr[t + 1]:
                                due = min(due, a.uses[s])
                            due_of[t] = due
                            stamp += 1
                            closure = _closure(a, t, live, seen, stamp, stack)
                            closure_of[t] = closure * weight[s]
                            merit[t] = closure_of[t] / a.size[t]
                        distance = price[min(due_of[t], n)] - price[position] + 1e-9
                        if alpha == 1.0:
                            pass
                        elif alpha == 0.5:
                            distance = np.sqrt(distance)
                        elif alpha == 0.25:
                            distance = np.sqrt(np.sqrt(distance))
                        else:
                            distance = distance**alpha
                        if cap and a.size[t] > short:
                            score = closure_of[t] / (short * distance)
                        else:
                            score = merit[t] / distance
                        if score < best:
                            best = score
                            victim = t
                    if victim >= 0:
                        break
                if victim < 0:
                    return position, cost, n_ev, n_dr, n_in
                t = victim
                _remove(alive, alive_at, n_alive, t, a.size[t] < small)
                live[t] = 0
                used -= a.size[t]
                dr_tensor[n_dr] = t
                dr_event[n_dr] = n_ev - 1
                dr_slot[n_dr] = slot[t]
                n_dr += 1
                _announce(a, t, due_of[t], position, stored, live, stack)
                stamp += 1
                _soil(a, t, position, live, dirty, tseen, stamp, stack)

            # The op itself.
            for j in range(first_in, n_in):
                source = in_source[j]
                _remove(alive, alive_at, n_alive, source, a.size[source] < small)
                live[source] = 0
                stored[source] = NEVER
                stamp += 1
                _soil(a, source, position, live, dirty, tseen, stamp, stack)
            ev_op[n_ev] = op
            ev_mem[n_ev] = used + need
            n_ev += 1
            for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
                t = a.makes[k]
                if live[t] == 0 and a.outside[t] == 0:
                    live[t] = 1
                    dirty[t] = 1
                    if a.size[t] > 0:
                        group = 1 if a.size[t] < small else 0
                        alive[group, n_alive[group]] = t
                        alive_at[t] = n_alive[group]
                        n_alive[group] += 1
                    if made_once[t] == 1:
                        stamp += 1
                        _soil(a, t, position, live, dirty, tseen, stamp, stack)
                    taken = False
                    for j in range(first_in, n_in):
                        if in_out[j] == t:
                            taken = True
                    if not taken:
                        used += a.size[t]
                made_once[t] = 1
            for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
                pins[a.reads[k]] -= 1
                dirty[a.reads[k]] = 1

            # What has no reader left goes.
            for which in range(2):
                low = a.reads_ptr[op] if which == 0 else a.makes_ptr[op]
                high = a.reads_ptr[op + 1] if which == 0 else a.makes_ptr[op + 1]
                for k in range(low, high):
                    t = a.reads[k] if which == 0 else a.makes[k]
                    if live[t] == 0 or pins[t] > 0 or a.last_use[t] > position:
                        continue
                    if evictable[t] == 0:
                        if a.is_output[t] == 0 and retained[t] == 0:
                            retained[t] = 1
                            n_retained += 1
                        continue
                    if step < n_order - 1 and a.last_use[t] == position:
                        continue  # this position's own op has still to read it
                    due = _demand(a, t, position, stored, live, made_once)
                    if due < NEVER or a.size[t] == 0:
                        continue  # an evicted tensor will be made from it
                    _remove(alive, alive_at, n_alive, t, a.size[t] < small)
                    live[t] = 0
                    used -= a.size[t]
                    stored[t] = due
                    dr_tensor[n_dr] = t
                    dr_event[n_dr] = n_ev - 1
                    dr_slot[n_dr] = -1
                    n_dr += 1

        if n_retained > 0:
            for t in range(count):
                if retained[t] == 1 and live[t] == 1 and pins[t] == 0:
                    stamp += 1
                    if _banish(a, t, position, live, evictable, tseen, stamp, stack):
                        retained[t] = 0
                        n_retained -= 1
                        _remove(alive, alive_at, n_alive, t, a.size[t] < small)
                        live[t] = 0
                        used -= a.size[t]
                        dr_tensor[n_dr] = t
                        dr_event[n_dr] = n_ev - 1
                        dr_slot[n_dr] = -1
                        n_dr += 1
    return -1, cost, n_ev, n_dr, n_in


@njit
def _remove(alive: Ints, alive_at: Ints, n_alive: Ints, t: int, is_small: bool) -> None:
    """Take `t` off its list of live tensors."""
    if alive_at[t] < 0:
        return
    group = 1 if is_small else 0
    n_alive[group] -= 1
    last = alive[group, n_alive[group]]
    alive[group, alive_at[t]] = last
    alive_at[last] = alive_at[t]
    alive_at[t] = -1


@njit
def _demand(a: Arrays, t: int, position: int, stored: Ints, live: Flags, made_once: Flags) -> int:
    """First position at which an evicted tensor made from `t` is to be there again."""
    found = NEVER
    for k in range(a.uses_ptr[t], a.uses_ptr[t + 1]):
        op = a.uses[k]
        if op > position:
            break
        for j in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
            child = a.makes[j]
            gone = live[child] == 0 and made_once[child] == 1 and a.outside[child] == 0
            if gone and position < stored[child] < found:
                found = stored[child]
    return found


@njit
def _announce(
    a: Arrays, t: int, due: int, position: int, stored: Ints, live: Flags, stack: Ints
) -> None:
    """Tensor `t` is gone until `due`: gone tensors that it is made from are needed by then."""
    stored[t] = due
    depth = 0
    stack[0] = t
    while depth >= 0:
        p = a.producer[stack[depth]]
        depth -= 1
        for k in range(a.reads_ptr[p], a.reads_ptr[p + 1]):
            source = a.reads[k]
            if live[source] == 0 and (due < stored[source] or stored[source] <= position):
                stored[source] = due
                depth += 1
                stack[depth] = source


@njit
def _soil(
    a: Arrays,
    t: int,
    position: int,
    live: Flags,
    dirty: Flags,
    tseen: Ints,
    stamp: int,
    stack: Ints,
) -> None:
    """
    Tensor `t` came or went: mark live tensors whose closure or next use may have changed.

    Those are its descendants and its ancestors, through tensors that are gone.
    """
    for down in range(2):
        here = stamp * 2 + down
        depth = 0
        stack[0] = t
        tseen[t] = here
        while depth >= 0:
            x = stack[depth]
            depth -= 1
            if down == 1:
                for k in range(a.uses_ptr[x], a.uses_ptr[x + 1]):
                    op = a.uses[k]
                    if op > position:
                        break
                    for j in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
                        child = a.makes[j]
                        if live[child] == 1:
                            dirty[child] = 1
                        elif tseen[child] != here and a.last_use[child] > position:
                            tseen[child] = here
                            depth += 1
                            stack[depth] = child
            else:
                p = a.producer[x]
                for k in range(a.reads_ptr[p], a.reads_ptr[p + 1]):
                    source = a.reads[k]
                    if live[source] == 1:
                        dirty[source] = 1
                    elif tseen[source] != here:
                        tseen[source] = here
                        depth += 1
                        stack[depth] = source


@njit
def _closure(a: Arrays, t: int, live: Flags, seen: Ints, stamp: int, stack: Ints) -> float:
    """Cost in µs of the ops to run again for `t` as things are now."""
    total = 0.0
    visited = 0
    depth = 0
    stack[0] = a.producer[t]
    seen[a.producer[t]] = stamp
    while depth >= 0:
        op = stack[depth]
        depth -= 1
        total += a.cost[op]
        visited += 1
        if visited >= CLOSURE_OPS:
            break
        for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
            source = a.reads[k]
            if live[source] == 0:
                p = a.producer[source]
                if seen[p] != stamp:
                    seen[p] = stamp
                    depth += 1
                    stack[depth] = p
    return total


@njit
def _banish(
    a: Arrays,
    t: int,
    position: int,
    live: Flags,
    evictable: Ints,
    tseen: Ints,
    stamp: int,
    stack: Ints,
) -> bool:
    """
    Let go of `t`, which cannot be recomputed, if no dropped tensor will need it.

    Live tensors that depend on it can then no longer be evicted (DTR, appendix C.3).
    """
    for mark in range(2):  # look first, then mark
        depth = 0
        stack[0] = t
        here = stamp * 2 + mark
        tseen[t] = here
        while depth >= 0:
            parent = stack[depth]
            depth -= 1
            for k in range(a.uses_ptr[parent], a.uses_ptr[parent + 1]):
                op = a.uses[k]
                if op > position:
                    break
                for j in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
                    child = a.makes[j]
                    if tseen[child] == here or a.is_output[child] == 1:
                        continue
                    tseen[child] = here
                    if live[child] == 1:
                        if mark == 1:
                            evictable[child] = 0
                    elif a.last_use[child] > position:
                        return False
                    else:
                        depth += 1
                        stack[depth] = child
    return True
