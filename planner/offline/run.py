"""One call of the kernel with its settings and its record."""

from dataclasses import dataclass

import numpy as np

from planner.offline.arrays import Arrays, Floats, Ints
from planner.offline.kernel import simulate

MAX_RECOMPUTES_PER_OP = 8
"""A run that computes more than this many times the program is given up."""


SMALL_SHARE = 4096
"""Tensors below budget / this are evicted only when nothing larger is left."""


@dataclass(frozen=True)
class Settings:
    """
    What the score of a victim is made of; see `planner.offline.kernel`.

    `price` is a prefix sum over program positions, n + 1 entries; `weight` a factor per entry of
    `Arrays.uses`, plus one.
    """

    price: Floats
    weight: Floats
    alpha: float
    cap: bool


@dataclass(frozen=True)
class Run:
    """The record of a run that completed: events, bytes in use at each, drops, in-place writes."""

    cost_us: float
    ops: Ints
    used: Ints
    dropped: Ints
    drop_event: Ints
    drop_slot: Ints
    inplace: Ints


class Runner:
    """Calls the kernel on one problem, reusing its record buffers."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        n = arrays.cost.size
        self._events = n * (MAX_RECOMPUTES_PER_OP + 1) + 1
        writes = 1 + max(1, int(np.diff(arrays.makes_ptr).max(initial=1)))
        drops = n + arrays.size.size + (self._events - n) * writes
        self._op, self._used = np.empty((2, self._events), dtype=np.int64)
        self._dropped, self._drop_event, self._drop_slot = np.empty((3, drops), dtype=np.int64)
        self._inplace = np.empty((3, self._events), dtype=np.int64)
        self.failed_op = -1

    def __call__(self, budget: int, settings: Settings, cost_limit: float = np.inf) -> Run | None:
        """Run at `budget` logical bytes; None when it fails or costs more than the limit (µs)."""
        failed, cost, events, drops, writes = simulate(
            self.arrays,
            budget,
            settings.price,
            settings.weight,
            settings.alpha,
            settings.cap,
            budget // SMALL_SHARE,
            self._events,
            cost_limit,
            self._op,
            self._used,
            self._dropped,
            self._drop_event,
            self._drop_slot,
            *self._inplace,
        )
        self.failed_op = failed
        if failed >= 0:
            return None
        return Run(
            cost,
            self._op[:events].copy(),
            self._used[:events].copy(),
            self._dropped[:drops].copy(),
            self._drop_event[:drops].copy(),
            self._drop_slot[:drops].copy(),
            self._inplace[:, :writes].T.copy(),
        )
