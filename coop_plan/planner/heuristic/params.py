"""Parameters of coop-offline that more than one caller sets; others are where they are used."""

from dataclasses import dataclass

Rule = tuple[float, bool, bool]
"""Scoring rule: exponent alpha of the distance, `cap` and `foresee` (see `EvictionState`)."""


@dataclass(frozen=True)
class EvictionParams:
    """Offline eviction kernel (`planner.heuristic.eviction`)."""

    pool_size: int = 64
    """Most victims that one scan of the live tensors selects."""

    pool_min_live: int = 512
    """Least number of live tensors for which a scan's victims are kept for later evictions."""

    chunk_events: int = 4096
    """Events between two checks of the time limit."""


@dataclass(frozen=True)
class CoopOfflineParams:
    """Parameters of coop-offline."""

    eviction: EvictionParams = EvictionParams()

    rules: tuple[Rule, ...] = tuple(
        (alpha, cap, foresee)
        for foresee in (False, True)
        for alpha in (1 / 16, 0.25, 0.5, 1.0, 2.0)
        for cap in (False, True)
    )
    """Scoring rules to try; `foresee` helps where an eviction extends its inputs' lifetimes."""

    annealing_effort: float = 1.37e7
    """Most steps of an annealing without a time limit, times the square root of its events."""

    annealings: int = 3
    """Most annealings of the sequence within a time limit: results differ by seed."""

    annealing_seconds_per_event: float = 1e-3
    """Least time of each of several annealings, s per event."""

    coop_ops: int = 300
    """Ops up to which Coop's own run is made although another run fits."""


DEFAULTS = CoopOfflineParams()
