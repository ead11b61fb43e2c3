"""Temporaries of an update in the free bytes of an idle arena on CUDA (`loans.py`).

`coop-plan fit` counts here as the runtime allocates, without PyTorch.
"""

import itertools
from collections.abc import Sequence

Changes = Sequence[int]
"""Allocations, as their bytes, and frees, as -1 - the number of an allocation, in order."""


def arena_for_loans(gradients: Sequence[int]) -> int:
    """Bytes of an arena that holds gradients of these bytes, and the temporaries of their update.

    A foreach update of AdamW makes a copy of all parameters, a plain one two of each in turn.
    """
    return sum(gradients) + max(sum(gradients), 2 * max(gradients, default=0))


def beyond(changes: Changes, gap: int) -> int:
    """Peak of the bytes that first fit cannot place in one gap of so many bytes."""
    return _placed(changes, gap)[1]


def gap_for(changes: Changes) -> int:
    """Bytes of a gap that holds all by first fit."""
    return _placed(changes, sum(size for size in changes if size > 0))[0]


def peak(changes: Changes) -> int:
    """The largest bytes at any moment."""
    sizes = [size for size in changes if size >= 0]
    now = (change if change >= 0 else -sizes[-1 - change] for change in changes)
    return max(itertools.accumulate(now), default=0)


def _placed(changes: Changes, gap: int) -> tuple[int, int]:
    """The highest end of a placed allocation, and the peak of the bytes that are not placed."""
    free = [(0, gap)]
    given: list[tuple[int, int] | None] = []
    sizes: list[int] = []
    end = outside = most = 0
    for change in changes:
        if change < 0:
            place, size = given[-1 - change], sizes[-1 - change]
            if place is None:
                outside -= size
            else:
                free = _merged(sorted([*free, place]))
            continue
        sizes.append(change)
        fit = next((i for i, (a, b) in enumerate(free) if b - a >= change), None)
        if fit is None:
            given.append(None)
            outside += change
            most = max(most, outside)
            continue
        begin, limit = free[fit]
        given.append((begin, begin + change))
        free[fit : fit + 1] = [(begin + change, limit)] if begin + change < limit else []
        end = max(end, begin + change)
    return end, most


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found = ranges[:1]
    for begin, end in ranges[1:]:
        if found[-1][1] == begin:
            found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return found
