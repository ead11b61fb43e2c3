"""Independent check of the offsets of buffers with lifetimes, by a sweep over time."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise


def placement_fault(
    lower: Sequence[int],
    upper: Sequence[int],
    size: Sequence[int],
    offset: Sequence[int],
    *,
    alignment: int | Sequence[int] = 1,
    gaps: Iterable[Sequence[int]] = (),
) -> str | None:
    """First fault of a placement, or None; arguments as of `planner.placement.place`.

    Offsets are multiples of their alignments, and no two buffers occupy a byte at the same time.
    """
    windows = defaultdict(list)
    for buffer, *window in gaps:
        windows[int(buffer)].append(tuple(map(int, window)))
    ends: list[tuple[int, tuple[int, int, int]]] = []
    begins: list[tuple[int, tuple[int, int, int]]] = []
    for i, at in enumerate(map(int, offset)):
        unit = alignment if isinstance(alignment, int) else int(alignment[i])
        if at < 0 or at % unit:
            return f"buffer {i} is at {at}, not a multiple of {unit} from 0 up"
        moments = {int(lower[i]), int(upper[i])}
        moments.update(moment for window in windows[i] for moment in window[:2])
        for begin, end in pairwise(sorted(moments)):
            low, high = 0, int(size[i])
            for first, last, *occupied in windows[i]:
                if first <= begin < last:
                    low, high = occupied
            if low < high:
                begins.append((begin, (at + low, at + high, i)))
                ends.append((end, (at + low, at + high, i)))
    ends.sort(reverse=True)
    live: list[tuple[int, int, int]] = []  # by address; disjoint
    for now, block in sorted(begins):
        while ends[-1][0] <= now:
            del live[bisect_left(live, ends.pop()[1])]
        k = bisect_left(live, block)
        for other in live[max(0, k - 1) : k + 1]:
            if other[0] < block[1] and block[0] < other[1]:
                return f"buffers {other[2]} and {block[2]} overlap at time {now}"
        insort(live, block)
    return None
