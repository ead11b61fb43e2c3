"""Generator of greedy placements: plain sort orders first, then orders adapted by blame."""

from collections.abc import Iterator

import numpy as np

from coop_plan.planner.core.arrays import Floats, Ints
from coop_plan.planner.placement.first_fit import first_fit
from coop_plan.planner.placement.instance import Instance
from coop_plan.planner.placement.keys import order_by, simple_orders, sort_keys, spread
from coop_plan.planner.placement.skyline import skyline

ORDERS = ("TAW", "TW", "WT", "A", "ZW")
"""The plain orders, as letters of sort keys (`planner.placement.keys`)."""

FIRST_FIT_MOST = 12_000
"""Buffers above which unconstrained instances are packed as skylines only, not by first fit."""


def placements(
    instance: Instance, hint: Ints | None, goal: int, seed: int, scans: int
) -> Iterator[Ints]:
    """Offsets in units, without end; the first dozens follow the plain and the simple orders.

    `scans` limits best and first fit by the simple orders, in placed buffers that they look at.

    `goal`: the peak in bytes to reach; buffers that end above it are blamed. `hint`: buffers by
    offset of an earlier placement, whose peak the first placement does not exceed.
    """
    keys = sort_keys(instance.first, instance.last, instance.height, instance.sections)
    orders = [order_by(name, keys) for name in ORDERS]
    unconstrained = instance.is_plain
    if hint is not None:
        hint = completed(hint, orders[0])
        yield first_fit(instance, hint)
    if unconstrained:
        for order in orders:
            yield skyline(instance, order)
    if not unconstrained or instance.count <= FIRST_FIT_MOST:
        for order in orders:
            yield first_fit(instance, order)
    for order in simple_orders(instance)[: simple_count(instance.count, scans)]:
        yield first_fit(instance, order, best=True)
        yield first_fit(instance, order)
    pack = skyline if unconstrained else first_fit
    random = np.random.default_rng(seed)
    by_section = [_Chain(order, 0.0) for order in orders]
    by_buffer = [_Chain(order, stride) for stride in (0.1, 0.5) for order in orders]
    rounds = 4 if instance.count > 5_000 else 1  # passes of large instances are few
    while True:
        for chain in by_section * rounds + by_buffer:
            offsets = pack(instance, chain.order())
            chain.blame(instance, offsets, goal, random)
            yield offsets


def simple_count(count: int, scans: int) -> int:
    """Number of simple orders within `scans`.

    Best fit looks at every placed buffer for each one, first fit at about half of them.
    """
    return min(4, 4 * scans // (3 * count * count)) if count else 0


class _Chain:
    """One order, adapted after each pass ("squeaky wheel", Joslin and Clements 1999).

    With a stride, buffers that end above the goal move forward, by at most that share of the
    order's length. With stride 0, all buffers live in
    a section with such buffers move forward, by a share of their number there.
    """

    def __init__(self, order: Ints, stride: float) -> None:
        self.rank: Floats = np.argsort(order) / max(1, len(order))
        self.stride = stride
        self.forward = np.zeros(len(order))
        self.weight: Floats = np.zeros(0)

    def order(self) -> Ints:
        return np.argsort(self.rank - self.forward, kind="stable")

    def blame(
        self, instance: Instance, offsets: Ints, goal: int, random: np.random.Generator
    ) -> None:
        decay = 0.95  # share of the blame that is kept from one pass to the next
        above = offsets * instance.alignment + instance.size > goal
        if self.stride:
            self.forward[above] += self.stride * random.random(int(above.sum()))
            self.forward *= decay
            return
        change = np.zeros(instance.sections + 1)
        np.add.at(change, instance.first[above], 1.0)
        np.add.at(change, instance.last[above], -1.0)
        count = change.cumsum()[:-1]
        old = decay * self.weight if len(self.weight) else np.zeros(instance.sections)
        self.weight = old + count / max(1.0, count.max(initial=0.0))
        share = spread(self.weight, instance.first, instance.last)
        self.forward = random.choice((0.1, 0.3, 1.0)) * share


def completed(hint: Ints, order: Ints) -> Ints:
    """`hint`, followed by the buffers that it omits, by `order`."""
    count = len(order)
    if hint.ndim != 1 or ((hint < 0) | (hint >= count)).any() or len(np.unique(hint)) < len(hint):
        raise ValueError("order_hint must name buffers, each at most once")
    missing = np.ones(count, np.bool_)
    missing[hint] = False
    return np.concatenate([hint, order[missing[order]]])
