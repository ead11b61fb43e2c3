"""Minimising with a search that only answers "fits" or not: descent of the capacity."""

import numpy as np

from coop_plan.planner.placement.canonical import FOUND, IMPOSSIBLE
from coop_plan.planner.placement.instance import Instance, Ints
from coop_plan.planner.placement.restarts import Component, Effort, fit


def descend(
    instance: Instance,
    parts: list[Component],
    bound: int,
    peak: int,
    effort: Effort,
    first_work: int,
) -> tuple[int, Ints | None]:
    """
    A placement lower than `peak` bytes if one is found, and the bound as far as it was raised.

    Each round tries the bound itself, then halves what is left between the largest capacity that
    failed and the incumbent. Only a refuted capacity raises the bound; one given up is tried again
    in the next round, with more work; in the first it gets `first_work`.
    """
    step = peak_step(instance)
    best = None
    bound = -(-bound // step) * step
    slice_work = first_work
    while bound < peak and not effort.spent:
        low = target = bound
        while low < peak and not effort.spent:
            part = Effort(min(slice_work, effort.work), effort.deadline)
            before = part.work
            answer, offsets = fit(instance, parts, target, part)
            effort.work -= before - part.work
            if answer == FOUND:
                best, peak = offsets, instance.peak(offsets)
            elif answer == IMPOSSIBLE:
                bound = low = target + step
            else:
                low = target + step
            target = low + (peak - low) // (2 * step) * step
        slice_work *= 2
    return bound, best


def peak_step(instance: Instance) -> int:
    """Peaks that matter are multiples of this: tops of piled-up buffers."""
    units = np.gcd.reduce(np.append(instance.height, instance.fixed.clip(0)))
    return max(1, int(np.gcd.reduce(np.append(instance.size, units * instance.alignment))))
