"""One offline eviction run: its settings and its record."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from coop_plan.planner.core.arrays import Arrays, Floats, Ints
from coop_plan.planner.core.lifetimes import RUN, Blocks, blocks_of, trace
from coop_plan.planner.core.records import record, table
from coop_plan.planner.heuristic.eviction import run_evictions
from coop_plan.planner.heuristic.eviction_state import (
    NEVER,
    EvictionState,
    Now,
    Pair,
    Tensor,
    Victim,
)
from coop_plan.planner.heuristic.params import EvictionParams


@dataclass(frozen=True)
class Settings:
    """Scoring settings of a run; see `planner.heuristic.eviction`.

    `weight` is a factor per entry of `Arrays.uses`, plus one.
    """

    weight: Floats
    alpha: float
    cap: bool
    foresee: bool


@dataclass(frozen=True)
class Record:
    """Record of a completed run: its cost (µs) and the ops in execution order."""

    cost_us: float
    ops: Ints

    @cached_property
    def _kinds(self) -> Ints:
        return np.full(self.ops.size, RUN, dtype=np.int64)

    def blocks(self, arrays: Arrays) -> Blocks:
        """Buffers to place; a buffer ends with its last access, not with its eviction."""
        made = trace(arrays, self._kinds, self.ops)
        return blocks_of(arrays, self._kinds, self.ops, made)


class Runner:
    """Makes eviction runs of one problem and reuses their record buffers, until `out_of_time`."""

    def __init__(
        self, arrays: Arrays, params: EvictionParams, out_of_time: Callable[[], bool]
    ) -> None:
        self.arrays = arrays
        self.params = params
        self.out_of_time = out_of_time
        n, count = arrays.ops, arrays.size.size
        events = 9 * n + 1  # a run with eight recomputes an op is abandoned
        pairs = max(1, int(np.diff(arrays.pairs_ptr).max(initial=1)))
        self._scratch = np.empty(max(n, count) + 2, dtype=np.int64)
        self._event = np.empty(events, dtype=np.int64)
        self._pair = table(Pair, pairs)
        self._powers: dict[float, Floats] = {}
        self.failed_op = -1
        self.timed_out = False
        """True if a run ended because of the time limit."""

    def __call__(
        self, budget: int, settings: Settings, cost_limit: float = np.inf
    ) -> Record | None:
        """Run at a logical budget of `budget` bytes.

        Returns None if the run fails, exceeds `cost_limit` (µs), or runs out of time.
        """
        params = self.params
        n, count = self.arrays.ops, self.arrays.size.size
        state = EvictionState(
            budget=budget,
            small_bytes=budget // 4096,
            cap=settings.cap,
            foresee=settings.foresee,
            pool_min_live=params.pool_min_live,
            power=self._power(settings.alpha),
            weight=settings.weight,
            now=record(Now),
            tensor=table(Tensor, count),
            seen=np.zeros(n + 1, dtype=np.int64),
            stack=self._scratch,
            pool=table(Victim, params.pool_size),
            event=self._event,
            pair=self._pair,
            order=np.empty(n + 1, dtype=np.int64),
            live=np.empty((2, count), dtype=np.int64),
            live_count=np.zeros(2, dtype=np.int64),
            changed=np.empty(count, dtype=np.int64),
            to_check=np.empty(count, dtype=np.int64),
        )
        tensor = state.tensor
        tensor["slot"] = self.arrays.uses_ptr[:count]
        tensor["demand"] = tensor["next_use"] = NEVER
        tensor["is_dirty"] = True
        tensor["list_index"] = tensor["first_waiting"] = -1
        tensor["is_evictable"] = self.arrays.evictable
        position, cost = 0, 0.0
        while position < n:
            if position and self.out_of_time():
                self.timed_out = True
                return None
            self.failed_op, position, cost = run_evictions(
                self.arrays, state, position, cost, cost_limit, params.chunk_events
            )
            if self.failed_op >= 0:
                return None
        return Record(cost, self._event[: state.now.events].copy())

    def _power(self, alpha: float) -> Floats:
        """Each distance of up to n positions to the power of `alpha`, computed once."""
        if alpha not in self._powers:
            distances = range(self.arrays.ops + 1)
            self._powers[alpha] = np.array([(d + 1e-9) ** alpha for d in distances])  # none is 0
        return self._powers[alpha]
