"""One call of the kernel with its settings and its record."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from coop_plan.planner.core.arrays import Arrays, Floats, Ints
from coop_plan.planner.core.lifetimes import RUN, Blocks, blocks_of, trace
from coop_plan.planner.offline.clairvoyant import simulate
from coop_plan.planner.offline.state import (
    DIRTY,
    DUE,
    EVENT_OP,
    EVENTS,
    EVICTABLE,
    NEVER,
    PLACE,
    POOL,
    SLOT,
    STORED,
    State,
)

MAX_RECOMPUTES_PER_OP = 8
"""A run that computes more than this many times the program is given up."""

SMALL_SHARE = 4096
"""Tensors below budget / this are evicted only when nothing larger is left."""


@dataclass(frozen=True)
class Settings:
    """
    What the score of a victim is made of; see `planner.offline.clairvoyant`.

    `price` is a prefix sum over program positions, n + 1 entries; `weight` a factor per entry of
    `Arrays.uses`, plus one.
    """

    price: Floats
    weight: Floats
    alpha: float
    cap: bool


@dataclass(frozen=True)
class Record:
    """What a run that completed comes to: its cost (µs) and the ops in the order they ran."""

    cost_us: float
    ops: Ints

    @cached_property
    def _kinds(self) -> Ints:
        return np.full(self.ops.size, RUN, dtype=np.int64)

    def blocks(self, arrays: Arrays) -> Blocks:
        """What is placed of it; each buffer ends with its last touch, not when it was evicted."""
        made = trace(arrays, self._kinds, self.ops)
        return blocks_of(arrays, self._kinds, self.ops, made)


class Runner:
    """Calls the kernel on one problem, reusing its record buffers."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        n, count = arrays.ops, arrays.size.size
        events = n * (MAX_RECOMPUTES_PER_OP + 1) + 1
        pairs = max(1, int(np.diff(arrays.pairs_ptr).max(initial=1)))
        self._scratch = np.empty(max(n, count) + 2, dtype=np.int64)
        self._event = np.empty((2, events), dtype=np.int64)
        self._pair = np.empty((2, pairs), dtype=np.int64)
        self.failed_op = -1

    def __call__(
        self, budget: int, settings: Settings, cost_limit: float = np.inf
    ) -> Record | None:
        """Run at `budget` logical bytes; None when it fails or costs more than the limit (µs)."""
        n, count = self.arrays.ops, self.arrays.size.size
        state = State(
            budget=budget,
            small=budget // SMALL_SHARE,
            alpha=settings.alpha,
            cap=settings.cap,
            price=settings.price,
            weight=settings.weight,
            counts=np.zeros(10, dtype=np.int64),
            tensor=np.zeros((15, count + 1), dtype=np.int64),
            value=np.zeros((2, count)),
            op=np.zeros((3, n + 1), dtype=np.int64),
            stack=self._scratch,
            pool=np.empty(POOL, dtype=np.int64),
            pool_score=np.empty(POOL),
            event=self._event,
            pair=self._pair,
        )
        state.tensor[SLOT] = self.arrays.uses_ptr
        state.tensor[[STORED, DUE]] = NEVER
        state.tensor[DIRTY] = 1
        state.tensor[PLACE] = -1
        state.tensor[EVICTABLE, :count] = self.arrays.evictable
        self.failed_op, cost = simulate(self.arrays, state, cost_limit)
        if self.failed_op >= 0:
            return None
        return Record(cost, self._event[EVENT_OP, : state.counts[EVENTS]].copy())
