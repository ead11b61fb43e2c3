"""
The moves of the search: runs and marks are put in, moved, changed into each other, or taken out.

A read may be served by what is kept, by a recompute, or by a fetch.
"""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute.edits import move, put_in, take_out
from coop_plan.planner.search.compute.event_list import event_at, length, place
from coop_plan.planner.search.compute.liveness import next_read, wanted_at
from coop_plan.planner.search.compute.moves import (
    block_end,
    evicted_chance,
    gather,
    is_first,
    put_in_order,
    take_out_block,
)
from coop_plan.planner.search.compute.sequence import CODE
from coop_plan.planner.search.makespan.sequence import MarkerSearchState


@inner
def change(a: Program, m: MarkerSearchState) -> bool:
    """
    Change the candidate, which is the current sequence, at one of its events.

    False where the change drawn is none; the candidate may have been changed in part then.
    """
    s, n = m.orders, m.numbers
    size = length(s)
    if size == 0:
        return False
    kind, at = np.random.random(), np.random.randint(size)
    if kind < n.recompute_chance + n.fetch_chance:
        return _serve(a, m, at, kind >= n.recompute_chance)
    for _ in range(n.tries):
        if not is_first(s, at):
            break
        at = np.random.randint(size)
    if is_first(s, at):
        return False
    kind -= n.recompute_chance + n.fetch_chance
    if kind < n.convert_chance:
        return _convert(a, m, at)
    if kind < n.convert_chance + n.move_chance:
        return _move(a, m, at)
    return take_out_block(a, s, at, n.removed_block)


@inner
def _serve(a: Program, m: MarkerSearchState, at: int, by_link: bool) -> bool:
    """Something that an event reads is computed again, or fetched, for it."""
    s = m.orders
    op = s.event[event_at(s, at), CODE]
    if a.reads_ptr[op] == a.reads_ptr[op + 1]:
        return False
    t = a.reads[np.random.randint(a.reads_ptr[op], a.reads_ptr[op + 1])]
    maker = a.producer[t]
    if by_link:
        return bool(m.movable[t] == 1 and place(s, s.op[maker]) < at - 1 and fetch(a, m, t, at))
    if np.random.random() < m.numbers.early_chance:
        at -= int(m.numbers.earliest ** np.random.random())
    if s.again[maker] == 0 or at < 0 or at <= place(s, s.op[maker]):
        return False
    return recompute(a, m, maker, at, evicted_chance(s))


@inner
def _convert(a: Program, m: MarkerSearchState, at: int) -> bool:
    """Convert a recompute into a prefetch, or a prefetch into a recompute."""
    s = m.orders
    e = event_at(s, at)
    c = s.event[e, CODE]
    if a.makes_ptr[c] == a.makes_ptr[c + 1]:
        return False
    t = a.makes[np.random.randint(a.makes_ptr[c], a.makes_ptr[c + 1])]
    read, maker = next_read(s, t, at + 1), a.producer[t]
    if read == length(s) or m.movable[t] == 0:
        return False
    if c >= a.ops and (s.again[maker] == 0 or a.evictable[t] == 0):
        return False
    take_out(a, s, e)
    if c < a.ops:
        return fetch(a, m, t, read - 1)
    return recompute(a, m, maker, read - 1, evicted_chance(s))


@inner
def _move(a: Program, m: MarkerSearchState, begin: int) -> bool:
    """Move a block of events that are no first runs, none before its op's first run."""
    s, n = m.orders, m.numbers
    end = block_end(s, begin, n.moved_block if np.random.random() < n.moved_block_chance else 0.0)
    distance = int(n.furthest ** np.random.random())
    to = begin + (distance if np.random.random() < n.later_chance else -distance)
    if to < 0 or to > length(s) - (end - begin):
        return False
    for at in range(begin, end):
        code = s.event[event_at(s, at), CODE]
        op = code if code < a.ops else a.producer[a.makes[a.makes_ptr[code]]]
        first = place(s, s.op[op])
        if first - (end - begin if first > begin else 0) >= to:
            return False
        if code < a.ops and s.again[code] == 0:
            return False
    return move(a, s, begin, end, to)


@inlined
def fetch(a: Program, m: MarkerSearchState, t: int, at: int) -> bool:
    """Insert a prefetch marker before event `at`; False if there is no room."""
    m.orders.inserted[0] = a.ops + t
    return put_in(a, m.orders, 1, at)


@inner
def recompute(a: Program, m: MarkerSearchState, op: int, at: int, evicted: float) -> bool:
    """
    Put `op` into the candidate before event `at`; false where there is no room for more events.

    What it reads and is not kept there is computed again or fetched with it, with chance `evicted`.
    """
    s, n = m.orders, m.numbers
    kept = n.resident_usually if np.random.random() < n.usually else n.resident_rarely
    s.inserted[0] = op
    count, i = 1, 0
    while i < count:
        o = s.inserted[i]
        i += 1
        for k in range(a.reads_ptr[o], a.reads_ptr[o + 1]):
            t = a.reads[k]
            maker = a.producer[t]
            again, moves = s.again[maker] == 1 and a.evictable[t] == 1, m.movable[t] == 1
            chance = kept if wanted_at(a, s, t, at) else evicted
            if not (again or moves) or count == n.insertion or np.random.random() >= chance:
                continue
            code = maker
            if moves and not (again and np.random.random() >= n.fetched_chance):
                code = a.ops + t
            count = gather(s, count, code)
    return put_in_order(a, s, count, at)
