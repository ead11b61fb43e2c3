"""Parameters of the online methods; the type of a field is its valid range."""

from dataclasses import dataclass

from coop_plan.planner.core.params import Count, Params, Positive, Share, Size


@dataclass(frozen=True)
class OnlineParams(Params):
    """Parameters that the papers of the online methods leave open."""

    min_staleness_us: Positive = 1e-3
    """Lower bound on the staleness of a tensor in a score, µs."""

    max_recomputes_per_op: Size = 30
    """Most recomputes, as a multiple of the program's ops; beyond, the run does not fit."""

    first_record: Count = 4
    """Initial length of a run's record, in lengths of the program; it doubles when full."""

    reserve_share: Share = 0.1
    """Share of the arena that `delta` and `swap-only` keep free, or being offloaded."""

    max_prefetches: Count = 2
    """Most tensors that `delta` and `swap-only` prefetch at a time."""

    chunk_ops: Count = 256
    """Ops between two checks of the time limit."""


DEFAULTS = OnlineParams()
