"""Minimisation of the peak by a search that decides one capacity at a time."""

import numpy as np

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.placement.canonical import FOUND, IMPOSSIBLE
from coop_plan.planner.placement.instance import Instance
from coop_plan.planner.placement.restarts import Component, Effort, common_divisor, fit


def descend(
    instance: Instance,
    parts: list[Component],
    bound: int,
    peak: int,
    effort: Effort,
) -> tuple[int, Ints | None]:
    """Search for placements below `peak` bytes; returns the raised bound, and the best or None.

    Each round tries the bound itself, then bisects between the largest capacity that failed and the
    incumbent. Only a refuted capacity raises the bound. An undecided one is tried again in the next
    round with twice the work.
    """
    step = peak_step(instance)
    best = None
    bound = -(-bound // step) * step
    slice_work = 10_000_000  # for one capacity in the first round
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
    """Common divisor in bytes of all peaks of canonical placements: sums of sizes and offsets."""
    unit = common_divisor(instance) * instance.alignment
    return max(1, int(np.gcd.reduce(np.append(instance.size, unit))))
