"""
Moves of the Metropolis search: insert, move and remove recomputes, and move first runs.

Dead-code elimination removes events that serve nothing (`planner.search.compute.edits`).
"""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute.edits import move, put_in, take_out
from coop_plan.planner.search.compute.event_list import event_at, length, place
from coop_plan.planner.search.compute.liveness import wanted_at
from coop_plan.planner.search.compute.sequence import (
    ACCESSES,
    ALONG,
    BLOCK,
    CODE,
    DOES,
    EVENT,
    EVENTS,
    FIRST_RUN,
    HEAD,
    INDEX,
    NEXT,
    NONE,
    READ,
    TENSOR,
    SearchState,
)


@inner
def change(a: Program, s: SearchState) -> bool:
    """
    Change the candidate, which equals the current sequence, at one of its events.

    Returns False if the drawn change is impossible; the candidate may then be changed in part.
    """
    numbers, size = s.numbers, length(s)
    if size == 0:
        return False
    kind = np.random.random()
    begin = np.random.randint(size)
    if kind < numbers.recompute_chance:
        return _serve(a, s, begin)
    for _ in range(numbers.tries):
        if not is_first(s, begin):
            break
        begin = np.random.randint(size)
    if is_first(s, begin):
        return False
    if kind < numbers.recompute_chance + numbers.move_chance:
        return _move(a, s, begin)
    return take_out_block(a, s, begin, numbers.removed_block)


@inlined
def is_first(s: SearchState, at: int) -> bool:
    return bool(s.event[event_at(s, at), FIRST_RUN] == 1)


@inner
def _serve(a: Program, s: SearchState, event: int) -> bool:
    """Insert a recompute of one input of an event."""
    op = s.event[event_at(s, event), CODE]
    count = a.reads_ptr[op + 1] - a.reads_ptr[op]
    if count == 0:
        return False
    t = a.reads[a.reads_ptr[op] + np.random.randint(count)]
    maker, at = a.producer[t], event
    if np.random.random() < s.numbers.early_chance:
        at -= int(s.numbers.earliest ** np.random.random())
    if s.again[maker] == 0 or at < 0 or at <= place(s, s.op[maker]):
        return False
    return recompute(a, s, maker, at, evicted_chance(s))


@inner
def _move(a: Program, s: SearchState, begin: int) -> bool:
    """Move a block of events that are no first runs."""
    size = length(s)
    more = s.numbers.moved_block if np.random.random() < s.numbers.moved_block_chance else 0.0
    end = block_end(s, begin, more)
    distance = int(s.numbers.furthest ** np.random.random())
    to = begin + (distance if np.random.random() < s.numbers.later_chance else -distance)
    if to < 0 or to > size - (end - begin):
        return False
    for at in range(begin, end):
        code = s.event[event_at(s, at), CODE]
        first = place(s, s.op[code])
        if s.again[code] == 0 or first - (end - begin if first > begin else 0) >= to:
            return False
    return move(a, s, begin, end, to)


@inner
def move_first(a: Program, s: SearchState) -> bool:
    """Move a first run to where data, effects and phases allow it; false where that is nowhere."""
    begin = NONE
    for _ in range(s.numbers.tries if length(s) > 0 else 0):
        begin = np.random.randint(length(s))
        if is_first(s, begin):
            break
    if begin == NONE or not is_first(s, begin):
        return False
    low, high = _bounds(s, begin)
    later = np.random.random() < s.numbers.later_chance
    if np.random.random() < s.numbers.to_bound_chance:
        to = high if later else low
    else:
        distance = int(s.numbers.furthest ** np.random.random())
        to = min(high, begin + distance) if later else max(low, begin - distance)
    at = _as_far_as(s, begin, to)
    return at != begin and move(a, s, begin, begin + 1, at)


