"""The state of one eviction run, as arrays that compiled code can share."""

from typing import NamedTuple

from coop_plan.planner.core.arrays import Floats, Ints

NEVER = 1 << 40
"""A next use that does not come."""

# Entries of `EvictionState.counts`.
(
    USED,
    EVENTS,
    WRITES,
    STAMP,
    LARGE_COUNT,
    SMALL_COUNT,
    CHANGED_COUNT,
    POOL_COUNT,
    POOL_UNTIL,
    RETAINED_COUNT,
    POOL_SMALL,
    HEAPED,
    HEAP_COUNT,
) = range(13)

# Rows of `EvictionState.tensor`. LARGE, SMALL, CHANGED and ASIDE are lists, MARK and LISTED are
# marks, HEAP is what `planner.heuristic.score_heap` keeps in order and AT where in it a tensor is.
(
    LIVE,
    MADE,
    PINS,
    EVICTABLE,
    SLOT,
    STORED,
    DIRTY,
    DUE,
    PLACE,
    RETAINED,
    LISTED,
    MARK,
    LARGE,
    SMALL,
    CHANGED,
    HEAP,
    AT,
    ASIDE,
) = range(18)

# Rows of `EvictionState.value`: closure cost × weight / bytes, closure cost × weight in µs, and
# the score by which a tensor is in the heap.
MERIT, CLOSURE, KEY = range(3)

# Rows of `EvictionState.op`.
SEEN, ORDER = range(2)

# Rows of `EvictionState.pair`, of which `counts[WRITES]` are those of the op at hand.
INPLACE_OUT, INPLACE_SOURCE = range(2)


class EvictionState(NamedTuple):
    """
    State of an eviction run in compiled code: its settings, its position and its record.

    `budget` and `small` are bytes; `price` is a prefix sum per program position, `weight` a factor
    per entry of `Arrays.uses` and one more for tensors without a further use. `cap` counts no more
    bytes of a victim than are short, `foresee` what the program will not need as gone; tensors
    below `small` bytes are looked at last. The five after `foresee` are those of
    `EvictionParams`, and `pool` is as long as it says. `expected` and `paid` are as of
    `planner.heuristic.eviction_run.Record`.
    """

    budget: int
    small: int
    alpha: float
    cap: bool
    foresee: bool
    least_distance: float
    closure_ops: int
    pool_from: int
    heap_from: int
    pool_ops: int
    price: Floats
    weight: Floats
    expected: Floats
    paid: Floats
    counts: Ints
    tensor: Ints
    value: Floats
    op: Ints
    stack: Ints
    pool: Ints
    pool_score: Floats
    event: Ints
    pair: Ints
