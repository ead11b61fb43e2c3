"""Giving a schedule its addresses: lifetimes in, offsets out."""

import numpy as np

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.placement import Placement, place

WORK = 20_000_000
"""Effort of `planner.placement.place` for one layout, some 0.07 s."""

WORK_PER_SECOND = 280_000_000
"""About how much of it a second is, for those who have to keep a deadline."""


def lay_out(
    schedule: Schedule,
    capacity: int | None = None,
    *,
    work: int = WORK,
    order_hint: Ints | None = None,
) -> Placement:
    """
    Place every buffer and workspace of `schedule`; fills its offsets.

    Sizes are exact: the topmost block need not end at a multiple of the alignment. Time is the
    event number. Buffers that share an address in place are one block over their joint lifetime; a
    workspace is a block of one event. `capacity` (bytes) lets placement stop at the first layout
    that fits it; `work` is `place`'s, 0 for the greedy layouts only, and `order_hint` that of an
    earlier layout of the same schedule.
    """
    problem = schedule.problem
    count = len(schedule.tensor)
    block = list(range(count))
    lower = list(schedule.first)
    upper = [event + 1 for event in schedule.last]
    size = [problem.bytes[t] for t in schedule.tensor]
    for buffer, source in enumerate(schedule.shares):  # a source is always an earlier buffer
        if source >= 0:
            root = block[source]
            block[buffer] = root
            upper[root] = max(upper[root], upper[buffer])
            size[buffer] = 0
            upper[buffer] = lower[buffer] + 1
    scratch = [(e, problem.graph.ops[op].workspace_bytes) for e, op in enumerate(schedule.ops)]
    scratch = [(e, need) for e, need in scratch if need]
    placement = place(
        np.array(lower + [e for e, _ in scratch], dtype=np.int64),
        np.array(upper + [e + 1 for e, _ in scratch], dtype=np.int64),
        np.array(size + [need for _, need in scratch], dtype=np.int64),
        capacity=capacity,
        alignment=problem.alignment,
        work=work,
        order_hint=order_hint,
    )
    assign(schedule, placement.offsets)
    return placement


def assign(schedule: Schedule, offsets: Ints) -> None:
    """
    Fill the schedule's offsets (bytes): one per buffer, then one per event with a workspace.

    Of buffers that share an address in place, the first one's counts.
    """
    problem = schedule.problem
    found = offsets.tolist()
    schedule.offset = []
    for buffer, source in enumerate(schedule.shares):
        schedule.offset.append(found[buffer] if source < 0 else schedule.offset[source])
    scratch = iter(found[len(schedule.shares) :])
    schedule.workspace_offset = [
        next(scratch) if problem.workspace[op] else 0 for op in schedule.ops
    ]
