"""One call of the kernel with its settings and its record."""

from dataclasses import dataclass

import numpy as np

from coop_plan.planner.core.arrays import Arrays, Floats, Ints
from coop_plan.planner.offline.clairvoyant import simulate
from coop_plan.planner.offline.state import (
    DIRTY,
    DROP_EVENT,
    DROPPED,
    DROPS,
    DUE,
    EVENT_OP,
    EVENTS,
    EVICTABLE,
    NEVER,
    PLACE,
    POOL,
    SLOT,
    STORED,
    WRITES,
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
class Run:
    """
    The record of a run that completed.

    Per event its op; per drop the tensor and the last event before it; per in-place write (event,
    output, input).
    """

    cost_us: float
    ops: Ints
    dropped: Ints
    drop_event: Ints
    inplace: Ints


class Runner:
    """Calls the kernel on one problem, reusing its record buffers."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        n, count = arrays.cost.size, arrays.size.size
        events = n * (MAX_RECOMPUTES_PER_OP + 1) + 1
        most = 1 + max(1, int(np.diff(arrays.makes_ptr).max(initial=1)))
        drops = n + count + (events - n) * most
        self._scratch = np.empty(max(n, count) + 2, dtype=np.int64)
        self._event = np.empty((2, events), dtype=np.int64)
        self._drop = np.empty((2, drops), dtype=np.int64)
        self._write = np.empty((3, drops), dtype=np.int64)
        self.failed_op = -1

    def __call__(self, budget: int, settings: Settings, cost_limit: float = np.inf) -> Run | None:
        """Run at `budget` logical bytes; None when it fails or costs more than the limit (µs)."""
        n, count = self.arrays.cost.size, self.arrays.size.size
        state = State(
            budget=budget,
            small=budget // SMALL_SHARE,
            alpha=settings.alpha,
            cap=settings.cap,
            price=settings.price,
            weight=settings.weight,
            counts=np.zeros(11, dtype=np.int64),
            tensor=np.zeros((15, count + 1), dtype=np.int64),
            value=np.zeros((2, count)),
            op=np.zeros((3, n + 1), dtype=np.int64),
            stack=self._scratch,
            pool=np.empty(POOL, dtype=np.int64),
            pool_score=np.empty(POOL),
            event=self._event,
            drop=self._drop,
            write=self._write,
        )
        state.tensor[SLOT] = self.arrays.uses_ptr
        state.tensor[[STORED, DUE]] = NEVER
        state.tensor[DIRTY] = 1
        state.tensor[PLACE] = -1
        state.tensor[EVICTABLE, :count] = self.arrays.evictable
        self.failed_op, cost = simulate(self.arrays, state, cost_limit)
        if self.failed_op >= 0:
            return None
        events, drops, writes = (int(state.counts[i]) for i in (EVENTS, DROPS, WRITES))
        return Run(
            cost,
            self._event[EVENT_OP, :events].copy(),
            self._drop[DROPPED, :drops].copy(),
            self._drop[DROP_EVENT, :drops].copy(),
            self._write[:, :writes].T.copy(),
        )
