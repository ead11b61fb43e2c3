"""The arena as an online allocator sees it: blocks ordered by address, taken or free."""

from bisect import bisect_left, bisect_right

FREE = -1
"""Owner of a free block."""


class AddressSpace:
    """
    `capacity` bytes cut into blocks; adjacent free blocks are always merged.

    `offsets`, `sizes` and `owners` are parallel lists in address order. An owner is a non-negative
    number chosen by the caller. The three lists are open to readers; only methods change them.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.offsets = [0] if capacity else []
        self.sizes = [capacity] if capacity else []
        self.owners = [FREE] if capacity else []
        # Free blocks as (size, offset), sorted, for best fit.
        self._free: list[tuple[int, int]] = [(capacity, 0)] if capacity else []

    @property
    def free_bytes(self) -> int:
        """Bytes in free blocks."""
        return sum(size for size, _ in self._free)

    def allocate(self, size: int, owner: int, from_right: bool) -> int | None:
        """
        Best fit: the smallest free block that holds `size`; its offset, or None.

        The block is taken from the left or the right end of the free block.
        """
        found = bisect_left(self._free, (size, -1))
        if found == len(self._free):
            return None
        hole_size, hole = self._free[found]
        at = bisect_left(self.offsets, hole)
        return self._take(at, hole + hole_size - size if from_right else hole, size, owner)

    def _take(self, at: int, offset: int, size: int, owner: int) -> int:
        hole, hole_size = self.offsets[at], self.sizes[at]
        self._forget(hole_size, hole)
        parts = [
            (hole, offset - hole, FREE),
            (offset, size, owner),
            (offset + size, hole + hole_size - offset - size, FREE),
        ]
        parts = [part for part in parts if part[1]]
        self.offsets[at : at + 1] = [part[0] for part in parts]
        self.sizes[at : at + 1] = [part[1] for part in parts]
        self.owners[at : at + 1] = [part[2] for part in parts]
        for start, length, who in parts:
            if who == FREE:
                self._remember(length, start)
        return offset

    def release(self, offset: int) -> None:
        """Free the block at `offset` and merge it with its free neighbours."""
        at = bisect_left(self.offsets, offset)
        low, high = at, at + 1
        if low and self.owners[low - 1] == FREE:
            low -= 1
            self._forget(self.sizes[low], self.offsets[low])
        if high < len(self.offsets) and self.owners[high] == FREE:
            self._forget(self.sizes[high], self.offsets[high])
            high += 1
        start, size = self.offsets[low], sum(self.sizes[low:high])
        self.offsets[low:high] = [start]
        self.sizes[low:high] = [size]
        self.owners[low:high] = [FREE]
        self._remember(size, start)

    def rename(self, offset: int, owner: int) -> None:
        """Hand the block at `offset` to another owner."""
        self.owners[bisect_left(self.offsets, offset)] = owner

    def size_with_free_neighbours(self, offset: int) -> int:
        """Bytes of the block at `offset` and of the free blocks next to it."""
        at = bisect_right(self.offsets, offset) - 1
        size = self.sizes[at]
        if at and self.owners[at - 1] == FREE:
            size += self.sizes[at - 1]
        if at + 1 < len(self.owners) and self.owners[at + 1] == FREE:
            size += self.sizes[at + 1]
        return size

    def _remember(self, size: int, offset: int) -> None:
        self._free.insert(bisect_left(self._free, (size, offset)), (size, offset))

    def _forget(self, size: int, offset: int) -> None:
        del self._free[bisect_left(self._free, (size, offset))]
