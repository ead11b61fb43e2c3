"""State of one offline eviction run, as arrays for compiled code."""

from typing import NamedTuple

from coop_plan.planner.core.arrays import Floats, Ints

NEVER = 1 << 40
"""Position of a next use that does not exist."""

# Entries of `EvictionState.counts`: bytes in use; events; in-place writes of the current op; last
# stamp of a graph traversal; lengths of the lists; last position at which the pool is used; length
# of TO_CHECK; whether the pool has small tensors; whether the heap is used.
(
    USED,
    EVENTS,
    WRITES,
    STAMP,
    LARGE_COUNT,
    SMALL_COUNT,
    DIRTY_COUNT,
    POOL_COUNT,
    POOL_UNTIL,
    CHECK_COUNT,
    POOL_SMALL,
    HEAP_ACTIVE,
    HEAP_COUNT,
) = range(13)

# Rows of `EvictionState.tensor`: live; produced before; pins; evictable; index in `Arrays.uses` of
# the next use; position at which an evicted tensor is needed; closure or next use out of date;
# position of the next use; index in LARGE or SMALL; retained though dead; in DIRTY_LIST; stamp of
# the last traversal. Lists of tensors: live ones from `small` bytes on, and smaller ones; those
# that changed since the pool was filled or the heap updated; the heap (`score_heap`), with each
# tensor's index in it; those popped from the heap in a scan. A retained tensor is in the list to
# check, or waits for an evicted tensor that needs it: the first that waits for a tensor, and the
# next that waits for the same one (-1: none). Banished: nothing will ever need it again.
(
    LIVE,
    MADE,
    PINS,
    EVICTABLE,
    SLOT,
    DEMAND,
    DIRTY,
    NEXT_USE,
    LIST_INDEX,
    RETAINED,
    IN_DIRTY_LIST,
    VISITED,
    LARGE,
    SMALL,
    DIRTY_LIST,
    HEAP,
    HEAP_INDEX,
    SET_ASIDE,
    TO_CHECK,
    FIRST_WAITING,
    NEXT_WAITING,
    BANISHED,
) = range(22)

# Rows of `EvictionState.value`: closure cost × weight / bytes; closure cost × weight, µs; score of
# the tensor in the heap.
DENSITY, CLOSURE, KEY = range(3)

# Rows of `EvictionState.op`: stamp of the last traversal; ops to run for the current position.
SEEN, ORDER = range(2)

# Rows of `EvictionState.pair`, the in-place writes of the current op.
INPLACE_OUT, INPLACE_SOURCE = range(2)


class EvictionState(NamedTuple):
    """
    Settings, state and record of an eviction run.

    `budget` and `small` are bytes; tensors below `small` bytes are evicted last. `price` is a
    prefix sum over program positions, `weight` a factor per entry of `Arrays.uses` and one for
    tensors without a further use. With `cap` a victim's bytes count up to the missing bytes. With
    `foresee` a closure includes the ops for tensors that will be dead by then. The six fields
    after `foresee` are those of `EvictionParams`. `pool` holds the best victims of the last scan.
    `expected` and `paid` are those of `planner.heuristic.eviction_run.Record`.
    """

    budget: int
    small: int
    alpha: float
    cap: bool
    foresee: bool
    least_distance: float
    closure_ops: int
    unneeded_ancestors: int
    pool_min_live: int
    heap_min_live: int
    pool_max_age: int
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
