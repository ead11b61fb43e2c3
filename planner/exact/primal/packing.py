"""A layout for one schedule within an arena: by placement, or else by constraint programming."""

import time
from dataclasses import dataclass

import numpy as np

from coop_plan.planner.core.assemble import arena_bytes
from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.exact.primal.live import Blocks, live_bytes
from coop_plan.planner.exact.solver.process import SolverProcess
from coop_plan.planner.layout import WORK, lay_out

PACK_SECONDS = 5.0
"""How long the solver may look for a layout of one schedule."""

MAX_BLOCKS = 1500
"""Beyond so many blocks that share memory over time the model is not worth building."""


def pack(process: SolverProcess, schedule: Schedule, arena: int, deadline: float) -> bool:
    """
    Give the schedule offsets within the arena (bytes) by CP-SAT's NoOverlap2D; whether it did.

    `deadline` is a `time.monotonic` value, s.
    """
    blocks = Blocks.of(schedule)
    if len(blocks.size) > MAX_BLOCKS:
        return False
    unit = schedule.problem.alignment
    offsets = process.pack(
        blocks.lower.tolist(),
        blocks.upper.tolist(),
        (blocks.size // unit).tolist(),
        blocks.same,
        # The last block may end short of its rounded size.
        -(-arena // unit),
        deadline,
    )
    if offsets is None:
        return False
    count = len(schedule.tensor)
    schedule.offset = [offset * unit for offset in offsets[:count]]
    schedule.workspace_offset = [0] * len(schedule.ops)
    for event, offset in zip(blocks.scratch, offsets[count:], strict=True):
        schedule.workspace_offset[event] = offset * unit
    return True


@dataclass(frozen=True)
class Crowded:
    """An event at which a layout needs more than the arena, by `excess` bytes."""

    event: int
    excess: int


def place_or_tell(schedule: Schedule, arena: int, work: int = WORK) -> Crowded | None:
    """
    Lay the schedule out within the arena (bytes) by `lay_out` with that work.

    Where that fails, the fullest event of the block that ends highest; then there are no offsets.
    """
    lay_out(schedule, arena, work=work)
    if arena_bytes(schedule) <= arena:
        return None
    assert schedule.offset is not None
    assert schedule.workspace_offset is not None
    blocks = Blocks.of(schedule)
    offsets = schedule.offset + [schedule.workspace_offset[event] for event in blocks.scratch]
    schedule.offset = schedule.workspace_offset = None
    ends = np.array(offsets) + blocks.size
    worst = int(ends.argmax())
    first = (schedule.first + blocks.scratch)[worst]
    last = (schedule.last + blocks.scratch)[worst]
    live = blocks.live(len(schedule.ops))[first : last + 1]
    return Crowded(first + int(live.argmax()), int(ends[worst]) - arena)


def place_or_pack(process: SolverProcess, schedule: Schedule, arena: int, deadline: float) -> bool:
    """Lay the schedule out within the arena (bytes) by placement, or else by `pack`."""
    if place_or_tell(schedule, arena) is None:
        return True
    if max(live_bytes(schedule), default=0) > -(-arena // schedule.problem.alignment) * (
        schedule.problem.alignment
    ):
        return False
    until = min(deadline, time.monotonic() + PACK_SECONDS)
    if pack(process, schedule, arena, until) and arena_bytes(schedule) <= arena:
        return True
    schedule.offset = schedule.workspace_offset = None
    return False
