"""State of one offline eviction run, as arrays for compiled code."""

from typing import NamedTuple

from coop_plan.planner.core.arrays import Floats, Ints, IntTable
from coop_plan.planner.core.records import Int32, Record, Table

NEVER = 1 << 40
"""Position of a next use that does not exist."""


class Tensor(Record):
    """A tensor: its score, its next use and its residency.

    A retained tensor is in the list to check, or waits for an evicted tensor that needs it:
    `first_waiting` is the first that waits for a tensor, and `next_waiting` the next that waits for
    the same one (-1: none).
    """

    closure_us: float  # closure cost × weight
    density: float  # closure_us / bytes
    demand: int  # position at which an evicted tensor is needed
    next_use: int  # position
    visited: int  # stamp of the last graph traversal
    slot: Int32  # index in `Arrays.uses` of the next use
    pins: Int32
    list_index: Int32  # in `live`
    first_waiting: Int32
    next_waiting: Int32
    is_live: bool
    is_made: bool  # it was produced before
    is_evictable: bool
    is_dirty: bool  # closure or next use out of date
    is_changed: bool  # in the list `changed`
    is_retained: bool  # though dead
    is_banished: bool  # nothing will ever need it again


class Victim(Record):
    """A tensor of the pool, and its score."""

    score: float
    tensor: int


class Pair(Record):
    """An in-place write of the current op."""

    out: int
    source: int


class Now(Record):
    """Scalars of a run: bytes in use, lengths of the lists, and the last stamp of a traversal."""

    used: int
    events: int
    pairs: int
    changed: int
    to_check: int
    pool: int
    pool_until: int  # last position at which the pool is used
    stamp: int
    pool_has_small: bool


class EvictionState(NamedTuple):
    """Settings, state and record of an eviction run.

    `budget` and `small_bytes` are bytes; tensors below `small_bytes` are evicted last. `power[d]`
    is distance^alpha for a distance of d positions, `weight` a factor per entry of `Arrays.uses`
    and one for tensors without a further use. With `cap` a victim's bytes count up to the missing
    bytes. With `foresee` a closure includes the ops for tensors that will be dead by then.
    `pool_min_live` is that of `EvictionParams`; `pool` holds the best victims of the last scan.

    Per op: `seen` is the stamp of the last traversal. Lists: `order`, the ops to run for the
    current position; `event`, the ops run; `live` tensors, large ones in row 0 and small ones in
    row 1, `live_count` of them; tensors that `changed` since the pool was filled; retained ones
    `to_check`. `stack` is that of graph traversals.
    """

    budget: int
    small_bytes: int
    cap: bool
    foresee: bool
    pool_min_live: int
    power: Floats
    weight: Floats
    now: Now
    tensor: Table[Tensor]
    seen: Ints
    order: Ints
    live: IntTable
    live_count: Ints
    changed: Ints
    to_check: Ints
    stack: Ints
    pool: Table[Victim]
    event: Ints
    pair: Table[Pair]
