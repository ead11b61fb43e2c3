"""Moves of both searches: insert, move, convert or remove recomputes and prefetch markers.

First runs move, too. Prefetch markers (`planner.search.makespan.sequence`) are inserted for movable
tensors only. Dead events are eliminated afterwards (`planner.search.compute.edits`).
"""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute.edits import insert_ops, move_events, remove_event
from coop_plan.planner.search.compute.event_list import event_at, length, position_of
from coop_plan.planner.search.compute.liveness import is_live_at, next_read
from coop_plan.planner.search.compute.sequence import NONE, SearchState


@inner
def propose(a: Program, s: SearchState) -> bool:
    """Apply a random move to the candidate, which equals the current sequence.

    Returns False if the move is invalid; the candidate may then have changed in part.
    """
    p, size = s.params, length(s)
    if size == 0:
        return False
    kind, begin = np.random.random(), np.random.randint(size)
    if kind < p.recompute_chance + p.prefetch_chance:
        return _serve_input(a, s, begin, kind >= p.recompute_chance)
    if _is_first_run(s, begin):
        begin = _draw_event(s, False)
    if begin == NONE:
        return False
    kind -= p.recompute_chance + p.prefetch_chance
    if kind < p.convert_chance:
        return _convert(a, s, begin)
    if kind < p.convert_chance + 0.2:
        return _move_group(a, s, begin)
    return _remove_group(a, s, begin)


@inlined
def _is_first_run(s: SearchState, at: int) -> bool:
    return s.event[event_at(s, at)].is_first_run


@inlined
def _draw_event(s: SearchState, first_run: bool) -> int:
    """Draw an event that is the first run of its op, or one that is not; NONE if 50 draws fail."""
    for _ in range(50 if length(s) > 0 else 0):
        at = np.random.randint(length(s))
        if _is_first_run(s, at) == first_run:
            return at
    return NONE


@inlined
def _draw_distance() -> int:
    """Draw the distance of a move, in events: log-uniform."""
    return int(60.0 ** np.random.random())


@inner
def _serve_input(a: Program, s: SearchState, at: int, by_prefetch: bool) -> bool:
    """Insert a prefetch of a random input of an event, or a recompute.

    That may lie some events earlier: a log-uniform number.
    """
    op = s.event[event_at(s, at)].code
    if a.reads_ptr[op] == a.reads_ptr[op + 1]:
        return False
    t = a.reads[np.random.randint(a.reads_ptr[op], a.reads_ptr[op + 1])]
    maker = a.producer[t]
    if by_prefetch:
        if not s.tensor[t].is_movable or position_of(s, s.op[maker].first_run) >= at - 1:
            return False
        return insert_prefetch(a, s, t, at)
    if np.random.random() < 0.5:  # else directly before the event
        at -= int(40.0 ** np.random.random())
    if not s.op[maker].can_rerun or at < 0 or at <= position_of(s, s.op[maker].first_run):
        return False
    return insert_recompute(a, s, maker, at, draw_evicted_chance())


@inner
def _convert(a: Program, s: SearchState, at: int) -> bool:
    """Replace a recompute by a prefetch of one of its outputs, or a prefetch by a recompute."""
    e = event_at(s, at)
    code = s.event[e].code
    if a.makes_ptr[code] == a.makes_ptr[code + 1]:
        return False
    t = a.makes[np.random.randint(a.makes_ptr[code], a.makes_ptr[code + 1])]
    read, maker = next_read(s, t, at + 1), a.producer[t]
    if read == length(s) or not s.tensor[t].is_movable:
        return False
    if code >= a.ops and not s.tensor[t].can_rerun:
        return False
    remove_event(a, s, e)
    if code < a.ops:
        return insert_prefetch(a, s, t, read - 1)
    return insert_recompute(a, s, maker, read - 1, draw_evicted_chance())


@inner
def _move_group(a: Program, s: SearchState, begin: int) -> bool:
    """Move a group of recomputes and markers by a log-uniform distance."""
    is_group = np.random.random() < 0.6  # else a single event
    end = _group_end(s, begin, 0.8 if is_group else 0.0)
    distance = _draw_distance()
    to = begin + (distance if np.random.random() < 0.5 else -distance)
    if to < 0 or to > length(s) - (end - begin):
        return False
    # No event may come before its op's first run, whose position shifts if it lies behind the
    # group.
    for at in range(begin, end):
        code = s.event[event_at(s, at)].code
        op = code if code < a.ops else a.producer[a.makes[a.makes_ptr[code]]]
        first = position_of(s, s.op[op].first_run)
        if first - (end - begin if first > begin else 0) >= to:
            return False
        if code < a.ops and not s.op[code].can_rerun:
            return False
    return move_events(a, s, begin, end, to)


