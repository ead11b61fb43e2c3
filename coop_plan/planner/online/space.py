"""Free-list allocator of an online execution: blocks in address order, allocated or free."""

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.online import columns as c
from coop_plan.planner.online.state import ArenaState

NO_ROOM = -1
"""Offset of an allocation that failed."""


@inner
def allocate(s: ArenaState, size: int, owner: int, right: bool) -> int:
    """Best fit: the smallest free block of at least `size` > 0 bytes; its offset, or `NO_ROOM`.

    Allocates at the left or the right end of the free block.
    """
    low = _find_hole(s, size, -1)
    if low == s.counts[c.HOLES] or size > free_bytes(s):
        return NO_ROOM
    s.counts[c.USED] += size
    at, room = int(s.block[c.HOLE_AT, low]), int(s.block[c.HOLE_SIZE, low])
    _delete(s.block[c.HOLE_AT], low, s.counts[c.HOLES])
    _delete(s.block[c.HOLE_SIZE], low, s.counts[c.HOLES])
    s.counts[c.HOLES] -= 1
    block = find(s, at)
    left = room - size
    if left == 0:
        s.block[c.OWNER, block] = owner
        return at
    _insert(s.block[c.BLOCK_AT], block + 1, s.counts[c.BLOCKS], at + left if right else at + size)
    _insert(s.block[c.BLOCK_SIZE], block + 1, s.counts[c.BLOCKS], size if right else left)
    _insert(s.block[c.OWNER], block + 1, s.counts[c.BLOCKS], owner if right else c.FREE)
    s.counts[c.BLOCKS] += 1
    s.block[c.BLOCK_SIZE, block] = left if right else size
    s.block[c.OWNER, block] = c.FREE if right else owner
    _insert_hole(s, at if right else at + size, left)
    return at + left if right else at


@inner
def release(s: ArenaState, offset: int) -> None:
    """Free the block at `offset` and merge it with its free neighbours."""
    block = find(s, offset)
    start, size = offset, s.block[c.BLOCK_SIZE, block]
    s.counts[c.USED] -= size
    first, last = block, block
    if block > 0 and s.block[c.OWNER, block - 1] == c.FREE:
        first = block - 1
        start = s.block[c.BLOCK_AT, first]
        size += s.block[c.BLOCK_SIZE, first]
        _remove_hole(s, start, s.block[c.BLOCK_SIZE, first])
    if block + 1 < s.counts[c.BLOCKS] and s.block[c.OWNER, block + 1] == c.FREE:
        last = block + 1
        size += s.block[c.BLOCK_SIZE, last]
        _remove_hole(s, s.block[c.BLOCK_AT, last], s.block[c.BLOCK_SIZE, last])
    s.block[c.BLOCK_AT, first] = start
    s.block[c.BLOCK_SIZE, first] = size
    s.block[c.OWNER, first] = c.FREE
    for _ in range(last - first):
        _delete(s.block[c.BLOCK_AT], first + 1, s.counts[c.BLOCKS])
        _delete(s.block[c.BLOCK_SIZE], first + 1, s.counts[c.BLOCKS])
        _delete(s.block[c.OWNER], first + 1, s.counts[c.BLOCKS])
        s.counts[c.BLOCKS] -= 1
    _insert_hole(s, start, size)


@inlined
def find(s: ArenaState, offset: int) -> int:
    """Index of the block at `offset`."""
    low, high = 0, s.counts[c.BLOCKS]
    while low < high:
        middle = (low + high) // 2
        if s.block[c.BLOCK_AT, middle] < offset:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def free_bytes(s: ArenaState) -> int:
    """Free bytes of the arena."""
    return int(s.capacity - s.counts[c.USED])


@inlined
def _find_hole(s: ArenaState, size: int, at: int) -> int:
    """Index of the first free block not before (size, at)."""
    low, high = 0, s.counts[c.HOLES]
    while low < high:
        middle = (low + high) // 2
        middle_size = s.block[c.HOLE_SIZE, middle]
        if middle_size < size or (middle_size == size and s.block[c.HOLE_AT, middle] < at):
            low = middle + 1
        else:
            high = middle
    return low


@inner
def _insert_hole(s: ArenaState, at: int, size: int) -> None:
    hole = _find_hole(s, size, at)
    _insert(s.block[c.HOLE_AT], hole, s.counts[c.HOLES], at)
    _insert(s.block[c.HOLE_SIZE], hole, s.counts[c.HOLES], size)
    s.counts[c.HOLES] += 1


@inner
def _remove_hole(s: ArenaState, at: int, size: int) -> None:
    hole = _find_hole(s, size, at)
    _delete(s.block[c.HOLE_AT], hole, s.counts[c.HOLES])
    _delete(s.block[c.HOLE_SIZE], hole, s.counts[c.HOLES])
    s.counts[c.HOLES] -= 1


@inlined
def _insert(values: Ints, at: int, count: int, value: int) -> None:
    for i in range(count, at, -1):
        values[i] = values[i - 1]
    values[at] = value


@inlined
def _delete(values: Ints, at: int, count: int) -> None:
    for i in range(at, count - 1):
        values[i] = values[i + 1]
