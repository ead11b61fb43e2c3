"""`place`: the one entry to offset placement."""

import functools
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coop_plan.planner.placement.bound import lower_bound
from coop_plan.planner.placement.canonical import FOUND, IMPOSSIBLE
from coop_plan.planner.placement.descend import descend
from coop_plan.planner.placement.instance import Instance, Ints, Pairs, build
from coop_plan.planner.placement.portfolio import placements
from coop_plan.planner.placement.search import Effort, components, fit

PASSES = 40
"""Greedy placements tried before the search, at least; instances beyond its reach get more."""

SMALL = 500
"""Up to so many buffers the search is worth more than further greedy placements."""

PASS_WORK, LONG_PASS_WORK = 200_000, 4_000_000
"""Larger ones: passes times buffers, without and with a time limit (some 0.1 s and 2 s)."""

QUICK_PASSES = 16
"""Greedy placements where no search follows."""

MAX_SEARCHED = 4_000
"""Instances of more buffers get no exact search."""

DEFAULT_WORK = 300_000_000
"""Looks at live buffers, some 1 s: the search's effort where no time limit is given."""

UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Placement:
    """Where each buffer lies, and what is known about how good that is."""

    offsets: Ints
    """Bytes from the start of the arena, a multiple of the alignment."""
    peak: int
    """Largest offset + size in bytes, exact."""
    lower_bound: int
    """Bytes no placement can go below (proved)."""
    optimal: bool
    """The peak is proved to be the smallest possible."""
    fits: bool | None
    """Whether the peak is within the capacity; None without a capacity."""
    proved_impossible: bool
    """No placement within the capacity exists."""
    order: Ints
    """
    Buffers by offset. As `order_hint` it gives a peak no higher, also to a part of the buffers; in
    an instance with in-place pairs that is likely, not certain.
    """
    seconds: float
    """Wall clock spent."""


def place(
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    size: npt.ArrayLike,
    *,
    capacity: int | None = None,
    alignment: int = 1,
    fixed: npt.ArrayLike | None = None,
    alias: Pairs | None = None,
    conflicts: Pairs | None = None,
    time_limit: float | None = None,
    seed: int = 0,
    order_hint: npt.ArrayLike | None = None,
    work: int = DEFAULT_WORK,
) -> Placement:
    """
    Give every buffer an offset so that no two overlap in time and address at once.

    Lifetimes are half-open, [lower, upper), in any unit; sizes, offsets and the capacity in bytes;
    offsets are multiples of `alignment`. Without a capacity the arena is minimised; with one, the
    first placement within it is taken. Greedy placements come first, then a bounded exact search.

    - `fixed`: offsets given beforehand, -1 for none.
    - `alias`: pairs that may lie at one common offset although both live (in-place results).
    - `conflicts`: pairs kept apart in address although their lifetimes do not overlap.
    - `time_limit`: seconds of wall clock; without it the effort is small and the answer the same at
      every call. With it, too, unless the limit was reached.
    - `work`: effort of the search without a time limit, in looks at live buffers of some 3.5 ns;
      the answer is then deterministic. 0 leaves it at a few greedy placements.
    - `order_hint`: buffers in the order of an earlier `Placement`, to start from it.

    ValueError: arguments that contradict each other or themselves.
    """
    if time_limit is not None:
        _warm_up()
    began = time.perf_counter()
    instance = build(
        _ints(lower),
        _ints(upper),
        _ints(size),
        alignment,
        None if fixed is None else _ints(fixed),
        alias,
        conflicts,
    )
    bound = lower_bound(instance)
    goal = bound if capacity is None else max(bound, capacity)
    deadline = None if time_limit is None else began + time_limit
    hint = None if order_hint is None else _ints(order_hint)
    passes = _passes(instance.count, work > 0, deadline is not None)
    best, peak = _greedy(instance, hint, goal, passes, deadline, seed)
    effort = Effort(work if deadline is None else UNLIMITED, deadline)
    if work and peak > goal and instance.count <= MAX_SEARCHED:
        found, bound = _search(instance, bound, capacity, peak, effort, seed)
        if found is not None:
            best, peak = found, instance.peak(found)
    return Placement(
        offsets=best * alignment,
        peak=peak,
        lower_bound=bound,
        optimal=peak <= bound,
        fits=None if capacity is None else peak <= capacity,
        proved_impossible=capacity is not None and bound > capacity,
        # What lies below a buffer comes before it, so dropping them in this order raises none.
        order=np.argsort(best, kind="stable"),
        seconds=time.perf_counter() - began,
    )


def _passes(count: int, search: bool, limited: bool) -> int:
    """How many greedy placements to try."""
    if not search:
        return QUICK_PASSES
    if count <= SMALL:
        return PASSES
    if limited and count > MAX_SEARCHED:
        return UNLIMITED  # nothing follows: all that the time limit allows
    return max(PASSES, (LONG_PASS_WORK if limited else PASS_WORK) // count)


def _greedy(
    instance: Instance, hint: Ints | None, goal: int, passes: int, deadline: float | None, seed: int
) -> tuple[Ints, int]:
    """The first of so many greedy placements within `goal` bytes, or the best; and its peak."""
    best = np.zeros(instance.count, np.int64)
    if instance.count == 0:
        return best, 0
    peak = -1
    for number, offsets in enumerate(placements(instance, hint, goal, seed), start=1):
        if peak < 0 or instance.peak(offsets) < peak:
            best, peak = offsets, instance.peak(offsets)
        late = deadline is not None and time.perf_counter() >= deadline
        if peak <= goal or late or number == passes:
            break
    return best, peak


def _search(
    instance: Instance, bound: int, capacity: int | None, peak: int, effort: Effort, seed: int
) -> tuple[Ints | None, int]:
    """A placement that fits the capacity, or a lower one; and the bound as far as it was raised."""
    parts = components(instance, seed)
    if parts is None or (capacity is not None and bound > capacity):
        return None, bound
    if capacity is None:
        raised, found = descend(instance, parts, bound, peak, effort)
    else:
        answer, offsets = fit(instance, parts, capacity, effort)
        found = offsets if answer == FOUND else None
        raised = capacity + 1 if answer == IMPOSSIBLE else bound
    # The search keeps in-place pairs apart, so with such pairs it proves nothing.
    return found, bound if len(instance.alias) else max(bound, raised)


@functools.cache
def _warm_up() -> None:
    """Have the kernels compiled (once on a machine, some 20 s): before a clock starts."""
    one = np.ones(1, np.int64)
    tiny = build(one - 1, one, one, 1, None, None, None)
    for _ in zip(range(14), placements(tiny, one - 1, 1, 0), strict=False):
        pass
    parts = components(tiny, 0)
    assert parts is not None
    fit(tiny, parts, 1, Effort(1))


def _ints(values: npt.ArrayLike) -> Ints:
    return np.ascontiguousarray(values, dtype=np.int64)
