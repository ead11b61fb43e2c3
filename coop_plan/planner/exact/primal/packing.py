"""Layout of one schedule within an arena, by placement or else by constraint programming."""

import time
from dataclasses import dataclass

import numpy as np

from coop_plan.planner.core.arrays import to_arrays
from coop_plan.planner.core.schedule import PlacedSchedule, Schedule
from coop_plan.planner.exact.params import DEFAULTS, PackingParams
from coop_plan.planner.exact.solver.jobs import PackBlocks
from coop_plan.planner.exact.solver.process import SolverProcess
from coop_plan.planner.placement.layout import WORK, lay_out


def pack(
    process: SolverProcess, schedule: Schedule, arena: int, deadline: float, params: PackingParams
) -> PlacedSchedule | None:
    """The schedule with offsets within the arena (bytes) by CP-SAT's NoOverlap2D; None without any.

    `deadline` is a `time.monotonic` value, s. A buffer that shares an address in place begins after
    the event that makes it, during which it lies in its input's block. Unlike in `lay_out`, it
    takes its own bytes only.
    """
    problem, t = schedule.problem, schedule.trace
    blocks = schedule.blocks()._replace(shares=t.shares)
    scratch = blocks.event
    unit = problem.alignment
    if t.tensor.size + scratch.size > params.max_blocks:
        return None
    size = to_arrays(problem).size[t.tensor]
    workspace = to_arrays(problem).workspace[schedule.what[scratch]]
    later = np.flatnonzero(t.shares >= 0)
    job = PackBlocks(
        np.concatenate([t.first + (t.shares >= 0), scratch]).tolist(),
        np.concatenate([t.last + 1, scratch + 1]).tolist(),
        (np.concatenate([size, workspace]) // unit).tolist(),
        list(zip(later.tolist(), t.shares[later].tolist(), strict=True)),
        problem.rounded(arena) // unit,
    )
    offsets = process.pack(job, deadline)
    if offsets is None:
        return None
    return schedule.place(np.array(offsets, dtype=np.int64) * unit, blocks)


@dataclass(frozen=True)
class LayoutConflict:
    """An event at which a layout exceeds the arena, by `excess` bytes."""

    event: int
    excess: int


def place_or_conflict(
    schedule: Schedule, arena: int, work: int = WORK
) -> PlacedSchedule | LayoutConflict:
    """The schedule laid out within the arena (bytes), or its layout conflict.

    The conflict is the fullest event of the block that ends highest. `work` limits `lay_out`.
    """
    placed, placement = lay_out(schedule, arena, work=work)
    if placed.arena_bytes <= arena:
        return placed
    blocks = schedule.blocks()
    ends = placement.offsets + blocks.size
    worst = int(ends.argmax())
    first, last = int(blocks.lower[worst]), int(blocks.upper[worst])
    live = schedule.live_bytes()[first:last]
    return LayoutConflict(first + int(live.argmax()), int(ends[worst]) - arena)


def place_or_pack(
    process: SolverProcess,
    schedule: Schedule,
    arena: int,
    deadline: float,
    params: PackingParams = DEFAULTS.packing,
) -> PlacedSchedule | None:
    """The schedule laid out within the arena (bytes) by placement, or else by `pack`."""
    placed = place_or_conflict(schedule, arena)
    if isinstance(placed, PlacedSchedule):
        return placed
    if not schedule.fits(arena):
        return None
    until = min(deadline, time.monotonic() + params.seconds)
    packed = pack(process, schedule, arena, until, params)
    return packed if packed is not None and packed.arena_bytes <= arena else None
