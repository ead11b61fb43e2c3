"""Placement of a schedule's buffers in the arena, and of its host copies in the slab."""

from typing import NamedTuple, Protocol

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.schedule import PlacedSchedule, Schedule
from coop_plan.planner.placement import Placement, place

WORK = 20_000_000
"""Work of `planner.placement.place` for one layout, about 0.07 s."""


class Layout(NamedTuple):
    """A schedule with addresses, and the placement that gave them."""

    placed: PlacedSchedule
    placement: Placement


class Lifespans(Protocol):
    """Blocks to place: half-open lifetimes and bytes."""

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
) -> Placement:
    """Placement of `blocks`; see `place` for the parameters."""
    return place(
        blocks.lower,
        blocks.upper,
        blocks.size,
        capacity=capacity,
        alignment=alignment,
        work=work,
    )


def lay_out(
    schedule: Schedule,
    capacity: int | None = None,
    *,
    work: int = WORK,
) -> Layout:
    """Place every buffer and workspace of `schedule`.

    Sizes are exact: the topmost block need not end at a multiple of the alignment. With `capacity`
    (bytes) placement stops at the first layout that fits; the result may still exceed it. `work` is
    `place`'s, 0 for greedy layouts only.
    """
    blocks = schedule.blocks()
    alignment = schedule.problem.alignment
    placement = fit(blocks, alignment, capacity, work=work)
    return Layout(schedule.place(placement.offsets, blocks), placement)


def lay_out_host(schedule: Schedule, capacity: int | None = None) -> Placement:
    """Place the host copies of `schedule`, one per offload, in one slab, by the arena's rules."""
    return fit(schedule.host_copies, schedule.problem.alignment, capacity)
