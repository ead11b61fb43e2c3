"""Saved sets of a joint graph by falling peak, each found from the one before it.

A greedy search with the peak model (`joint_model`), in the manner of a knapsack by bytes freed per
recomputation, but the bytes are those of the segments above a target, recomputed values included.
A move stops to save one value, or saves one more to cut a chain of recomputations. The sets do not
depend on a budget.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from coop_plan.runtime.inductor_budget.joint_model import JointModel, SavedSet, Simulation

RATIO = 0.95
"""Modelled peak of a saved set over that of the set before it, at most."""

SIMULATED = 5
"""Moves that are simulated before the best of them is made."""

MOST_SIMULATED = 60
"""Moves that are simulated before the search ends."""


class Level(NamedTuple):
    """A saved set, its modelled peak in bytes, and its recomputation (`Simulation.cost`)."""

    saved: SavedSet
    peak: int
    cost: int


def levels(model: JointModel, start: SavedSet) -> list[Level]:
    """Saved sets from `start` to the smallest modelled peak that was found, in falling order."""
    saved, now = start, model.simulate(start)
    found = [Level(saved, now.peak, now.cost)]
    target = int(now.peak * RATIO)
    while True:
        while now.peak > target:
            step = _best_move(model, saved, now, target)
            if step is None:
                if now.peak < found[-1].peak:
                    found.append(Level(saved, now.peak, now.cost))
                return _undominated(found)
            saved, now = step
        found.append(Level(saved, now.peak, now.cost))
        target = int(now.peak * RATIO)


def _undominated(found: list[Level]) -> list[Level]:
    """Levels that no other beats in both peak and recomputation, by falling peak."""
    kept: list[Level] = []
    for level in sorted(found, key=lambda level: (level.peak, level.cost)):
        if not kept or level.cost < kept[-1].cost or level is found[0]:
            kept.append(level)
    return kept[::-1]


def _excess(now: Simulation, target: int) -> float:
    over = np.maximum(now.live - target, 0).astype(np.float64)
    return float(np.square(over).sum())


def _best_move(
    model: JointModel, saved: SavedSet, now: Simulation, target: int
) -> tuple[SavedSet, Simulation] | None:
    before = _excess(now, target)
    best, best_rate = None, 0.0
    for count, after in enumerate(_moves(model, saved, now, target)):
        if count >= MOST_SIMULATED or (count >= SIMULATED and best is not None):
            break
        made = model.simulate(after)
        gain = before - _excess(made, target)
        rate = gain / max(made.cost - now.cost, 1)
        if gain > 1e-9 * before and rate > best_rate:
            best, best_rate = (after, made), rate
    return best


def _moves(model: JointModel, saved: SavedSet, now: Simulation, target: int) -> Iterator[SavedSet]:
    """Saved sets one move away, by bytes freed above the target per recomputation."""
    hot = np.concatenate([[0], np.cumsum(np.maximum(now.live - target, 0))])
    again = set(now.recomputed)

    def weight(begin: int, end: int) -> int:
        return int(hot[end] - hot[begin])

    rated = []
    for i in saved:
        owner = model.owner[i]
        if not model.recomputable[i]:
            continue
        span = weight(now.made_at.get(owner, 0), now.boundary + now.first_use.get(owner, 0))
        extra = sum(model.cost[j] for j in model.recomputed(saved - {i}, [i]) - again)
        rated.append((model.size[owner] * span / (extra + 1), i))
    yield from (model.completed(saved - {i}) for _, i in sorted(rated, reverse=True))
    values = [i for i in again if model.size[i] and not model.free[i] and i not in saved]
    values.sort(key=lambda i: (-model.cost[i], i))
    yield from (model.completed(saved | {i}) for i in values)
