"""Lower bound on the arena of every placement."""

import numpy as np

from coop_plan.planner.placement.instance import Instance, Ints
from coop_plan.planner.placement.keys import live_profile


def shareable_units(instance: Instance) -> Ints:
    """
    Upper bound on the units that alias pairs save per section.

    A set of buffers at one offset saves all but its largest. Each of the others is the second (or
    each is the first) buffer of a pair within the set. So counting every second buffer once, with
    its largest partner live in the section, is an upper bound; so is counting every first.
    """
    saved = np.zeros((2, instance.sections), np.int64)
    largest: dict[tuple[int, int, int], int] = {}
    for a, b in instance.alias.tolist():
        start = max(int(instance.first[a]), int(instance.first[b]))
        end = min(int(instance.last[a]), int(instance.last[b]))
        units = min(int(instance.height[a]), int(instance.height[b]))
        for side, buffer in ((0, b), (1, a)):
            for section in range(start, end):
                key = side, buffer, section
                largest[key] = max(largest.get(key, 0), units)
    for (side, _, section), units in largest.items():
        saved[side, section] += units
    smaller: Ints = saved.min(axis=0)
    return smaller


def lower_bound(instance: Instance) -> int:
    """
    Lower bound on the peak in bytes: the largest live sum, with alignment and aliases.

    Of the buffers live in a section all but the topmost take whole units, so at most one tail of a
    last unit is saved.
    """
    single = int(instance.size.max(initial=0))
    given = instance.fixed >= 0
    pinned = int((instance.fixed[given] * instance.alignment + instance.size[given]).max(initial=0))
    if instance.sections == 0:
        return max(single, pinned)
    units = live_profile(instance.first, instance.last, instance.height, instance.sections)
    units -= shareable_units(instance)
    longest_tail = np.zeros(instance.sections, np.int64)
    tail = instance.height * instance.alignment - instance.size
    for i in np.flatnonzero(tail):
        part = slice(int(instance.first[i]), int(instance.last[i]))
        np.maximum(longest_tail[part], tail[i], out=longest_tail[part])
    return max(single, pinned, int((units * instance.alignment - longest_tail).max()))
