"""State of one offline eviction run, as arrays for compiled code."""

from typing import NamedTuple

from coop_plan.planner.core.arrays import Floats, FloatTable, Ints, IntTable


class EvictionState(NamedTuple):
    """Settings, state and record of an eviction run.

    `budget` and `small` are bytes; tensors below `small` bytes are evicted last. `power[d]` is
    distance^alpha for a distance of d positions, `weight` a factor per entry of `Arrays.uses` and
    one for tensors without a further use. With `cap` a victim's bytes count up to the missing
    bytes. With `foresee` a closure includes the ops for tensors that will be dead by then.
    `pool_min_live` is that of `EvictionParams`; `pool` holds the best victims of the last scan.
    """

    budget: int
    small: int
    cap: bool
    foresee: bool
    pool_min_live: int
    power: Floats
    weight: Floats
    counts: Ints
    tensor: IntTable
    value: FloatTable
    op: IntTable
    stack: Ints
    pool: Ints
    pool_score: Floats
    event: Ints
    pair: IntTable
