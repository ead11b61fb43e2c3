"""Event list of the candidate, in blocks, with undo.

A sequence of n events is split into about sqrt(n) blocks. An edit shifts the events of one block
and the first positions of all later blocks. The first change of a block in a step saves its
members, so that `restore` can undo the step.
"""

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute.sequence import NONE, SearchState


@inlined
def position_of(s: SearchState, e: int) -> int:
    """Position of an event of the candidate; the end of the step has one, too."""
    return s.block[s.event[e].block].start + s.event[e].index


@inlined
def length(s: SearchState) -> int:
    """Number of events of the candidate."""
    return s.block[s.now.blocks].start


@inlined
def event_at(s: SearchState, at: int) -> int:
    """The event at a position of the candidate."""
    b = block_at(s, at)
    return int(s.members[b, at - s.block[b].start])


@inlined
def block_at(s: SearchState, at: int) -> int:
    """The block of a position; the last block for the end."""
    low, high = 0, s.now.blocks - 1
    while low < high:
        middle = (low + high + 1) // 2
        if s.block[middle].start <= at:
            low = middle
        else:
            high = middle - 1
    return low


@inlined
def mark_dirty(s: SearchState, e: int) -> None:
    """Mark the summary of the event's block as out of date."""
    s.block[s.event[e].block].is_dirty = True


@inner
def fill_blocks(s: SearchState, size: int) -> None:
    """Distribute `size` events, listed in order in `moved`, evenly over blocks."""
    # Blocks start half full, so that insertions find room; fewer only if there are not enough
    # blocks.
    fill = max((s.members.shape[1] - s.pending.size) // 2, -(-size // s.members.shape[0]))
    blocks = max(1, -(-size // fill))
    s.now.blocks, s.now.is_full = blocks, False
    for b in range(blocks):
        block = s.block[b]
        block.start, block.events = b * fill, min(fill, size - b * fill)
        block.saved_events, block.is_dirty = NONE, True
        for i in range(block.events):
            _set_event(s, b, i, s.moved[b * fill + i])
    end = s.sequence.size
    s.block[blocks].start = size
    s.event[end].block, s.event[end].index = blocks, 0


@inner
def rebalance(s: SearchState) -> None:
    """Distribute the events evenly again, so that each block has room; between two steps."""
    list_events(s)
    fill_blocks(s, length(s))


@inlined
def list_events(s: SearchState) -> None:
    """Write the candidate's events in order to `moved`; between two steps."""
    for b in range(s.now.blocks):
        for i in range(s.block[b].events):
            s.moved[s.block[b].start + i] = s.members[b, i]


@inlined
def _set_event(s: SearchState, b: int, i: int, e: int) -> None:
    s.members[b, i] = e
    s.event[e].block, s.event[e].index = b, i


@inlined
def _resize(s: SearchState, b: int, more: int) -> None:
    """Add `more` to the size of a block and to the start of each later one."""
    s.block[b].events += more
    for later in range(b + 1, s.now.blocks + 1):
        s.block[later].start += more


@inlined
def _save_before_change(s: SearchState, b: int) -> None:
    """Save the members of a block before its first change in this step."""
    block = s.block[b]
    block.is_dirty = True
    if block.saved_events != NONE:
        return
    block.saved_events = block.events
    for i in range(block.events):
        s.saved_members[b, i] = s.members[b, i]
    s.changed[s.now.changed] = b
    s.now.changed += 1


@inner
def insert(s: SearchState, events: Ints, first: int, count: int, at: int) -> bool:
    """
    Insert `count` events, entries of `events` from `first` on, at a position.

    Returns False if the block is full; the caller then undoes the step and rebalances.
    """
    b = block_at(s, at)
    old, index = s.block[b].events, at - s.block[b].start
    if old + count > s.members.shape[1]:
        s.now.is_full = True
        return False
    _save_before_change(s, b)
    for i in range(old - 1, index - 1, -1):
        _set_event(s, b, i + count, s.members[b, i])
    for i in range(count):
        _set_event(s, b, index + i, events[first + i])
    _resize(s, b, count)
    return True


@inlined
def remove(s: SearchState, e: int) -> None:
    """Remove an event from its block."""
    b = s.event[e].block
    _save_before_change(s, b)
    _resize(s, b, -1)
    for i in range(s.event[e].index, s.block[b].events):
        _set_event(s, b, i, s.members[b, i + 1])


@inlined
def commit(s: SearchState) -> None:
    """Make the candidate's blocks those of the current sequence."""
    for i in range(s.now.changed):
        s.block[s.changed[i]].saved_events = NONE
    s.now.changed = 0


@inlined
def restore(s: SearchState) -> None:
    """Restore the blocks of the current sequence."""
    for i in range(s.now.changed):
        b = s.changed[i]
        block = s.block[b]
        block.events, block.saved_events, block.is_dirty = block.saved_events, NONE, True
        for k in range(block.events):
            _set_event(s, b, k, s.saved_members[b, k])
    s.now.changed = 0
    for b in range(s.now.blocks):
        s.block[b + 1].start = s.block[b].start + s.block[b].events
