"""`place`: the one entry to offset placement."""

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.placement.bound import live_units, lower_bound
from planner.placement.greedy import first_fit
from planner.placement.instance import Instance, Ints, Pairs, build


@dataclass(frozen=True)
class Placement:
    """Where each buffer lies, and what is known about how good that is."""

    offsets: Ints
    """Bytes from the start of the arena, a multiple of the alignment."""
    peak: int
    """Largest offset + size in bytes, exact."""
    lower_bound: int
    """Bytes no placement can go below (proved)."""
    optimal: bool
    """The peak is proved to be the smallest possible."""
    fits: bool | None
    """Whether the peak is within the capacity; None without a capacity."""
    proved_impossible: bool
    """No placement within the capacity exists."""
    order: Ints
    """Permutation of the buffers that produced the offsets; a good `order_hint` for a variant."""
    seconds: float
    """Wall clock spent."""


def place(
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    size: npt.ArrayLike,
    *,
    capacity: int | None = None,
    alignment: int = 1,
    fixed: npt.ArrayLike | None = None,
    alias: Pairs | None = None,
    conflicts: Pairs | None = None,
    time_limit: float | None = None,
    seed: int = 0,
    order_hint: npt.ArrayLike | None = None,
) -> Placement:
    """Give every buffer an offset so that no two overlap in time and address at once."""
    began = time.perf_counter()
    instance = build(
        _ints(lower),
        _ints(upper),
        _ints(size),
        alignment,
        None if fixed is None else _ints(fixed),
        alias,
        conflicts,
    )
    bound = lower_bound(instance)
    goal = bound if capacity is None else max(bound, capacity)
    orders = ([] if order_hint is None else [_ints(order_hint)]) + _orders(instance)
    best_order, best, peak = orders[0], None, 0
    for order in orders:
        offsets = first_fit(instance, order)
        if best is None or instance.peak(offsets) < peak:
            best_order, best, peak = order, offsets, instance.peak(offsets)
        if peak <= goal or (time_limit and time.perf_counter() - began > time_limit):
            break
    assert best is not None
    return Placement(
        offsets=best * alignment,
        peak=peak,
        lower_bound=bound,
        optimal=peak <= bound,
        fits=None if capacity is None else peak <= capacity,
        proved_impossible=capacity is not None and bound > capacity,
        order=best_order,
        seconds=time.perf_counter() - began,
    )


def _orders(instance: Instance) -> list[Ints]:
    live = live_units(instance)
    tallest = np.array(
        [live[a:b].max() for a, b in zip(instance.first, instance.last, strict=True)], np.int64
    )
    width = instance.last - instance.first
    area = width * instance.height
    keys = [(-width, -tallest), (-tallest, -width), (-area,), (-instance.height, -width)]
    return [np.lexsort(tuple(reversed(key))) for key in keys]


def _ints(values: npt.ArrayLike) -> Ints:
    return np.ascontiguousarray(values, dtype=np.int64)
