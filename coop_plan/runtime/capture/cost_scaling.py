"""What the ops of one function cost at sizes not met before, from what they cost at others.

A step whose lengths vary is captured anew for every length. From the fourth size of an op on it
runs to see its allocations, which must be exact, and is not repeated for its time.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from coop_plan.runtime.capture.op_profile import OpProfile

ENOUGH = 3
"""Sizes at which an op must have been timed before its time at another is not measured."""

REACH = 2.0
"""How many times smaller than the smallest, or larger than the largest, of them that may be."""

STEEPEST = 2.0
"""Beyond these sizes a time grows at most with this power of the bytes: attention's with two."""


class Costs:
    """Times in µs by op, as it is known in the function, and by bytes it reads.

    `estimates` are profiles, by signature, of ops whose time was not measured.
    """

    def __init__(self) -> None:
        self.estimates: dict[object, OpProfile] = {}
        self._known: dict[str, dict[int, float]] = {}

    def learn(self, op: str, size: int, cost_us: float) -> None:
        """`op` took this long, measured, when it read `size` bytes."""
        if size > 0 and cost_us > 0:
            self._known.setdefault(op, {})[size] = cost_us

    def expected(self, op: str, size: int) -> float | None:
        """The time on the line, in logarithms, through the two nearest sizes; None: measure it."""
        known = self._known.get(op, {})
        if len(known) < ENOUGH or not min(known) / REACH <= size <= max(known) * REACH:
            return None
        sizes = sorted(known)
        above = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        below = above - 1
        start, end = sizes[below], sizes[above]
        slope = math.log(known[end] / known[start]) / math.log(end / start)
        if not start <= size <= end:
            slope = min(max(slope, 0.0), STEEPEST)
        near = start if size < start else end
        return float(known[near] * (size / near) ** slope)


_of_function: ContextVar[Costs | None] = ContextVar("costs", default=None)


@contextmanager
def known_from(costs: Costs) -> Iterator[None]:
    """While this lasts, ops that are captured are those of the function with these costs."""
    token = _of_function.set(costs)
    try:
        yield
    finally:
        _of_function.reset(token)


def of_function() -> Costs:
    """The costs of the function that is captured."""
    return _of_function.get() or Costs()
