"""One clairvoyant run with its settings and its record."""

from dataclasses import dataclass

import numpy as np

from coop_plan.planner.core.arrays import Arrays, Floats, Ints
from coop_plan.planner.offline.clairvoyant import run_clairvoyant
from coop_plan.planner.offline.params import ClairvoyantParams
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
    SLOT,
    STORED,
    WRITES,
    ClairvoyantState,
)


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
    """Makes clairvoyant runs of one problem, reusing their record buffers."""

    def __init__(self, arrays: Arrays, params: ClairvoyantParams) -> None:
        self.arrays = arrays
        self.params = params
        n, count = arrays.cost.size, arrays.size.size
        events = n * (params.max_recomputes_per_op + 1) + 1
        most = 1 + max(1, int(np.diff(arrays.makes_ptr).max(initial=1)))
        drops = n + count + (events - n) * most
        self._scratch = np.empty(max(n, count) + 2, dtype=np.int64)
        self._event = np.empty((2, events), dtype=np.int64)
        self._drop = np.empty((2, drops), dtype=np.int64)
        self._write = np.empty((3, drops), dtype=np.int64)
        self.failed_op = -1

    def __call__(self, budget: int, settings: Settings, cost_limit: float = np.inf) -> Run | None:
        """Run at `budget` logical bytes; None when it fails or costs more than the limit (µs)."""
        params = self.params
        n, count = self.arrays.cost.size, self.arrays.size.size
        state = ClairvoyantState(
            budget=budget,
            small=budget // params.small_divisor,
            alpha=settings.alpha,
            cap=settings.cap,
            least_distance=params.least_distance,
            closure_ops=params.closure_ops,
            pool_from=params.pool_from,
            pool_ops=params.pool_ops,
            price=settings.price,
            weight=settings.weight,
            counts=np.zeros(11, dtype=np.int64),
            tensor=np.zeros((15, count + 1), dtype=np.int64),
            value=np.zeros((2, count)),
            op=np.zeros((3, n + 1), dtype=np.int64),
            stack=self._scratch,
            pool=np.empty(params.pool, dtype=np.int64),
            pool_score=np.empty(params.pool),
            event=self._event,
            drop=self._drop,
            write=self._write,
        )
        state.tensor[SLOT] = self.arrays.uses_ptr
        state.tensor[[STORED, DUE]] = NEVER
        state.tensor[DIRTY] = 1
        state.tensor[PLACE] = -1
        state.tensor[EVICTABLE, :count] = self.arrays.evictable
        self.failed_op, cost = run_clairvoyant(self.arrays, state, cost_limit)
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
