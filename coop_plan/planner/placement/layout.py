"""Giving a schedule its addresses: lifetimes in, offsets out."""

from typing import NamedTuple, Protocol

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.schedule import PlacedSchedule, Schedule
from coop_plan.planner.placement import Placement, place

WORK = 20_000_000
"""Effort of `planner.placement.place` for one layout, some 0.07 s."""

WORK_PER_SECOND = 280_000_000
"""About how much of it a second is, for those who have to keep a deadline."""


class HostLayout(NamedTuple):
    """Where the copies of a schedule lie in the host's slab, offload by offload, and its bytes."""

    offsets: Ints
    arena_bytes: int


class Layout(NamedTuple):
    """A schedule with addresses, and what placement knows of them."""

    placed: PlacedSchedule
    placement: Placement


class Lifespans(Protocol):
    """What is placed: when each block begins and ends, and its bytes."""

    @property
    def lower(self) -> Ints: ...
    @property
    def upper(self) -> Ints: ...
    @property
    def size(self) -> Ints: ...


def fit(
    blocks: Lifespans,
    alignment: int,
    capacity: int | None,
    *,
    work: int = WORK,
    order_hint: Ints | None = None,
) -> Placement:
    """A layout of `blocks`; the rest is `place`'s."""
    return place(
        blocks.lower,
        blocks.upper,
        blocks.size,
        capacity=capacity,
        alignment=alignment,
        work=work,
        order_hint=order_hint,
    )


def lay_out(
    schedule: Schedule,
    capacity: int | None = None,
    *,
    work: int = WORK,
    order_hint: Ints | None = None,
) -> Layout:
    """
    Place every buffer and workspace of `schedule`.

    Sizes are exact: the topmost block need not end at a multiple of the alignment. `capacity`
    (bytes) lets placement stop at the first layout that fits it, which it need not reach; `work` is
    `place`'s, 0 for the greedy layouts only, and `order_hint` that of an earlier layout of the same
    schedule.
    """
    blocks = schedule.blocks()
    alignment = schedule.problem.alignment
    placement = fit(blocks, alignment, capacity, work=work, order_hint=order_hint)
    return Layout(schedule.place(placement.offsets, blocks), placement)


def lay_out_host(
    schedule: Schedule, capacity: int | None = None, *, work: int = WORK
) -> HostLayout:
    """
    Place the copies of `schedule` on the host, by the rules of the arena.

    `capacity` (bytes) lets placement stop at the first layout that fits it, which it need not
    reach; `work` is `place`'s.
    """
    copies = schedule.host_copies
    if not copies.size.size:
        return HostLayout(copies.lower, 0)
    placement = fit(copies, schedule.problem.alignment, capacity, work=work)
    return HostLayout(placement.offsets, placement.peak)
