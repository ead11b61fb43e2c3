"""A layout for one schedule by constraint programming, when placement found none."""

import time

from planner.assemble import arena_bytes
from planner.exact.live import Blocks, live_bytes
from planner.exact.solving import SolverProcess
from planner.layout import WORK, lay_out
from planner.schedule import Schedule

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


def place_within(schedule: Schedule, arena: int, work: int = WORK) -> bool:
    """Lay the schedule out within the arena (bytes) by `lay_out` with that work; whether it did."""
    lay_out(schedule, arena, work=work)
    if arena_bytes(schedule) <= arena:
        return True
    schedule.offset = schedule.workspace_offset = None
    return False


def place_or_pack(process: SolverProcess, schedule: Schedule, arena: int, deadline: float) -> bool:
    """Lay the schedule out within the arena (bytes) by placement, or else by `pack`."""
    if place_within(schedule, arena):
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
