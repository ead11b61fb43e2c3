"""`place`, the entry point of offset placement."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.kernels import PLACEMENT, compile_modules
from coop_plan.planner.placement.bound import lower_bound
from coop_plan.planner.placement.canonical import FOUND, IMPOSSIBLE
from coop_plan.planner.placement.descend import descend
from coop_plan.planner.placement.greedy import placements, simple_count
from coop_plan.planner.placement.instance import Instance, build
from coop_plan.planner.placement.restarts import Effort, components, fit


@dataclass(frozen=True)
class Placement:
    """Offsets of all buffers, with their peak and bound."""

    offsets: Ints
    """Bytes from the start of the arena, multiples of the alignment."""
    peak: int
    """Largest offset + size in bytes, exact."""
    lower_bound: int
    """Proved lower bound on the peak of every placement, bytes."""
    optimal: bool
    """The peak is proved to be the smallest possible."""
    fits: bool | None
    """True if the peak is within the capacity; None without a capacity."""
    proved_impossible: bool
    """No placement within the capacity exists."""
    order: Ints
    """Buffers by offset. As `order_hint`, also for a subset of the buffers, it gives a peak that is
    not higher; in an instance with gaps that is likely, not certain.
    """
    seconds: float
    """Wall-clock time spent."""


def place(
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    size: npt.ArrayLike,
    *,
    capacity: int | None = None,
    alignment: npt.ArrayLike = 1,
    gaps: npt.ArrayLike | None = None,
    fixed: npt.ArrayLike | None = None,
    time_limit: float | None = None,
    seed: int = 0,
    order_hint: npt.ArrayLike | None = None,
    work: int | None = None,
) -> Placement:
    """Give every buffer an offset so that no two overlap in both time and address.

    Lifetimes are half-open, [lower, upper), in any unit; sizes, offsets and the capacity are bytes;
    offsets are multiples of `alignment`, one number or one per buffer. Without a capacity the arena
    is minimised; with one, the first placement within it is returned. Greedy placements are
    followed by a bounded exact search.

    - `gaps`: rows (buffer, lower, upper, low, high). In [lower, upper) the buffer occupies only its
      bytes [low, high); low = high: none. Its last byte still ends within the peak.
    - `fixed`: given offsets, -1 for none.
    - `time_limit`: seconds of wall clock. The result is deterministic unless the limit is reached.
    - `work`: limit of the exact search, and of best fit and first fit by size, area, lifetime and
      birth, without a time limit: in visits of buffers of about 3.5 ns each; the result is
      deterministic. 0 takes a few greedy placements only, None 300 million (about 1 s).
    - `order_hint`: `order` of an earlier `Placement`, to start from it.

    Raises:
        ValueError: invalid or contradictory arguments.
        FixedOverlapError: two buffers overlap at their fixed offsets.
    """
    compile_modules(PLACEMENT)
    scans = 3_000_000_000 if work is None else work  # 10 s
    work = 300_000_000 if work is None else work
    began = time.perf_counter()
    instance = build(
        _ints(lower),
        _ints(upper),
        _ints(size),
        np.asarray(alignment, np.int64),
        None if fixed is None else _ints(fixed),
        None if gaps is None else _ints(gaps).reshape(-1, 5),
    )
    bound = lower_bound(instance)
    goal = bound if capacity is None else max(bound, capacity)
    deadline = None if time_limit is None else began + time_limit
    hint = None if order_hint is None else _ints(order_hint)
    if time_limit is not None:
        scans = int(time_limit / 3.5e-9)
    small = instance.count <= 4_000  # enough for an exact search
    passes = _passes(instance.count, small, work > 0, deadline is not None)
    passes += 2 * simple_count(instance.count, scans)
    candidates = placements(instance, hint, goal, seed, scans)
    best, peak = _greedy(instance, candidates, goal, passes, deadline)
    effort = Effort(work if deadline is None else sys.maxsize, deadline)
    if work and peak > goal and small:
        found, bound = _search(instance, bound, capacity, peak, effort, seed)
        if found is not None:
            best, peak = found, instance.peak(found)
    return Placement(
        offsets=best * instance.alignment,
        peak=peak,
        lower_bound=bound,
        optimal=peak <= bound,
        fits=None if capacity is None else peak <= capacity,
        proved_impossible=capacity is not None and bound > capacity,
        # Buffers below another one precede it, so dropping them in this order raises none.
        order=np.argsort(best, kind="stable"),
        seconds=time.perf_counter() - began,
    )


def _passes(count: int, small: bool, search: bool, limited: bool) -> int:
    """Number of greedy passes."""
    if not search:
        return 16
    if count <= 500:  # the exact search is better than further passes
        return 40
    if limited and not small:
        return sys.maxsize  # no search follows: passes until the time limit
    return max(40, (4_000_000 if limited else 200_000) // count)  # 2 s, 0.1 s


def _greedy(
    instance: Instance, candidates: Iterator[Ints], goal: int, passes: int, deadline: float | None
) -> tuple[Ints, int]:
    """The first of `passes` candidates within `goal` bytes, else the best one; and its peak."""
    best = np.zeros(instance.count, np.int64)
    if instance.count == 0:
        return best, 0
    peak = -1
    for number, offsets in enumerate(candidates, start=1):
        if peak < 0 or instance.peak(offsets) < peak:
            best, peak = offsets, instance.peak(offsets)
        late = deadline is not None and time.perf_counter() >= deadline
        if peak <= goal or late or number == passes:
            break
    return best, peak


def _search(
    instance: Instance,
    bound: int,
    capacity: int | None,
    peak: int,
    effort: Effort,
    seed: int,
) -> tuple[Ints | None, int]:
    """A placement within the capacity (without one, below `peak`) or None, and the raised bound."""
    parts = components(instance, seed)
    if parts is None or (capacity is not None and bound > capacity):
        return None, bound
    if capacity is None:
        raised, found = descend(instance, parts, bound, peak, effort)
    else:
        answer, offsets = fit(instance, parts, capacity, effort)
        found = offsets if answer == FOUND else None
        raised = capacity + 1 if answer == IMPOSSIBLE else bound
    is_proof = all(part.is_complete for part in parts)
    return found, max(bound, raised) if is_proof else bound


def _ints(values: npt.ArrayLike) -> Ints:
    return np.ascontiguousarray(values, dtype=np.int64)
