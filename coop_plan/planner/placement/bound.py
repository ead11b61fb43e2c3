"""Lower bound on the arena."""

import numpy as np

from coop_plan.planner.placement.instance import Instance, Ints
from coop_plan.planner.placement.keys import live_profile


def shareable_units(instance: Instance) -> Ints:
    """
    Units per section that alias pairs could save at most.

    A set of buffers that share one offset saves all but its largest. Each of the others is the
    second (or each the first) of a pair within the set, so counting every second once, with its
    largest partner alive in the section, never counts too little; likewise every first.
    """
    saved = np.zeros((2, instance.sections), np.int64)
    best: dict[tuple[int, int, int], int] = {}
    for a, b in instance.alias.tolist():
        start = max(int(instance.first[a]), int(instance.first[b]))
        end = min(int(instance.last[a]), int(instance.last[b]))
        units = min(int(instance.height[a]), int(instance.height[b]))
        for side, buffer in ((0, b), (1, a)):
            for section in range(start, end):
                key = side, buffer, section
                best[key] = max(best.get(key, 0), units)
    for (side, _, section), units in best.items():
        saved[side, section] += units
    least: Ints = saved.min(axis=0)
    return least


def lower_bound(instance: Instance) -> int:
    """
    Bytes no placement can go below: the largest live sum, alignment and aliases considered.

    All buffers live in a section but the topmost take whole units, so one slack at most is saved.
    """
    single = int(instance.size.max(initial=0))
    given = instance.fixed >= 0
    pinned = int((instance.fixed[given] * instance.alignment + instance.size[given]).max(initial=0))
    if instance.sections == 0:
        return max(single, pinned)
    units = live_profile(instance.first, instance.last, instance.height, instance.sections)
    units -= shareable_units(instance)
    slack = np.zeros(instance.sections, np.int64)
    tail = instance.height * instance.alignment - instance.size
    for i in np.flatnonzero(tail):
        part = slice(int(instance.first[i]), int(instance.last[i]))
        np.maximum(slack[part], tail[i], out=slack[part])
    return max(single, pinned, int((units * instance.alignment - slack).max()))
