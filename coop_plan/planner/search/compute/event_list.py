"""
The candidate's events in blocks: where each is, and what changes there; then kept, or taken back.

A list of blocks of about the square root of its length: an event is put in or taken out in one
block, and all later ones begin somewhere else.
"""

from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute.sequence import (
    BLOCK,
    BLOCKS,
    DIFFER,
    DIFFER_COUNT,
    DIRTY,
    EVENTS,
    FULL,
    INDEX,
    KEPT,
    MOVED,
    NONE,
    SearchState,
)


@inlined
def place(s: SearchState, e: int) -> int:
    """Position in the candidate of an event, or of the end."""
    return int(s.begin[s.event[e, BLOCK]] + s.event[e, INDEX])


@inlined
def length(s: SearchState) -> int:
    """Number of events in the candidate."""
    return int(s.begin[s.counts[BLOCKS]])


@inlined
def event_at(s: SearchState, at: int) -> int:
    """The candidate's event at a place."""
    b = block_at(s, at)
    return int(s.row[b, at - s.begin[b]])


@inlined
def block_at(s: SearchState, at: int) -> int:
    """The block of a place; of the end, the last one."""
    low, high = 0, s.counts[BLOCKS] - 1
    while low < high:
        middle = (low + high + 1) // 2
        if s.begin[middle] <= at:
            low = middle
        else:
            high = middle - 1
    return int(low)


@inlined
def mark(s: SearchState, e: int) -> None:
    """Mark an event's block dirty: its memory figures must be recomputed."""
    s.block[s.event[e, BLOCK], DIRTY] = 1


@inner
def spread(s: SearchState, size: int) -> None:
    """Put so many events, which the row `MOVED` of the lists has in order, into even blocks."""
    fill = max((s.row.shape[1] - s.inserted.size) // 2, -(-size // s.row.shape[0]))
    blocks = max(1, -(-size // fill))
    s.counts[BLOCKS], s.counts[FULL] = blocks, 0
    for b in range(blocks):
        s.begin[b] = b * fill
        s.block[b, EVENTS], s.block[b, KEPT] = min(fill, size - b * fill), NONE
        s.block[b, DIRTY] = 1
        for i in range(s.block[b, EVENTS]):
            _set(s, b, i, s.lists[MOVED, b * fill + i])
    end = s.sequence.size
    s.begin[blocks] = size
    s.event[end, BLOCK], s.event[end, INDEX] = blocks, 0


@inner
def even(s: SearchState) -> None:
    """Make room in every block again, between two steps."""
    listed(s)
    spread(s, length(s))


@inlined
def listed(s: SearchState) -> None:
    """List the candidate's events in order, in the row `MOVED` of the lists; between two steps."""
    for b in range(s.counts[BLOCKS]):
        for i in range(s.block[b, EVENTS]):
            s.lists[MOVED, s.begin[b] + i] = s.row[b, i]


@inlined
def _set(s: SearchState, b: int, i: int, e: int) -> None:
    """An event has this place in a block."""
    s.row[b, i] = e
    s.event[e, BLOCK], s.event[e, INDEX] = b, i


@inlined
def _resize(s: SearchState, b: int, more: int) -> None:
    """A block has so many more events."""
    s.block[b, EVENTS] += more
    for later in range(b + 1, s.counts[BLOCKS] + 1):
        s.begin[later] += more


@inlined
def _differs(s: SearchState, b: int) -> None:
    """A block is about to change."""
    s.block[b, DIRTY] = 1
    if s.block[b, KEPT] != NONE:
        return
    s.block[b, KEPT] = s.block[b, EVENTS]
    for i in range(s.block[b, EVENTS]):
        s.kept[b, i] = s.row[b, i]
    s.lists[DIFFER, s.counts[DIFFER_COUNT]] = b
    s.counts[DIFFER_COUNT] += 1


@inner
def insert(s: SearchState, events: int, first: int, count: int, at: int) -> bool:
    """
    Put `count` events, from the entry `first` of a row of the lists on, before the one at a place.

    False where there is no room for them.
    """
    b = block_at(s, at)
    size, begin = s.block[b, EVENTS], at - s.begin[b]
    if size + count > s.row.shape[1]:
        s.counts[FULL] = 1
        return False
    _differs(s, b)
    for i in range(size - 1, begin - 1, -1):
        _set(s, b, i + count, s.row[b, i])
    for i in range(count):
        _set(s, b, begin + i, s.lists[events, first + i])
    _resize(s, b, count)
    return True


@inlined
def remove(s: SearchState, e: int) -> None:
    """Take an event out."""
    b = s.event[e, BLOCK]
    _differs(s, b)
    _resize(s, b, -1)
    for i in range(s.event[e, INDEX], s.block[b, EVENTS]):
        _set(s, b, i, s.row[b, i + 1])


@inlined
def keep_changes(s: SearchState) -> None:
    """The blocks are those of the current sequence."""
    for i in range(s.counts[DIFFER_COUNT]):
        s.block[s.lists[DIFFER, i], KEPT] = NONE
    s.counts[DIFFER_COUNT] = 0


@inlined
def take_back(s: SearchState) -> None:
    """The blocks are those of the current sequence again."""
    for i in range(s.counts[DIFFER_COUNT]):
        b = s.lists[DIFFER, i]
        s.block[b, EVENTS], s.block[b, KEPT], s.block[b, DIRTY] = s.block[b, KEPT], NONE, 1
        for k in range(s.block[b, EVENTS]):
            _set(s, b, k, s.kept[b, k])
    s.counts[DIFFER_COUNT] = 0
    for b in range(s.counts[BLOCKS]):
        s.begin[b + 1] = s.begin[b] + s.block[b, EVENTS]
