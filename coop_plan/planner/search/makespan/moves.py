"""Moves of the joint search: insert, move, convert and remove recomputes and prefetch markers.

A read is served by a live copy, a recompute or a prefetch.
"""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute.columns import CODE
from coop_plan.planner.search.compute.edits import insert_ops, move_events, remove_event
from coop_plan.planner.search.compute.event_list import event_at, length, position_of
from coop_plan.planner.search.compute.liveness import is_live_at, next_read
from coop_plan.planner.search.compute.moves import (
    add_pending,
    draw_evicted_chance,
    group_end,
    insert_pending,
    is_first_run,
    remove_group,
)
from coop_plan.planner.search.makespan.sequence import MakespanState


@inner
def propose(a: Program, m: MakespanState) -> bool:
    """Apply a random move to the candidate, which equals the current sequence.

    Returns False if the move is invalid; the candidate may then have changed in part.
    """
    s, p = m.search, m.params
    size = length(s)
    if size == 0:
        return False
    kind, at = np.random.random(), np.random.randint(size)
    if kind < p.recompute_chance + p.prefetch_chance:
        return _serve_input(a, m, at, kind >= p.recompute_chance)
    for _ in range(p.max_draws):
        if not is_first_run(s, at):
            break
        at = np.random.randint(size)
    if is_first_run(s, at):
        return False
    kind -= p.recompute_chance + p.prefetch_chance
    if kind < p.convert_chance:
        return _convert(a, m, at)
    if kind < p.convert_chance + p.move_chance:
        return _move_group(a, m, at)
    return remove_group(a, s, at, p.remove_more_chance)


@inner
def _serve_input(a: Program, m: MakespanState, at: int, by_prefetch: bool) -> bool:
    """Insert a recompute or a prefetch marker for a random input of an event."""
    s = m.search
    op = s.event[event_at(s, at), CODE]
    if a.reads_ptr[op] == a.reads_ptr[op + 1]:
        return False
    t = a.reads[np.random.randint(a.reads_ptr[op], a.reads_ptr[op + 1])]
    maker = a.producer[t]
    if by_prefetch:
        if m.movable[t] == 0 or position_of(s, s.first_run[maker]) >= at - 1:
            return False
        return insert_prefetch(a, m, t, at)
    if np.random.random() < m.params.lead_chance:
        at -= int(m.params.max_lead ** np.random.random())
    if s.recomputable[maker] == 0 or at < 0 or at <= position_of(s, s.first_run[maker]):
        return False
    return insert_recompute(a, m, maker, at, draw_evicted_chance(s))


@inner
def _convert(a: Program, m: MakespanState, at: int) -> bool:
    """Replace a recompute by a prefetch of one of its outputs, or a prefetch by a recompute."""
    s = m.search
    e = event_at(s, at)
    code = s.event[e, CODE]
    if a.makes_ptr[code] == a.makes_ptr[code + 1]:
        return False
    t = a.makes[np.random.randint(a.makes_ptr[code], a.makes_ptr[code + 1])]
    read, maker = next_read(s, t, at + 1), a.producer[t]
    if read == length(s) or m.movable[t] == 0:
        return False
    if code >= a.ops and (s.recomputable[maker] == 0 or a.evictable[t] == 0):
        return False
    remove_event(a, s, e)
    if code < a.ops:
        return insert_prefetch(a, m, t, read - 1)
    return insert_recompute(a, m, maker, read - 1, draw_evicted_chance(s))


@inner
def _move_group(a: Program, m: MakespanState, begin: int) -> bool:
    """Move a group of recomputes and markers; none may come before its op's first run."""
    s, p = m.search, m.params
    is_group = np.random.random() < p.move_group_chance
    end = group_end(s, begin, p.move_more_chance if is_group else 0.0)
    distance = int(p.max_move ** np.random.random())
    to = begin + (distance if np.random.random() < p.move_later_chance else -distance)
    if to < 0 or to > length(s) - (end - begin):
        return False
    for at in range(begin, end):
        code = s.event[event_at(s, at), CODE]
        op = code if code < a.ops else a.producer[a.makes[a.makes_ptr[code]]]
        first = position_of(s, s.first_run[op])
        if first - (end - begin if first > begin else 0) >= to:
            return False
        if code < a.ops and s.recomputable[code] == 0:
            return False
    return move_events(a, s, begin, end, to)


@inlined
def insert_prefetch(a: Program, m: MakespanState, t: int, at: int) -> bool:
    """Insert a prefetch marker of `t` before event `at`; False if there is no room."""
    m.search.pending[0] = a.ops + t
    return insert_ops(a, m.search, 1, at)


@inner
def insert_recompute(a: Program, m: MakespanState, op: int, at: int, evicted_chance: float) -> bool:
    """Insert a recompute of `op` before event `at`; False if there is no room.

    Evicted inputs are recomputed or prefetched with it, with probability `evicted_chance`; else
    their lifetimes are extended.
    """
    s, p = m.search, m.params
    usual = np.random.random() < p.usual_chance
    live_chance = p.recompute_live_usual if usual else p.recompute_live_rare
    s.pending[0] = op
    count, i = 1, 0
    # Breadth-first over the inputs of all pending ops; a marker has none.
    while i < count:
        code = s.pending[i]
        i += 1
        for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
            t = a.reads[k]
            maker = a.producer[t]
            recomputable = s.recomputable[maker] == 1 and a.evictable[t] == 1
            movable = m.movable[t] == 1
            chance = live_chance if is_live_at(a, s, t, at) else evicted_chance
            if not (recomputable or movable) or count == p.max_insertion:
                continue
            if np.random.random() >= chance:
                continue
            source_code = maker
            if movable and not (recomputable and np.random.random() >= p.prefetch_input_chance):
                source_code = a.ops + t
            count = add_pending(s, count, source_code)
    return insert_pending(a, s, count, at)
