"""Exact search with restarts: a portfolio of orders, adapted to earlier dead ends.

The instance is cut into components that share no time. Each is searched by `canonical.depth_first`
repeatedly, with node budgets after Luby, Sinclair and Zuckerman (1993). Restarts alternate between
the orders of the portfolio and two branching rules: the lowest buffer first, or one near the
section with the most dead ends. After the first round, buffers of the sections with the most dead
ends move forward in each order ("squeaky wheel", Joslin and Clements 1999). Without a deadline the
search is deterministic.
"""

import time
from dataclasses import dataclass

import numpy as np

from coop_plan.planner.core.arrays import Floats, Ints
from coop_plan.planner.core.jit import njit
from coop_plan.planner.placement.canonical import FOUND, IMPOSSIBLE, UNKNOWN, depth_first
from coop_plan.planner.placement.instance import Instance
from coop_plan.planner.placement.keys import live_profile, order_by, sort_keys, spread
from coop_plan.planner.placement.task import Task, Windows
from coop_plan.planner.placement.windows import window_neighbours

ORDERS = ("TWA", "TAW", "WAT", "ATW", "UW")
"""The orders of the portfolio, as letters of sort keys (`planner.placement.keys`)."""


@dataclass
class Effort:
    """Remaining budget of a search: work, and a deadline or None."""

    work: int
    """Sum over nodes of the live buffers of all sections, which a node may visit: 3.5 ns each."""
    deadline: float | None = None
    """`time.perf_counter()` value."""
    pace: float = 0.0
    """Seconds per unit of work in the last restart."""

    @property
    def spent(self) -> bool:
        late = self.deadline is not None and time.perf_counter() >= self.deadline
        return late or self.work <= 0

    def nodes(self, node_work: int) -> int:
        """Limit of nodes for a restart whose nodes cost `node_work` each; at least 1."""
        work = self.work
        if self.deadline is not None and self.pace > 0:
            left = max(0.0, self.deadline - time.perf_counter())
            work = min(work, int(left / self.pace))
        return max(1, work // node_work)

    def spend(self, work: int, seconds: float) -> None:
        self.work -= work
        self.pace = seconds / work


class Component:
    """Buffers (indices into the instance) independent of all others, and the state of restarts."""

    def __init__(self, instance: Instance, buffers: Ints, low: int, high: int, seed: int) -> None:
        self.buffers = buffers
        self.sections = high - low
        self.first = instance.first[buffers] - low
        self.last = instance.last[buffers] - low
        self.height = instance.height[buffers]
        self.size = instance.size[buffers]
        self.fixed = instance.fixed[buffers]
        self.alignment = instance.alignment
        self.multiple = instance.multiple[buffers]
        # All offsets are multiples of this. On that coarser grid the same bounds prune more.
        self.grid = common_divisor(instance, buffers)
        self.is_complete = True
        """The search proves impossibility: in a canonical placement the lowest is in its gap."""
        if instance.pieces is None:
            self.near = neighbours(self.first, self.last)
            self.member = members(self.first, self.last, self.sections)
            self.windows = Windows(False, *[np.empty(0, np.int64)] * 4)
        else:
            parts = instance.pieces.of(buffers, low)
            start, near, below, above = window_neighbours(parts, instance.alignment)
            self.near = start, near
            start, piece = members(parts.first, parts.last, self.sections)
            self.member = start, np.repeat(np.arange(len(buffers)), np.diff(parts.start))[piece]
            bottom, top = (-(-end[piece] // instance.alignment) for end in (parts.low, parts.high))
            self.windows = Windows(True, below, above, bottom, top - bottom)
            self.is_complete = bool((above > 0).all())
        self.node_work = max(1, len(self.member[1]))
        keys = sort_keys(self.first, self.last, self.height, self.sections)
        self.ranks = [np.argsort(order_by(name, keys)) for name in ORDERS]
        profile = live_profile(self.first, self.last, self.height, self.sections)
        self.weight: Floats = profile / max(1, profile.max(initial=0))
        self.has_failures = False
        self.random = np.random.default_rng(seed)
        self.restarts = 0
        self.impossible = -1  # largest capacity in bytes proved too small
        self.peak = np.iinfo(np.int64).max  # of the best placement found, in bytes
        self.best = self.fixed

    def fit(self, capacity: int, effort: Effort) -> tuple[int, Ints]:
        """Search under a capacity in bytes; returns the answer, and offsets in units if FOUND."""
        if capacity <= self.impossible:
            return IMPOSSIBLE, self.fixed
        if self.peak <= capacity:
            return FOUND, self.best
        grid = self.grid
        task = Task(
            self.first,
            self.last,
            self.height // grid,
            (capacity - self.size) // self.alignment // grid,
            -(-capacity // self.alignment) // grid,
            np.where(self.fixed >= 0, self.fixed // grid, -1),
            self.multiple // grid + (self.multiple < grid),
            *self.near,
            *self.member,
            self.windows,
        )
        offset = np.zeros(len(self.buffers), np.int64)
        first_restart = self.restarts
        while not effort.spent:
            round_ = (self.restarts - first_restart) // len(ORDERS)
            failures = np.zeros(self.sections, np.int64)
            began = time.perf_counter()
            answer, nodes = depth_first(
                task,
                self._rank(),
                self.weight,
                (self.restarts // len(ORDERS) + self.restarts) % 2,
                min(500 * luby(round_ + 1), effort.nodes(self.node_work)),
                offset,
                failures,
            )
            effort.spend((nodes + 1) * self.node_work, time.perf_counter() - began)
            # The first restart's weight is the live profile, which failures replace.
            old = 0.9 * self.weight if self.has_failures else np.zeros(self.sections)
            self.weight = old + failures / max(1, failures.sum())
            self.has_failures = True
            self.restarts += 1
            if answer == FOUND:
                self.best = offset * grid
                self.peak = int((self.best * self.alignment + self.size).max())
                return FOUND, self.best
            if answer == IMPOSSIBLE:
                self.impossible = max(self.impossible, capacity)
                return IMPOSSIBLE, self.fixed
        return UNKNOWN, self.fixed

    def _rank(self) -> Ints:
        """Position of each buffer in the next order, adapted after the first round."""
        rank = self.ranks[self.restarts % len(self.ranks)]
        if self.restarts < len(self.ranks):
            return rank
        blame = spread(self.weight, self.first, self.last)
        shift = self.random.choice((0.1, 0.3, 1.0)) * len(rank)
        order = np.argsort(rank - shift * blame, kind="stable")
        moved = np.empty_like(rank)
        moved[order] = np.arange(len(rank))
        return moved


def components(instance: Instance, seed: int) -> list[Component] | None:
    """The instance cut where no lifetime crosses; None if a part has too many conflicts."""
    real = instance.height > 0
    change = np.zeros(instance.sections + 1, np.int64)
    np.add.at(change, instance.first[real], 1)
    np.add.at(change, instance.last[real] - 1, -1)
    cuts = np.flatnonzero(change.cumsum()[: instance.sections] == 0) + 1
    cuts = np.concatenate([[0], cuts, [instance.sections]])
    where = np.searchsorted(cuts, instance.first, side="right") - 1
    result = []
    for k in np.unique(where[real]).tolist():
        buffers = np.flatnonzero(real & (where == k))
        if pair_count(instance.first[buffers], instance.last[buffers]) > 4_000_000:
            return None
        low, high = int(cuts[k]), int(cuts[k + 1])
        result.append(Component(instance, buffers, low, high, seed))
    return result


def fit(
    instance: Instance, parts: list[Component], capacity: int, effort: Effort
) -> tuple[int, Ints]:
    """All components under one capacity in bytes; as `Component.fit`."""
    offsets = instance.fixed.clip(0)
    for part in parts:
        answer, found = part.fit(capacity, effort)
        if answer != FOUND:
            return answer, offsets
        offsets[part.buffers] = found
    return FOUND, offsets


def common_divisor(instance: Instance, buffers: Ints | slice = slice(None)) -> int:
    """Units of which all offsets of canonical placements of these buffers are multiples."""
    if instance.pieces is not None:
        return 1
    steps = (
        instance.height,
        instance.fixed.clip(0),
        np.where(instance.multiple > 1, instance.multiple, 0),
    )
    return max(1, int(np.gcd.reduce([np.gcd.reduce(array[buffers]) for array in steps])))


def luby(i: int) -> int:
    """Luby's sequence from i = 1: 1 1 2 1 1 2 4 1 1 2 …."""
    k = i.bit_length()
    return 1 << (k - 1) if i == (1 << k) - 1 else luby(i - (1 << (k - 1)) + 1)


def pair_count(first: Ints, last: Ints) -> int:
    """Number of pairs of buffers that share a section."""
    born, dead = np.sort(first), np.sort(last)
    before = np.searchsorted(dead, born, side="right")
    return int((np.arange(len(first)) - before).sum())


@njit
def neighbours(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Adjacency lists of overlapping lifetimes."""
    count = len(first)
    order = np.argsort(first, kind="mergesort")
    start = np.zeros(count + 1, np.int64)
    items = np.empty(0, np.int64)
    # The first pass counts the entries of each list, the second one writes them.
    for fill in range(2):
        at = start.copy()
        if fill:
            items = np.empty(start[count], np.int64)
        else:
            at[:] = 0
        for p in range(count):
            i = order[p]
            for q in range(p + 1, count):
                j = order[q]
                if first[j] >= last[i]:
                    break
                if fill:
                    items[at[i]] = j
                    items[at[j]] = i
                at[i] += 1
                at[j] += 1
        if not fill:
            start[1:] = at[:count].cumsum()
    return start, items


@njit
def members(first: Ints, last: Ints, sections: int) -> tuple[Ints, Ints]:
    """The buffers live in each section, as pointer and index arrays."""
    start = np.zeros(sections + 1, np.int64)
    for i in range(len(first)):
        for t in range(first[i], last[i]):
            start[t + 1] += 1
    start = start.cumsum()
    at = start.copy()
    items = np.empty(start[sections], np.int64)
    for i in range(len(first)):
        for t in range(first[i], last[i]):
            items[at[t]] = i
            at[t] += 1
    return start, items
