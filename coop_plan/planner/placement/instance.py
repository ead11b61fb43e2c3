"""A placement problem as arrays: lifetimes, sizes and fixed offsets."""

from dataclasses import dataclass

import numpy as np

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.jit import njit
from coop_plan.planner.placement.windows import Pieces, pieces


class FixedOverlapError(ValueError):
    """Two buffers overlap at their fixed offsets."""

    def __init__(self, a: int, b: int) -> None:
        self.buffers = a, b
        super().__init__(f"buffers {a} and {b} overlap at their fixed offsets")


@dataclass(frozen=True)
class Instance:
    """A validated problem. Lifetimes are half-open; most are counted in *sections*.

    A section is a maximal interval of time in which all births precede all deaths. Two buffers
    overlap in time exactly if they share a section, and no coarser grid has that property (Moffitt,
    ASPLOS 2023, section 4 uses the same sets).

    Addresses are counted in *units* of `alignment` bytes, the common divisor of all alignments;
    `height` is the size rounded up to units.
    """

    lower: Ints
    upper: Ints
    """Half-open lifetimes in units of time."""
    first: Ints
    """First section in which each buffer is live."""
    last: Ints
    """The section after the last one of each buffer."""
    height: Ints
    """Units each buffer takes; 0 if it occupies no byte at any time."""
    size: Ints
    """Exact bytes of each buffer."""
    fixed: Ints
    """Fixed offset in units, or -1."""
    sections: int
    alignment: int
    """Bytes per unit."""
    multiple: Ints
    """Units of which each offset is a multiple."""
    pieces: Pieces | None
    """Pieces of the lifetimes, in sections; None without gaps."""

    @property
    def count(self) -> int:
        return len(self.size)

    @property
    def is_plain(self) -> bool:
        """True if buffers are rectangles at any unit, without fixed offsets."""
        anywhere = bool((self.fixed < 0).all() and (self.multiple == 1).all())
        return anywhere and self.pieces is None

    def peak(self, offsets: Ints) -> int:
        """Exact end in bytes of a placement given in units."""
        return int((offsets * self.alignment + self.size).max(initial=0))


def sections(lower: Ints, upper: Ints) -> tuple[Ints, Ints, int]:
    """Lifetimes in sections, from half-open time intervals: (first, last, number of sections)."""
    times = np.unique(np.concatenate([lower, upper]))
    born = np.searchsorted(times, lower)
    dead = np.searchsorted(times, upper)
    births = np.zeros(len(times) + 1, np.int64)
    births[born + 1] = 1
    births = births.cumsum()  # births[k]: birth times among the first k
    deaths = np.unique(dead)
    # A section closes at a death time if a birth precedes it since the death time before.
    previous = np.concatenate([np.zeros(1, np.int64), deaths[:-1]])[: len(deaths)]
    closes = np.zeros(len(times), np.int64)
    closes[deaths] = births[deaths] > births[previous]
    section = closes.cumsum()
    return section[born], section[dead], int(closes.sum())


def build(
    lower: Ints,
    upper: Ints,
    size: Ints,
    alignment: int | Ints,
    fixed: Ints | None = None,
    gaps: Ints | None = None,
) -> Instance:
    """Check the arguments of `place` and convert them; raises ValueError with the bad argument."""
    count = len(size)
    if lower.shape != (count,) or upper.shape != (count,) or size.shape != (count,):
        raise ValueError("lower, upper and size must be vectors of equal length")
    if (size < 0).any():
        raise ValueError(f"buffer {int(np.argmin(size))} has a negative size")
    if (lower >= upper).any():
        raise ValueError(f"buffer {int(np.argmax(lower >= upper))} has an empty lifetime")
    each = np.asarray(alignment, np.int64)
    if each.shape not in ((), (count,)):
        raise ValueError(f"alignment must be one number or one per buffer: {count}")
    if (each < 1).any():
        raise ValueError(f"alignment must be at least 1, not {each.min()}")
    unit = int(np.gcd.reduce(each.ravel())) or 1
    multiple = np.broadcast_to(each // unit, count).astype(np.int64)
    given = np.full(count, -1, np.int64) if fixed is None else fixed
    if given.shape != (count,):
        raise ValueError(f"fixed must have one entry per buffer: {count}, not {len(given)}")
    if (given < -1).any():
        raise ValueError("a fixed offset must be at least 0, or -1 for none")
    if ((given >= 0) & (given % each != 0)).any():
        raise ValueError("a fixed offset must be a multiple of the alignment")
    height = -(-size // unit)
    parts = None
    if gaps is None or not len(gaps):
        first, last, total = sections(lower, upper)
    else:
        parts = pieces(lower, upper, size, gaps)
        begin, end, total = sections(parts.first, parts.last)
        parts = parts._replace(first=begin, last=end)
        solid = parts.start[1:] > parts.start[:-1]
        height[~solid] = 0
        first, last = np.zeros((2, count), np.int64)
        first[solid] = begin[parts.start[:-1][solid]]
        last[solid] = end[parts.start[1:][solid] - 1]
    instance = Instance(
        lower=lower,
        upper=upper,
        first=first,
        last=last,
        height=height,
        size=size,
        fixed=np.where(given >= 0, given // unit, -1),
        sections=total,
        alignment=unit,
        multiple=multiple,
        pieces=parts,
    )
    a, b = _clash_of(instance)
    if a >= 0:
        raise FixedOverlapError(a, b)
    return instance


def _clash_of(instance: Instance) -> tuple[int, int]:
    """Two buffers that overlap at their fixed offsets, or (-1, -1)."""
    parts = instance.pieces
    if parts is None:
        return _fixed_clash(instance.first, instance.last, instance.fixed, instance.height)
    # Pieces as buffers of their own. Those of one buffer share no section.
    owner = np.repeat(np.arange(instance.count), np.diff(parts.start))
    bottom = instance.fixed[owner] * instance.alignment + parts.low
    bottom[instance.fixed[owner] < 0] = -1
    p, q = _fixed_clash(parts.first, parts.last, bottom, parts.high - parts.low)
    return (int(owner[p]), int(owner[q])) if p >= 0 else (p, q)


@njit
def _fixed_clash(first: Ints, last: Ints, fixed: Ints, height: Ints) -> tuple[int, int]:
    """Two buffers that overlap at their fixed offsets, or (-1, -1)."""
    placed = np.flatnonzero((fixed >= 0) & (height > 0))
    placed = placed[np.argsort(fixed[placed], kind="mergesort")]
    for p in range(len(placed)):
        i = placed[p]
        for q in range(p + 1, len(placed)):
            j = placed[q]
            if fixed[j] >= fixed[i] + height[i]:
                break
            if first[i] < last[j] and first[j] < last[i]:
                return min(i, j), max(i, j)
    return -1, -1
