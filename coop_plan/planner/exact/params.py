"""Parameters of the exact methods that more than one caller sets.

The annotated type of a field is its valid range, checked on construction. Other numbers are where
they are used: shares are of the time left, seconds are wall-clock time.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from coop_plan.planner.core.params import Count, Params, Seconds, Share, Within


@dataclass(frozen=True)
class ExactParams(Params):
    """Parameters of `optimal`, `auto` and the bounding process."""

    default_seconds: Seconds = 60.0
    """Time limit of a request that sets none, s."""

    seconds_per_op: Seconds = 2e-3
    """Time per op, s, below which `auto` leaves all of it to coop-offline."""

    reorder_seconds: Seconds = 1.0
    """Minimum time for other orders, s, as a bounding process takes part of it to start."""

    first_points: Count = 3
    """Time points of the first model; often these suffice."""

    easy_share: Share = 0.05
    """A model is hard if not solved within this share of the time left, or `easy_seconds`."""
    easy_seconds: Seconds = 1.0
    """Minimum time before a model counts as hard, s."""

    min_violation: Annotated[float, Within(-math.inf, 1.0)] = 0.02
    """Minimum violation of an added path cut; if negative, satisfied cuts are added, too."""

    first_spread: Count = 10
    """Time points of the bounding process's first step; each step doubles them."""


DEFAULTS = ExactParams()
