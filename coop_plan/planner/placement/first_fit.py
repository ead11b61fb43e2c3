"""First-fit and best-fit packing in a given order, under all constraints of an instance."""

import numpy as np

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.jit import inner, njit
from coop_plan.planner.placement.instance import Instance
from coop_plan.planner.placement.windows import first_fit_pieces


@inner
def _bucket_width(first: Ints, last: Ints, height: Ints) -> int:
    """Sections of a bucket, such that a buffer of average lifetime is in two or three of them."""
    total, solid = 0, 1
    for i in range(len(first)):
        if height[i] > 0:
            total += last[i] - first[i]
            solid += 1
    return max(16, total // solid)


@inner
def _insert(items: Ints, begin: int, end: int, offsets: Ints, i: int) -> None:
    """Insert buffer i into `items[begin:end]`, which is sorted by offset and has room for it."""
    k = end
    while k > begin and offsets[items[k - 1]] > offsets[i]:
        items[k] = items[k - 1]
        k -= 1
    items[k] = i


@njit
def _fit_in_order(
    best: bool,
    order: Ints,
    first: Ints,
    last: Ints,
    height: Ints,
    fixed: Ints,
    multiple: Ints,
) -> Ints:
    """Places fixed buffers, then each buffer of `order` in a gap among those placed.

    It is the lowest gap, or with `best` the smallest one that is large enough.

    Placed buffers are kept in buckets of consecutive sections, by offset. A buffer is compared with
    those in its own buckets only.
    """
    count = len(first)
    offsets = np.zeros(count, np.int64)
    sections = max(1, last.max())
    width = _bucket_width(first, last, height)
    if width * 8 > sections:  # fewer buckets than that are of no use
        width = sections
    begins = np.zeros(sections // width + 2, np.int64)
    for i in range(count):
        if height[i] > 0:
            begins[first[i] // width + 1 : (last[i] - 1) // width + 2] += 1
    begins = begins.cumsum()
    ends = begins[:-1].copy()
    items = np.empty(begins[-1], np.int64)
    merged = 4  # most buckets that are merged for a buffer; those of a longer one are sorted
    head, stop = np.empty(merged, np.int64), np.empty(merged, np.int64)
    seen = np.full(count, -1, np.int64)
    # First the buffers with fixed offsets, then all others.
    for fill in range(2):
        for i in order:
            if height[i] == 0:
                offsets[i] = max(fixed[i], 0)
                continue
            if (fixed[i] >= 0) != (fill == 0):
                continue
            low, high = first[i] // width, (last[i] - 1) // width + 1
            at = np.int64(0)
            if fill == 0:
                at = fixed[i]
            else:
                # The lists of placed buffers to compare with, each by offset.
                source, lists = items, high - low
                if lists <= merged:
                    for q in range(lists):
                        head[q], stop[q] = begins[low + q], ends[low + q]
                else:
                    around = np.empty(ends[high - 1] - begins[low], np.int64)
                    found = 0
                    for bucket in range(low, high):
                        for k in range(begins[bucket], ends[bucket]):
                            j = items[k]
                            if seen[j] != i and first[j] < last[i] and first[i] < last[j]:
                                seen[j] = i
                                around[found] = j
                                found += 1
                    around = around[:found]
                    source, lists = around[np.argsort(offsets[around])], np.int64(1)
                    head[0], stop[0] = 0, found
                # Raise `at` over each conflicting buffer, past gaps that are too small.
                smallest = np.int64(1) << 62
                in_gap = np.int64(-1)
                begin, end, units = first[i], last[i], height[i]
                while True:
                    j, which = np.int64(-1), 0
                    for q in range(lists):
                        if head[q] < stop[q]:
                            other = source[head[q]]
                            if j < 0 or offsets[other] < offsets[j]:
                                j, which = other, q
                    if j < 0 or (not best and offsets[j] >= at + units):
                        break  # offsets are ascending: no later buffer reaches into this gap
                    head[which] += 1
                    if first[j] < end and begin < last[j]:
                        if offsets[j] - at >= units and offsets[j] - at < smallest:
                            smallest = offsets[j] - at
                            in_gap = at
                        if offsets[j] + height[j] > at:
                            at = offsets[j] + height[j]
                            if multiple[i] > 1:
                                at = -(-at // multiple[i]) * multiple[i]
                if in_gap >= 0:
                    at = in_gap
            offsets[i] = at
            for bucket in range(low, high):
                _insert(items, begins[bucket], ends[bucket], offsets, i)
                ends[bucket] += 1
    return offsets


def first_fit(instance: Instance, order: Ints, *, best: bool = False) -> Ints:
    """Offsets in units, placed by `order`; with `best` by best fit, except among gaps."""
    if instance.pieces is not None:
        unit = instance.alignment
        fixed = np.where(instance.fixed >= 0, instance.fixed * unit, -1)
        return first_fit_pieces(order, fixed, instance.multiple * unit, instance.pieces) // unit
    return _fit_in_order(
        best,
        order,
        instance.first,
        instance.last,
        instance.height,
        instance.fixed,
        instance.multiple,
    )
