"""One eviction run with its settings and its record."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from coop_plan.planner.core.arrays import Arrays, Floats, Ints
from coop_plan.planner.core.lifetimes import RUN, Blocks, blocks_of, trace
from coop_plan.planner.heuristic.eviction import run_eviction
from coop_plan.planner.heuristic.eviction_state import (
    AT,
    DIRTY,
    DUE,
    EVENTS,
    EVICTABLE,
    NEVER,
    PLACE,
    SLOT,
    STORED,
    EvictionState,
)
from coop_plan.planner.heuristic.params import EvictionParams


@dataclass(frozen=True)
class Settings:
    """
    Weights and switches of the eviction score; see `planner.heuristic.eviction`.

    `price` is a prefix sum over program positions, n + 1 entries; `weight` a factor per entry of
    `Arrays.uses`, plus one.
    """

    price: Floats
    weight: Floats
    alpha: float
    cap: bool
    foresee: bool


@dataclass(frozen=True)
class Record:
    """
    Cost (µs) of a completed run, and its ops in the order in which they ran.

    `expected` and `paid`, for each entry of `Arrays.uses` and one more: the weighted cost (µs) of
    what was evicted until that use when it was evicted, and what its closure took then; 0 if it
    was not.
    """

    cost_us: float
    ops: Ints
    expected: Floats = field(default_factory=lambda: np.empty(0))
    paid: Floats = field(default_factory=lambda: np.empty(0))

    def corrections(self, most: float) -> Floats:
        """
        By which factor each weight was wrong, within `most` and its inverse.

        A single 1 where nothing is known, as of ops that no weights have chosen.
        """
        if self.paid.size == 0:
            return np.ones(1)
        known = (self.expected > 0) & (self.paid > 0)
        found = np.ones(self.paid.size)
        found[known] = np.clip(self.paid[known] / self.expected[known], 1 / most, most)
        return found

    @cached_property
    def _kinds(self) -> Ints:
        return np.full(self.ops.size, RUN, dtype=np.int64)

    def blocks(self, arrays: Arrays) -> Blocks:
        """Blocks to place; each buffer ends with its last access, not at its eviction."""
        made = trace(arrays, self._kinds, self.ops)
        return blocks_of(arrays, self._kinds, self.ops, made)


class Runner:
    """Makes eviction runs of one problem, reusing their record buffers, until `out_of_time`."""

    def __init__(
        self, arrays: Arrays, params: EvictionParams, out_of_time: Callable[[], bool]
    ) -> None:
        self.arrays = arrays
        self.params = params
        self.out_of_time = out_of_time
        n, count = arrays.ops, arrays.size.size
        events = n * (params.max_recomputes_per_op + 1) + 1
        pairs = max(1, int(np.diff(arrays.pairs_ptr).max(initial=1)))
        self._scratch = np.empty(max(n, count) + 2, dtype=np.int64)
        self._event = np.empty(events, dtype=np.int64)
        self._pair = np.empty((2, pairs), dtype=np.int64)
        self.failed_op = -1
        self.cut_short = False
        """True if the deadline ended a run; runs of small graphs end before the clock is read."""

    def __call__(
        self, budget: int, settings: Settings, cost_limit: float = np.inf
    ) -> Record | None:
        """
        Run at `budget` logical bytes.

        None when it fails, costs more than the limit (µs), or time is up.
        """
        params = self.params
        n, count = self.arrays.ops, self.arrays.size.size
        state = EvictionState(
            budget=budget,
            small=budget // params.small_divisor,
            alpha=settings.alpha,
            cap=settings.cap,
            foresee=settings.foresee,
            least_distance=params.least_distance,
            closure_ops=params.closure_ops,
            pool_from=params.pool_from,
            heap_from=params.heap_from,
            pool_ops=params.pool_ops,
            price=settings.price,
            weight=settings.weight,
            expected=np.zeros(settings.weight.size),
            paid=np.zeros(settings.weight.size),
            counts=np.zeros(13, dtype=np.int64),
            tensor=np.zeros((18, count + 1), dtype=np.int64),
            value=np.zeros((3, count)),
            op=np.zeros((2, n + 1), dtype=np.int64),
            stack=self._scratch,
            pool=np.empty(params.pool, dtype=np.int64),
            pool_score=np.empty(params.pool),
            event=self._event,
            pair=self._pair,
        )
        state.tensor[SLOT] = self.arrays.uses_ptr
        state.tensor[[STORED, DUE]] = NEVER
        state.tensor[DIRTY] = 1
        state.tensor[[PLACE, AT]] = -1
        state.tensor[EVICTABLE, :count] = self.arrays.evictable
        position, cost = 0, 0.0
        while position < n:
            if position and self.out_of_time():
                self.cut_short = True
                return None
            self.failed_op, position, cost = run_eviction(
                self.arrays, state, position, cost, cost_limit, params.chunk_events
            )
            if self.failed_op >= 0:
                return None
        events = self._event[: state.counts[EVENTS]].copy()
        return Record(cost, events, state.expected, state.paid)
