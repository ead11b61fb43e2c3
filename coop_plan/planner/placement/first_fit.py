"""First-fit and best-fit packing in a given order, under all constraints of an instance."""

import numpy as np

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.jit import njit
from coop_plan.planner.placement.instance import Instance
from coop_plan.planner.placement.windows import first_fit_pieces


@njit
def _fit_in_order(
    best: bool,
    order: Ints,
    first: Ints,
    last: Ints,
    height: Ints,
    fixed: Ints,
    multiple: Ints,
    alias_start: Ints,
    alias_items: Ints,
    conflict_start: Ints,
    conflict_items: Ints,
) -> Ints:
    """Places fixed buffers, then each buffer of `order` in a gap among those placed.

    It is the lowest gap, or with `best` the smallest one that is large enough.
    """
    count = len(first)
    offsets = np.zeros(count, np.int64)
    by_offset = np.empty(count, np.int64)  # placed buffers, lowest offset first
    placed = 0
    near = np.full(count, -1, np.int64)  # near[j] == i: j is an extra conflict of i
    partner = np.full(count, -1, np.int64)  # partner[j] == i: j may share i's offset
    done = np.zeros(count, np.bool_)
    # First the buffers with fixed offsets, then all others.
    for fill in range(2):
        for i in order:
            if height[i] == 0:
                offsets[i] = max(fixed[i], 0)
                continue
            if (fixed[i] >= 0) != (fill == 0):
                continue
            far = conflict_start[i + 1] > conflict_start[i]
            for k in range(conflict_start[i], conflict_start[i + 1]):
                near[conflict_items[k]] = i
            for k in range(alias_start[i], alias_start[i + 1]):
                partner[alias_items[k]] = i
            at = np.int64(0)
            if fill == 0:
                at = fixed[i]
            else:
                # Raise `at` over each conflicting buffer, past gaps that are too small.
                smallest = np.int64(1) << 62
                in_gap = np.int64(-1)
                begin, end, units = first[i], last[i], height[i]
                for k in range(placed):
                    j = by_offset[k]
                    if not best and offsets[j] >= at + units:
                        break  # offsets are ascending: no later buffer reaches into this gap
                    if (first[j] < end and begin < last[j]) or (far and near[j] == i):
                        if offsets[j] - at >= units and offsets[j] - at < smallest:
                            smallest = offsets[j] - at
                            in_gap = at
                        if offsets[j] + height[j] > at:
                            at = offsets[j] + height[j]
                            if multiple[i] > 1:
                                at = -(-at // multiple[i]) * multiple[i]
                if in_gap >= 0:
                    at = in_gap
                # At the offset of a partner i may overlap it, so a lower place may be free.
                for k in range(alias_start[i], alias_start[i + 1]):
                    a = alias_items[k]
                    if not done[a] or offsets[a] >= at or offsets[a] % multiple[i]:
                        continue
                    free = True
                    for m in range(placed):
                        j = by_offset[m]
                        if offsets[j] >= offsets[a] + height[i]:
                            break
                        if offsets[j] + height[j] <= offsets[a]:
                            continue
                        if partner[j] == i and offsets[j] == offsets[a]:
                            continue
                        if (first[j] < last[i] and first[i] < last[j]) or near[j] == i:
                            free = False
                            break
                    if free:
                        at = offsets[a]
            offsets[i] = at
            done[i] = True
            k = placed
            while k > 0 and offsets[by_offset[k - 1]] > at:
                by_offset[k] = by_offset[k - 1]
                k -= 1
            by_offset[k] = i
            placed += 1
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
        instance.alias_links.start,
        instance.alias_links.items,
        instance.conflict_links.start,
        instance.conflict_links.items,
    )