@inner
def move_first_run(a: Program, s: SearchState) -> bool:
    """Move a random first run within its dependencies; False if it cannot move."""
    begin = _draw_event(s, True)
    if begin == NONE:
        return False
    low, high = _dependency_bounds(s, begin)
    later = np.random.random() < 0.5
    if np.random.random() < 0.3:  # as far as its dependencies allow
        to = high if later else low
    else:
        distance = _draw_distance()
        to = min(high, begin + distance) if later else max(low, begin - distance)
    at = _reachable(s, begin, to)
    return at != begin and move_events(a, s, begin, begin + 1, at)


@inlined
def _reachable(s: SearchState, begin: int, to: int) -> int:
    """Farthest position, up to `to`, that the first run at `begin` can move to."""
    e = event_at(s, begin)
    op, b, i = s.event[e].code, s.event[e].block, s.event[e].index
    step = 1 if to > begin else -1
    for at in range(begin, to, step):
        # (b, i) is the event that the first run would cross next.
        i += step
        while i < 0 or i == s.block[b].events:
            b += step
            i = 0 if step > 0 else s.block[b].events - 1
        if _must_not_cross(s, op, s.members[b, i]):
            return at
    return to


@inlined
def _dependency_bounds(s: SearchState, at: int) -> tuple[int, int]:
    """Earliest and latest position of the first run at `at` given its reads and its readers."""
    low, high = 0, length(s) - 1
    x = s.event[event_at(s, at)].first_access
    while x != NONE:
        t = s.access[x].tensor
        if s.access[x].is_read:
            low = max(low, position_of(s, s.access[s.tensor[t].head].event) + 1)
        elif s.access[x].next != NONE:
            high = min(high, position_of(s, s.access[s.access[x].next].event) - 1)
        x = s.access[x].next_of_event
    return low, high


@inlined
def _must_not_cross(s: SearchState, op: int, e: int) -> bool:
    """True if the first run of an op must stay on its side of event `e`: phases and chained ops."""
    other, first = s.event[e].code, s.event[e].is_first_run
    if first and s.op[other].phase != s.op[op].phase:
        return True
    both_chained = s.op[op].is_chained and s.op[other].is_chained
    return both_chained and (first or not s.op[other].can_rerun)


@inner
def _remove_group(a: Program, s: SearchState, begin: int) -> bool:
    """Remove a group of recomputes and markers."""
    for _ in range(begin, _group_end(s, begin, 0.3)):
        remove_event(a, s, event_at(s, begin))
    return True


@inlined
def _group_end(s: SearchState, begin: int, more_chance: float) -> int:
    """End of a group from `begin` on, of adjacent events none of which is the first run of its op.

    Each next event joins with probability `more_chance`.
    """
    end = begin + 1
    while np.random.random() < more_chance and end < length(s) and not _is_first_run(s, end):
        end += 1
    return end


@inlined
def draw_evicted_chance() -> float:
    """Draw the probability with which evicted inputs of a recompute are recomputed, too."""
    return 0.9 if np.random.random() < 0.7 else 0.5


@inlined
def insert_prefetch(a: Program, s: SearchState, t: int, at: int) -> bool:
    """Insert a prefetch marker of `t` before event `at`; False if there is no room."""
    s.pending[0] = a.ops + t
    return insert_ops(a, s, 1, at)


@inner
def insert_recompute(a: Program, s: SearchState, op: int, at: int, evicted_chance: float) -> bool:
    """Insert a recompute of `op` before event `at`; False if there is no room.

    Inputs that are evicted there are recomputed or prefetched with it, with probability
    `evicted_chance`; else their lifetimes are extended.
    """
    # Rarely inputs are recomputed although they are live.
    live_chance = 0.0 if np.random.random() < 0.7 else 0.3
    s.pending[0] = op
    count, i = 1, 0
    # Breadth-first over the inputs of all pending ops; a marker has none.
    while i < count:
        code = s.pending[i]
        i += 1
        for k in range(a.reads_ptr[code], a.reads_ptr[code + 1]):
            t = a.reads[k]
            recomputable, movable = s.tensor[t].can_rerun, s.tensor[t].is_movable
            chance = live_chance if is_live_at(a, s, t, at) else evicted_chance
            if not (recomputable or movable) or count == s.pending.size:
                continue
            if np.random.random() >= chance:
                continue
            source_code = a.producer[t]
            if movable and not (recomputable and np.random.random() >= 0.5):
                source_code = a.ops + t
            count = _add_pending(s, count, source_code)
    return _insert_pending(a, s, count, at)


@inlined
def _add_pending(s: SearchState, count: int, code: int) -> int:
    """Add an op to the first `count` of `pending` unless it is there; returns the new count."""
    for other in range(count):
        if s.pending[other] == code:
            return count
    s.pending[count] = code
    return count + 1


@inner
def _insert_pending(a: Program, s: SearchState, count: int, at: int) -> bool:
    """Insert the first `count` of `pending`: prefetch markers first, then ops in program order."""
    for i in range(1, count):
        code, k = s.pending[i], i
        while k > 0 and s.pending[k - 1] < a.ops and (code >= a.ops or s.pending[k - 1] > code):
            s.pending[k] = s.pending[k - 1]
            k -= 1
        s.pending[k] = code
    return insert_ops(a, s, count, at)
