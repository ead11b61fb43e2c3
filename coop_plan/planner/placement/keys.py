"""Placement orders of buffers: sort keys, named by one letter each, and their combinations."""

from typing import TypeVar

import numpy as np

from coop_plan.planner.core.arrays import Floats, Ints
from coop_plan.planner.placement.instance import Instance

Keys = dict[str, Ints]

Numbers = TypeVar("Numbers", Ints, Floats)


def simple_orders(instance: Instance) -> list[Ints]:
    """The orders by size, area, lifetime and birth.

    Times are exact here: buffers with the same sections may have different lifetimes. The longer
    of two buffers of equal size is first, the larger of two of equal lifetime.
    """
    life, size = instance.upper - instance.lower, instance.size
    area = life.astype(np.float64) * size
    columns = [(-life, -size), (-size, -area), (-size, -life), (-life, instance.lower)]
    return [np.lexsort(keys) for keys in columns]


def sort_keys(first: Ints, last: Ints, height: Ints, sections: int) -> Keys:
    """Sort keys per buffer; larger keys are placed first.

    T: maximum of live units during the lifetime; W: lifetime in sections; A: lifetime times height;
    Z: height; U: last section; L: birth, earliest first.
    """
    return {
        "T": busiest(live_profile(first, last, height, sections), first, last),
        "W": last - first,
        "A": height * (last - first),
        "Z": height,
        "U": last,
        "L": -first,
    }


def order_by(name: str, keys: Keys) -> Ints:
    """The permutation that sorts by the keys of `name`, largest first; ties by number."""
    return np.lexsort(tuple(-keys[key] for key in reversed(name)))


def live_profile(first: Ints, last: Ints, height: Ints, sections: int) -> Ints:
    """Units live in each section."""
    change = np.zeros(sections + 1, np.int64)
    np.add.at(change, first, height)
    np.add.at(change, last, -height)
    return change.cumsum()[:-1]


def busiest(profile: Numbers, first: Ints, last: Ints) -> Numbers:
    """Maximum of `profile` over [first, last) per buffer, by a sparse table in O(n log n)."""
    result = np.zeros(len(first), profile.dtype)
    width = last - first
    table, span = profile, 1  # table[k] = max(profile[k:k + span])
    while span <= width.max(initial=0):
        now = np.flatnonzero((width >= span) & (width < 2 * span))
        result[now] = np.maximum(table[first[now]], table[last[now] - span])
        if len(table) > span:
            table = np.maximum(table[:-span], table[span:])
        span *= 2
    return result


def spread(weight: Floats, first: Ints, last: Ints) -> Floats:
    """Per buffer the largest weight of its sections, as a share of the largest weight."""
    largest: float = max(weight.max(initial=0.0), 1e-9)
    return np.divide(busiest(weight, first, last), largest)
