"""Op costs at new input sizes, interpolated from the costs measured at other sizes.

A step with dynamic lengths is captured once per length. From its fourth size on, an op runs once,
because its allocations must be exact, but its time is estimated.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from coop_plan.runtime.op_profile import OpProfile

MIN_SAMPLES = 3
"""Number of sizes at which an op is timed before its time is estimated."""

MAX_EXTRAPOLATION = 2.0
"""Largest ratio of a size to the nearest measured one for which the time is estimated."""

MAX_EXPONENT = 2.0
"""Largest power of the bytes by which a time is extrapolated: attention grows with two."""


class CostHistory:
    """Measured times (µs) of one function's ops, by op name and bytes read.

    `estimates` are profiles with an estimated time, by op signature.
    """

    def __init__(self) -> None:
        self.estimates: dict[object, OpProfile] = {}
        self._samples: dict[str, dict[int, float]] = {}

    def record(self, op: str, size: int, cost_us: float) -> None:
        """Add a measured time of `op` when it read `size` bytes."""
        if size > 0 and cost_us > 0:
            self._samples.setdefault(op, {})[size] = cost_us

    def estimate(self, op: str, size: int) -> float | None:
        """Log-log interpolation through the two nearest sizes; None if the op must be measured."""
        samples = self._samples.get(op, {})
        sizes = sorted(samples)
        if len(sizes) < MIN_SAMPLES:
            return None
        if not sizes[0] / MAX_EXTRAPOLATION <= size <= sizes[-1] * MAX_EXTRAPOLATION:
            return None
        above = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        below = above - 1
        start, end = sizes[below], sizes[above]
        slope = math.log(samples[end] / samples[start]) / math.log(end / start)
        if not start <= size <= end:
            slope = min(max(slope, 0.0), MAX_EXPONENT)
        nearest = start if size < start else end
        return float(samples[nearest] * (size / nearest) ** slope)


_current: ContextVar[CostHistory | None] = ContextVar("costs", default=None)


@contextmanager
def use_costs(costs: CostHistory) -> Iterator[None]:
    """Use `costs` as the cost history of the function that is captured in this context."""
    token = _current.set(costs)
    try:
        yield
    finally:
        _current.reset(token)


def current_costs() -> CostHistory:
    """The cost history of the function that is being captured."""
    return _current.get() or CostHistory()