@inlined
def _as_far_as(s: SearchState, begin: int, to: int) -> int:
    """Position that the first run at `begin` can reach on its way to `to`."""
    e = event_at(s, begin)
    op, b, i = s.event[e, CODE], s.event[e, BLOCK], s.event[e, INDEX]
    step = 1 if to > begin else -1
    for at in range(begin, to, step):
        i += step
        while i < 0 or i == s.block[b, EVENTS]:
            b += step
            i = 0 if step > 0 else s.block[b, EVENTS] - 1
        if _keeps(s, op, s.row[b, i]):
            return at
    return to


@inlined
def _bounds(s: SearchState, at: int) -> tuple[int, int]:
    """The first and the last place where the first run at `at` finds and leaves what is needed."""
    low, high = 0, length(s) - 1
    x = s.event[event_at(s, at), ACCESSES]
    while x != NONE:
        t = s.access[x, TENSOR]
        if s.access[x, DOES] == READ:
            low = max(low, place(s, s.access[s.tensor[t, HEAD], EVENT]) + 1)
        elif s.access[x, NEXT] != NONE:
            high = min(high, place(s, s.access[s.access[x, NEXT], EVENT]) - 1)
        x = s.access[x, ALONG]
    return low, high


@inlined
def _keeps(s: SearchState, op: int, e: int) -> bool:
    """True if the first run of an op may not pass an event."""
    other, first = s.event[e, CODE], s.event[e, FIRST_RUN] == 1
    if first and s.phase[other] != s.phase[op]:
        return True
    return bool(s.chained[op] == 1 and s.chained[other] == 1 and (first or s.again[other] == 0))


@inner
def take_out_block(a: Program, s: SearchState, begin: int, more: float) -> bool:
    """Take out a block of recomputes; see `block_end`."""
    for _ in range(begin, block_end(s, begin, more)):
        take_out(a, s, event_at(s, begin))
    return True


@inlined
def block_end(s: SearchState, begin: int, more: float) -> int:
    """End of a block of recomputes; each next event joins with chance `more`."""
    end = begin + 1
    while np.random.random() < more and end < length(s) and not is_first(s, end):
        end += 1
    return end


@inlined
def evicted_chance(s: SearchState) -> float:
    """Chance to recompute also an input that is evicted at the place of a recompute."""
    usually = np.random.random() < s.numbers.usually
    return s.numbers.evicted_usually if usually else s.numbers.evicted_rarely


@inner
def recompute(a: Program, s: SearchState, op: int, at: int, evicted: float) -> bool:
    """
    Insert a recompute of `op` before event `at`; False if the candidate has no room for events.

    Each evicted input is recomputed with it, with chance `evicted`, or kept until then.
    """
    n = s.numbers
    kept = n.resident_usually if np.random.random() < n.usually else n.resident_rarely
    s.inserted[0] = op
    count = 1
    i = 0
    while i < count:
        o = s.inserted[i]
        i += 1
        for k in range(a.reads_ptr[o], a.reads_ptr[o + 1]):
            maker = a.producer[a.reads[k]]
            chance = kept if wanted_at(a, s, a.reads[k], at) else evicted
            if s.again[maker] == 0 or count == s.inserted.size or np.random.random() >= chance:
                continue
            count = gather(s, count, maker)
    return put_in_order(a, s, count, at)


@inlined
def gather(s: SearchState, count: int, code: int) -> int:
    """Have one more among the first `count` of `inserted`, if it is none of them; how many are."""
    for other in range(count):
        if s.inserted[other] == code:
            return count
    s.inserted[count] = code
    return count + 1


@inner
def put_in_order(a: Program, s: SearchState, count: int, at: int) -> bool:
    """Put the first `count` of `inserted` in as `put_in` does: marks, then ops in program order."""
    for i in range(1, count):
        o, k = s.inserted[i], i
        while k > 0 and s.inserted[k - 1] < a.ops and (o >= a.ops or s.inserted[k - 1] > o):
            s.inserted[k] = s.inserted[k - 1]
            k -= 1
        s.inserted[k] = o
    return put_in(a, s, count, at)
