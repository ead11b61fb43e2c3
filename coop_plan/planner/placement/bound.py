"""Lower bound on the arena of every placement."""

import numpy as np

from coop_plan.planner.placement.instance import Instance
from coop_plan.planner.placement.keys import live_profile


def lower_bound(instance: Instance) -> int:
    """Lower bound on the peak in bytes: the largest live sum, with alignment and gaps.

    The ends of live pieces, rounded up to units, are as far apart as their heights. The topmost one
    ends below its buffer's end by its tail, which may be negative.
    """
    single = int(instance.size.max(initial=0))
    given = instance.fixed >= 0
    pinned = int((instance.fixed[given] * instance.alignment + instance.size[given]).max(initial=0))
    if instance.sections == 0:
        return max(single, pinned)
    first, last, height, end = instance.first, instance.last, instance.height, instance.height
    size, parts = instance.size, instance.pieces
    if parts is not None:
        first, last = parts.first, parts.last
        end = -(-parts.high // instance.alignment)
        height = end - -(-parts.low // instance.alignment)
        size = np.repeat(size, np.diff(parts.start))
    units = live_profile(first, last, height, instance.sections)
    tail = end * instance.alignment - size
    longest_tail = np.full(instance.sections, tail.min(initial=0), np.int64)
    for i in np.flatnonzero(tail > longest_tail[0]):
        part = slice(int(first[i]), int(last[i]))
        np.maximum(longest_tail[part], tail[i], out=longest_tail[part])
    return max(single, pinned, int((units * instance.alignment - longest_tail).max()))
