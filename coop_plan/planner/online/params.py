"""The parameters of the online methods; the type of a field is its range."""

from dataclasses import dataclass

from coop_plan.planner.core.params import Count, Params, Positive, Share, Size


@dataclass(frozen=True)
class OnlineParams(Params):
    """Parameters that the papers of `coop`, `dtr` and `dte` leave open."""

    min_staleness_us: Positive = 1e-3
    """A tensor touched just now has no staleness; this keeps its cost finite. µs."""

    max_recomputes_per_op: Size = 30
    """More recomputed ops than this many times the program is thrashing, and counts as no fit."""

    first_record: Count = 4
    """
    Events that the record has room for at first, as a factor on the program's ops.

    A run that outgrows it is made again with twice the room.
    """

    ahead_share: Share = 0.1
    """
    Share of the arena that `delta` and `swap-only` keep free or on its way to the host.

    It is for copies that overlap with what runs.
    """

    prefetched: Count = 2
    """Tensors that `delta` and `swap-only` fetch ahead at a time."""

    chunk_ops: Count = 256
    """Ops between two looks at the clock."""


DEFAULTS = OnlineParams()
