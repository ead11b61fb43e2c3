"""Parameters of the exact methods that more than one caller sets; others are where they are used.

Shares are of the time left, seconds are wall-clock time.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExactParams:
    """Parameters of `optimal`, `auto` and the bounding process."""

    default_seconds: float = 60.0
    """Time limit of a request that sets none, s."""

    seconds_per_op: float = 2e-3
    """Time per op, s, below which `auto` leaves all of it to coop-offline."""

    reorder_seconds: float = 1.0
    """Minimum time for other orders, s, as a bounding process takes part of it to start."""

    first_points: int = 3
    """Time points of the first model; often these suffice."""

    easy_share: float = 0.05
    """A model is hard if not solved within this share of the time left, or `easy_seconds`."""
    easy_seconds: float = 1.0
    """Minimum time before a model counts as hard, s."""

    min_violation: float = 0.02
    """Minimum violation of an added path cut; if negative, satisfied cuts are added, too."""

    first_spread: int = 10
    """Time points of the bounding process's first step; each step doubles them."""


DEFAULTS = ExactParams()
