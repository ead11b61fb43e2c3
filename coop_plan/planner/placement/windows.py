"""
Buffers with gaps: pieces of their lifetimes in which they occupy all, some or none of their bytes.

Two pieces that share a section forbid an open interval of the difference of their buffers' offsets.
First fit and the exact search work with these intervals, in bytes and in units.
"""

from typing import NamedTuple

import numpy as np

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.jit import njit


class Pieces(NamedTuple):
    """Pieces that occupy bytes, by buffer and time: buffer i has `start[i]:start[i + 1]`."""

    start: Ints
    first: Ints
    """First section of each piece."""
    last: Ints
    """The section after the last one."""
    low: Ints
    high: Ints
    """The occupied bytes, from the offset of the buffer."""

    def of(self, buffers: Ints, section: int) -> "Pieces":
        """The pieces of some buffers, ascending, with sections counted from `section`."""
        counts = np.diff(self.start)
        kept = np.flatnonzero(np.repeat(np.isin(np.arange(len(counts)), buffers), counts))
        start = np.append(0, counts[buffers].cumsum())
        first, last = self.first[kept] - section, self.last[kept] - section
        return Pieces(start, first, last, self.low[kept], self.high[kept])


def pieces(lower: Ints, upper: Ints, size: Ints, gaps: Ints) -> Pieces:
    """
    Pieces with times in place of sections, from rows (buffer, lower, upper, low, high) of `gaps`.

    In [lower, upper) the buffer occupies its bytes [low, high) only.

    Raises:
        ValueError: a gap that is empty or not within its buffer, or two that overlap.
    """
    count = len(size)
    of_buffer: list[list[tuple[int, ...]]] = [[] for _ in range(count)]
    for row, (buffer, begin, end, low, high) in enumerate(gaps.tolist()):
        if not 0 <= buffer < count:
            raise ValueError(f"gap {row} names buffer {buffer}: give 0 to {count - 1}")
        fault = ""
        if begin >= end:
            fault = "has an empty time"
        elif begin < lower[buffer] or end > upper[buffer]:
            fault = "is not within the buffer's lifetime"
        elif not 0 <= low <= high <= size[buffer]:
            fault = "keeps bytes outside the buffer"
        if fault:
            raise ValueError(f"gap {row} of buffer {buffer} {fault}")
        of_buffer[buffer].append((begin, end, low, high))
    rows = []
    for i, (born, dead, whole) in enumerate(
        zip(lower.tolist(), upper.tolist(), size.tolist(), strict=True)
    ):
        now = born
        for begin, end, low, high in sorted(of_buffer[i]):
            if begin < now:
                raise ValueError(f"two gaps of buffer {i} overlap")
            rows += [(i, now, begin, 0, whole), (i, begin, end, low, high)]
            now = end
        rows.append((i, now, dead, 0, whole))
    table = np.array(rows, np.int64).reshape(-1, 5)
    table = table[(table[:, 1] < table[:, 2]) & (table[:, 3] < table[:, 4])]
    owner, *columns = (np.ascontiguousarray(column) for column in table.T)
    return Pieces(np.searchsorted(owner, np.arange(count + 1)).astype(np.int64), *columns)


@njit
def first_fit_pieces(order: Ints, fixed: Ints, alignment: Ints, pieces: Pieces) -> Ints:
    """Offsets in bytes: fixed buffers, then each buffer of `order` at the lowest free offset."""
    start, first, last, low, high = pieces
    offsets = np.zeros(len(fixed), np.int64)
    # The placed pieces: sections and occupied bytes.
    begin, end = np.empty(len(low), np.int64), np.empty(len(low), np.int64)
    bottom, top = np.empty(len(low), np.int64), np.empty(len(low), np.int64)
    placed = 0
    for fill in range(2):
        for i in order:
            if (fixed[i] >= 0) != (fill == 0):
                continue
            offset = max(fixed[i], 0)
            if fill:
                # Raise the offset over each forbidden interval that contains it, lowest first.
                # An interval begins below a later offset, so none is passed over.
                starts = np.empty(placed * (start[i + 1] - start[i]), np.int64)
                ends = np.empty(len(starts), np.int64)
                found = 0
                for p in range(start[i], start[i + 1]):
                    for q in range(placed):
                        if first[p] < end[q] and begin[q] < last[p] and top[q] - low[p] > 0:
                            starts[found], ends[found] = bottom[q] - high[p], top[q] - low[p]
                            found += 1
                for k in np.argsort(starts[:found]):
                    if starts[k] >= offset:
                        break
                    if ends[k] > offset:
                        offset = -(-ends[k] // alignment[i]) * alignment[i]
            offsets[i] = offset
            for p in range(start[i], start[i + 1]):
                begin[placed], end[placed] = first[p], last[p]
                bottom[placed], top[placed] = offset + low[p], offset + high[p]
                placed += 1
    return offsets


@njit
def window_neighbours(pieces: Pieces, unit: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Adjacency lists of forbidden intervals: (start, neighbours, low, high), in units.

    With an entry (j, low, high) the offset of i is not within (offset of j + low, offset of j +
    high). Overlapping intervals of a pair are merged; disjoint ones are entries of their own.
    """
    start, first, last, low, high = pieces
    count = len(start) - 1
    most = 0
    for i in range(count):
        most = max(most, start[i + 1] - start[i])
    begins, ends = np.empty(most * most, np.int64), np.empty(most * most, np.int64)
    entry_start = np.zeros(count + 1, np.int64)
    items = np.empty(0, np.int64)
    lows, highs = np.empty(0, np.int64), np.empty(0, np.int64)
    # The first pass counts the entries of each list, the second one writes them.
    for fill in range(2):
        if fill:
            entry_start = entry_start.cumsum()
            items = np.empty(entry_start[count], np.int64)
            lows, highs = items.copy(), items.copy()
        at = 0
        for i in range(count):
            for j in range(count):
                a, b = start[i + 1] - 1, start[j + 1] - 1
                if i == j or a < start[i] or b < start[j]:
                    continue
                if first[start[i]] >= last[b] or first[start[j]] >= last[a]:
                    continue
                found = 0
                for p in range(start[i], a + 1):
                    for q in range(start[j], b + 1):
                        if first[p] >= last[q] or first[q] >= last[p]:
                            continue
                        begin = (low[q] - high[p]) // unit
                        end = -((low[p] - high[q]) // unit)
                        if end - begin < 2:
                            continue  # no multiple of the unit is inside
                        k = found
                        while k > 0 and begins[k - 1] > begin:
                            begins[k], ends[k] = begins[k - 1], ends[k - 1]
                            k -= 1
                        begins[k], ends[k] = begin, end
                        found += 1
                k = 0
                while k < found:
                    begin, end = begins[k], ends[k]
                    k += 1
                    while k < found and begins[k] < end:
                        end = max(end, ends[k])
                        k += 1
                    if fill:
                        items[at], lows[at], highs[at] = j, begin, end
                    else:
                        entry_start[i + 1] += 1
                    at += 1
    return entry_start, items, lows, highs
