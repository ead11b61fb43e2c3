"""Giving a schedule its addresses: lifetimes in, offsets out."""

import numpy as np

from planner.placement import Placement, place
from planner.schedule import Schedule


def lay_out(schedule: Schedule, capacity: int | None = None) -> Placement:
    """
    Place every buffer and workspace of `schedule`; fills its offsets.

    Time is the event number. Buffers that share an address in place are one block over their joint
    lifetime; a workspace is a block of one event. `capacity` (bytes) lets placement stop at the
    first layout that fits it.
    """
    problem = schedule.problem
    count = len(schedule.tensor)
    block = list(range(count))
    lower = list(schedule.first)
    upper = [event + 1 for event in schedule.last]
    size = [problem.size[t] for t in schedule.tensor]
    for buffer, source in enumerate(schedule.shares):  # a source is always an earlier buffer
        if source >= 0:
            root = block[source]
            block[buffer] = root
            upper[root] = max(upper[root], upper[buffer])
            size[buffer] = 0
            upper[buffer] = lower[buffer] + 1
    scratch = [(e, problem.workspace[op]) for e, op in enumerate(schedule.ops)]
    scratch = [(e, need) for e, need in scratch if need]
    placement = place(
        np.array(lower + [e for e, _ in scratch], dtype=np.int64),
        np.array(upper + [e + 1 for e, _ in scratch], dtype=np.int64),
        np.array(size + [need for _, need in scratch], dtype=np.int64),
        capacity=capacity,
        alignment=problem.alignment,
    )
    offsets = placement.offsets.tolist()
    schedule.offset = [offsets[block[buffer]] for buffer in range(count)]
    schedule.workspace_offset = [0] * len(schedule.ops)
    for (event, _), offset in zip(scratch, offsets[count:], strict=True):
        schedule.workspace_offset[event] = offset
    return placement
