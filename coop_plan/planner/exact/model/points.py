"""Where the time-point model looks: the first choice of time points, and how more are chosen."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.keep_all import keep_all_schedule

T = TypeVar("T")


def initial_points(program: Program, capacity: int, count: int) -> list[int]:
    """
    At most `count` ops and the end of the step, in program order.

    Chosen among the ops at which keeping everything exceeds the capacity (bytes): as many groups of
    equal length, and of each group the op with the largest working set.
    """
    over = too_full(program, capacity)
    return [*worst_of_groups(over, count, key=program.touched), program.n]


def too_full(program: Program, capacity: int) -> list[int]:
    """The ops at which keeping everything exceeds the capacity (bytes), in program order."""
    live = keep_all_schedule(program.problem).live_bytes().tolist()
    return [op for op, used in enumerate(live) if used > capacity]


def segment(points: Sequence[int], position: int) -> tuple[int, int]:
    """The segment of a position: it begins after the first and ends with the second one."""
    number = bisect_left(points, position)
    return points[number - 1] if number else -1, points[number]


def groups(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """At most `count` groups of equal length, in order; none is empty."""
    number = min(count, len(items))
    edges = [len(items) * group // number for group in range(number + 1)] if number > 0 else []
    return [items[low:high] for low, high in pairwise(edges)]


def worst_of_groups(items: Sequence[T], count: int, key: Callable[[T], int]) -> list[T]:
    """Of each of at most `count` groups of equal length, in order, the item of the largest key."""
    return [max(group, key=key) for group in groups(items, count)]
