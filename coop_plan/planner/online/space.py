"""Free-list allocator of an online execution: blocks in address order, allocated or free."""

from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.core.records import Table
from coop_plan.planner.online.state import FREE, ArenaState, Block, Hole

NO_ROOM = -1
"""Offset of an allocation that failed."""


@inner
def allocate(s: ArenaState, size: int, owner: int, right: bool) -> int:
    """Best fit: the smallest free block of at least `size` > 0 bytes; its offset, or `NO_ROOM`.

    Allocates at the left or the right end of the free block.
    """
    low = _find_hole(s, size, -1)
    if low == s.now.holes or size > free_bytes(s):
        return NO_ROOM
    s.now.used += size
    at, room = s.hole[low].offset, s.hole[low].bytes
    _delete(s.hole, low, s.now.holes)
    s.now.holes -= 1
    number = find(s, at)
    left = room - size
    first, second = s.block[number], s.block[number + 1]
    if left == 0:
        first.owner = owner
        return at
    _insert(s.block, number + 1, s.now.blocks)
    s.now.blocks += 1
    first.bytes, second.bytes = (left, size) if right else (size, left)
    first.owner, second.owner = (FREE, owner) if right else (owner, FREE)
    second.offset = at + first.bytes
    _insert_hole(s, at if right else at + size, left)
    return second.offset if right else at


@inner
def release(s: ArenaState, offset: int) -> None:
    """Free the block at `offset` and merge it with its free neighbours."""
    block = find(s, offset)
    start, size = offset, s.block[block].bytes
    s.now.used -= size
    first, last = block, block
    if block > 0 and s.block[block - 1].owner == FREE:
        first = block - 1
        start = s.block[first].offset
        size += s.block[first].bytes
        _remove_hole(s, start, s.block[first].bytes)
    if block + 1 < s.now.blocks and s.block[block + 1].owner == FREE:
        last = block + 1
        size += s.block[last].bytes
        _remove_hole(s, s.block[last].offset, s.block[last].bytes)
    merged = s.block[first]
    merged.offset, merged.bytes, merged.owner = start, size, FREE
    for _ in range(last - first):
        _delete(s.block, first + 1, s.now.blocks)
        s.now.blocks -= 1
    _insert_hole(s, start, size)


@inlined
def find(s: ArenaState, offset: int) -> int:
    """Index of the block at `offset`."""
    low, high = 0, s.now.blocks
    while low < high:
        middle = (low + high) // 2
        if s.block[middle].offset < offset:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def free_bytes(s: ArenaState) -> int:
    """Free bytes of the arena."""
    return s.capacity - s.now.used


@inlined
def _find_hole(s: ArenaState, size: int, at: int) -> int:
    """Index of the first free block not before (size, at)."""
    low, high = 0, s.now.holes
    while low < high:
        middle = (low + high) // 2
        middle_size = s.hole[middle].bytes
        if middle_size < size or (middle_size == size and s.hole[middle].offset < at):
            low = middle + 1
        else:
            high = middle
    return low


@inner
def _insert_hole(s: ArenaState, at: int, size: int) -> None:
    hole = _find_hole(s, size, at)
    _insert(s.hole, hole, s.now.holes)
    s.hole[hole].offset, s.hole[hole].bytes = at, size
    s.now.holes += 1


@inner
def _remove_hole(s: ArenaState, at: int, size: int) -> None:
    hole = _find_hole(s, size, at)
    _delete(s.hole, hole, s.now.holes)
    s.now.holes -= 1


@inlined
def _insert(values: Table[Block] | Table[Hole], at: int, count: int) -> None:
    """Shift the values from `at` on by one; the value there is then a copy of the next."""
    for i in range(count, at, -1):
        values[i] = values[i - 1]


@inlined
def _delete(values: Table[Block] | Table[Hole], at: int, count: int) -> None:
    for i in range(at, count - 1):
        values[i] = values[i + 1]
