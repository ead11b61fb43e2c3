"""Event list of the candidate, in blocks, with undo.

A sequence of n events is split into about sqrt(n) blocks. An edit shifts the events of one block
and the first positions of all later blocks. The first change of a block in a step saves its
members, so that `restore` can undo the step.
"""

from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute import columns as c
from coop_plan.planner.search.compute.sequence import SearchState


@inlined
def position_of(s: SearchState, e: int) -> int:
    """Position of an event of the candidate; the end of the step has one, too."""
    return int(s.block_start[s.event[e, c.BLOCK]] + s.event[e, c.INDEX])


@inlined
def length(s: SearchState) -> int:
    """Number of events of the candidate."""
    return int(s.block_start[s.counts[c.BLOCKS]])


@inlined
def event_at(s: SearchState, at: int) -> int:
    """The event at a position of the candidate."""
    b = block_at(s, at)
    return int(s.members[b, at - s.block_start[b]])


@inlined
def block_at(s: SearchState, at: int) -> int:
    """The block of a position; the last block for the end."""
    low, high = 0, s.counts[c.BLOCKS] - 1
    while low < high:
        middle = (low + high + 1) // 2
        if s.block_start[middle] <= at:
            low = middle
        else:
            high = middle - 1
    return int(low)


@inlined
def mark_dirty(s: SearchState, e: int) -> None:
    """Mark the summary of the event's block as out of date."""
    s.block[s.event[e, c.BLOCK], c.DIRTY] = 1


@inner
def fill_blocks(s: SearchState, size: int) -> None:
    """Distribute `size` events, listed in order in row `MOVED` of the lists, evenly over blocks."""
    # Blocks start half full, so that insertions find room; fewer only if there are not enough
    # blocks.
    fill = max((s.members.shape[1] - s.pending.size) // 2, -(-size // s.members.shape[0]))
    blocks = max(1, -(-size // fill))
    s.counts[c.BLOCKS], s.counts[c.FULL] = blocks, 0
    for b in range(blocks):
        s.block_start[b] = b * fill
        s.block[b, c.EVENTS], s.block[b, c.SAVED_COUNT] = min(fill, size - b * fill), c.NONE
        s.block[b, c.DIRTY] = 1
        for i in range(s.block[b, c.EVENTS]):
            _set_event(s, b, i, s.lists[c.MOVED, b * fill + i])
    end = s.sequence.size
    s.block_start[blocks] = size
    s.event[end, c.BLOCK], s.event[end, c.INDEX] = blocks, 0


@inner
def rebalance(s: SearchState) -> None:
    """Distribute the events evenly again, so that each block has room; between two steps."""
    list_events(s)
    fill_blocks(s, length(s))


@inlined
def list_events(s: SearchState) -> None:
    """Write the candidate's events in order to row `MOVED` of the lists; between two steps."""
    for b in range(s.counts[c.BLOCKS]):
        for i in range(s.block[b, c.EVENTS]):
            s.lists[c.MOVED, s.block_start[b] + i] = s.members[b, i]


@inlined
def _set_event(s: SearchState, b: int, i: int, e: int) -> None:
    s.members[b, i] = e
    s.event[e, c.BLOCK], s.event[e, c.INDEX] = b, i


@inlined
def _resize(s: SearchState, b: int, more: int) -> None:
    """Add `more` to the size of a block and to the start of each later one."""
    s.block[b, c.EVENTS] += more
    for later in range(b + 1, s.counts[c.BLOCKS] + 1):
        s.block_start[later] += more


@inlined
def _save_before_change(s: SearchState, b: int) -> None:
    """Save the members of a block before its first change in this step."""
    s.block[b, c.DIRTY] = 1
    if s.block[b, c.SAVED_COUNT] != c.NONE:
        return
    s.block[b, c.SAVED_COUNT] = s.block[b, c.EVENTS]
    for i in range(s.block[b, c.EVENTS]):
        s.saved_members[b, i] = s.members[b, i]
    s.lists[c.CHANGED, s.counts[c.CHANGED_COUNT]] = b
    s.counts[c.CHANGED_COUNT] += 1


@inner
def insert(s: SearchState, row: int, first: int, count: int, at: int) -> bool:
    """
    Insert `count` events, taken from row `row` of the lists from entry `first` on, at a position.

    Returns False if the block is full; the caller then undoes the step and rebalances.
    """
    b = block_at(s, at)
    old, index = s.block[b, c.EVENTS], at - s.block_start[b]
    if old + count > s.members.shape[1]:
        s.counts[c.FULL] = 1
        return False
    _save_before_change(s, b)
    for i in range(old - 1, index - 1, -1):
        _set_event(s, b, i + count, s.members[b, i])
    for i in range(count):
        _set_event(s, b, index + i, s.lists[row, first + i])
    _resize(s, b, count)
    return True


@inlined
def remove(s: SearchState, e: int) -> None:
    """Remove an event from its block."""
    b = s.event[e, c.BLOCK]
    _save_before_change(s, b)
    _resize(s, b, -1)
    for i in range(s.event[e, c.INDEX], s.block[b, c.EVENTS]):
        _set_event(s, b, i, s.members[b, i + 1])


@inlined
def commit(s: SearchState) -> None:
    """Make the candidate's blocks those of the current sequence."""
    for i in range(s.counts[c.CHANGED_COUNT]):
        s.block[s.lists[c.CHANGED, i], c.SAVED_COUNT] = c.NONE
    s.counts[c.CHANGED_COUNT] = 0


@inlined
def restore(s: SearchState) -> None:
    """Restore the blocks of the current sequence."""
    for i in range(s.counts[c.CHANGED_COUNT]):
        b = s.lists[c.CHANGED, i]
        s.block[b, c.EVENTS], s.block[b, c.SAVED_COUNT] = s.block[b, c.SAVED_COUNT], c.NONE
        s.block[b, c.DIRTY] = 1
        for k in range(s.block[b, c.EVENTS]):
            _set_event(s, b, k, s.saved_members[b, k])
    s.counts[c.CHANGED_COUNT] = 0
    for b in range(s.counts[c.BLOCKS]):
        s.block_start[b + 1] = s.block_start[b] + s.block[b, c.EVENTS]
