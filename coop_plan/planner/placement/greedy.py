"""Generator of greedy placements: plain sort orders first, then orders adapted by blame."""

from collections.abc import Iterator

import numpy as np

from coop_plan.planner.core.arrays import Floats, Ints
from coop_plan.planner.placement.first_fit import first_fit
from coop_plan.planner.placement.instance import Instance
from coop_plan.planner.placement.keys import order_by, simple_orders, sort_keys, spread
from coop_plan.planner.placement.params import GreedyParams
from coop_plan.planner.placement.skyline import drop, skyline


def placements(
    instance: Instance, hint: Ints | None, goal: int, seed: int, params: GreedyParams, scans: int
) -> Iterator[Ints]:
    """Offsets in units, without end; the first dozens follow the plain and the simple orders.

    `scans` limits best and first fit by the simple orders, in placed buffers that they look at.

    `goal`: the peak in bytes to reach; buffers that end above it are blamed. `hint`: buffers by
    offset of an earlier placement, whose peak the first placement does not exceed.
    """
    keys = sort_keys(instance.first, instance.last, instance.height, instance.sections)
    orders = [order_by(name, keys) for name in params.orders]
    unconstrained = instance.is_plain
    if hint is not None:
        hint = completed(hint, orders[0])
        yield drop(instance, hint) if unconstrained else first_fit(instance, hint)
    if unconstrained:
        for order in orders:
            yield skyline(instance, order)
    if not unconstrained or instance.count <= params.first_fit_most:
        for order in orders if hint is None else [hint, *orders]:
            yield first_fit(instance, order)
    for order in simple_orders(instance)[: simple_count(instance.count, scans)]:
        yield first_fit(instance, order, best=True)
        yield first_fit(instance, order)
    pack = skyline if unconstrained else first_fit
    random = np.random.default_rng(seed)
    by_section = [_Chain(order, 0.0, params) for order in orders]
    by_buffer = [_Chain(order, stride, params) for stride in params.strides for order in orders]
    rounds = params.section_rounds if instance.count > params.large else 1
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

    With a stride, buffers that end above the goal move forward. With stride 0, all buffers live in
    a section with such buffers move forward, by a share of their number there.
    """

    def __init__(self, order: Ints, stride: float, params: GreedyParams) -> None:
        self.params = params
        self.rank: Floats = np.argsort(order) / max(1, len(order))
        self.stride = stride
        self.forward = np.zeros(len(order))
        self.weight: Floats = np.zeros(0)

    def order(self) -> Ints:
        return np.argsort(self.rank - self.forward, kind="stable")

    def blame(
        self, instance: Instance, offsets: Ints, goal: int, random: np.random.Generator
    ) -> None:
        above = offsets * instance.alignment + instance.size > goal
        if self.stride:
            self.forward[above] += self.stride * random.random(int(above.sum()))
            self.forward *= self.params.memory
            return
        change = np.zeros(instance.sections + 1)
        np.add.at(change, instance.first[above], 1.0)
        np.add.at(change, instance.last[above], -1.0)
        count = change.cumsum()[:-1]
        old = self.params.memory * self.weight if len(self.weight) else np.zeros(instance.sections)
        self.weight = old + count / max(1.0, count.max(initial=0.0))
        share = spread(self.weight, instance.first, instance.last)
        self.forward = random.choice(self.params.shifts) * share


def completed(hint: Ints, order: Ints) -> Ints:
    """`hint`, followed by the buffers that it omits, by `order`."""
    count = len(order)
    if hint.ndim != 1 or ((hint < 0) | (hint >= count)).any() or len(np.unique(hint)) < len(hint):
        raise ValueError("order_hint must name buffers, each at most once")
    missing = np.ones(count, np.bool_)
    missing[hint] = False
    return np.concatenate([hint, order[missing[order]]])
