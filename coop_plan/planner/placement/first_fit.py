"""First-fit packing in a given order, under all constraints of an instance."""

import numpy as np

from coop_plan.planner.core.jit import njit
from coop_plan.planner.placement.instance import Instance, Ints
from coop_plan.planner.placement.windows import first_fit_pieces


@njit
def _first_fit(
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
    """Places fixed buffers, then each buffer of `order` in the lowest gap among those placed."""
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
            for k in range(conflict_start[i], conflict_start[i + 1]):
                near[conflict_items[k]] = i
            for k in range(alias_start[i], alias_start[i + 1]):
                partner[alias_items[k]] = i
            best = np.int64(0)
            if fill == 0:
                best = fixed[i]
            else:
                # Raise `best` over each conflicting buffer that it would overlap.
                for k in range(placed):
                    j = by_offset[k]
                    if offsets[j] >= best + height[i]:
                        # Offsets are ascending: no later buffer reaches into this gap.
                        break
                    if (first[j] < last[i] and first[i] < last[j]) or near[j] == i:
                        best = max(best, offsets[j] + height[j])
                        if multiple[i] > 1:
                            best = -(-best // multiple[i]) * multiple[i]
                # At the offset of a partner i may overlap it, so a lower place may be free.
                for k in range(alias_start[i], alias_start[i + 1]):
                    a = alias_items[k]
                    if not done[a] or offsets[a] >= best or offsets[a] % multiple[i]:
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
                        best = offsets[a]
            offsets[i] = best
            done[i] = True
            k = placed
            while k > 0 and offsets[by_offset[k - 1]] > best:
                by_offset[k] = by_offset[k - 1]
                k -= 1
            by_offset[k] = i
            placed += 1
    return offsets


def first_fit(instance: Instance, order: Ints) -> Ints:
    """Offsets in units, buffers placed by `order`."""
    if instance.pieces is not None:
        unit = instance.alignment
        fixed = np.where(instance.fixed >= 0, instance.fixed * unit, -1)
        return first_fit_pieces(order, fixed, instance.multiple * unit, instance.pieces) // unit
    return _first_fit(
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
