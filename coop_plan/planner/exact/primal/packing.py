"""Layout of one schedule within an arena, by placement or else by constraint programming."""

import time

import numpy as np

from coop_plan.planner.core.arrays import to_arrays
from coop_plan.planner.core.schedule import PlacedSchedule, Schedule
from coop_plan.planner.exact.params import DEFAULTS, PackingParams
from coop_plan.planner.exact.solver.jobs import PackBlocks
from coop_plan.planner.exact.solver.process import SolverProcess
from coop_plan.planner.placement.layout import lay_out


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


def place_or_pack(
    process: SolverProcess,
    schedule: Schedule,
    arena: int,
    deadline: float,
    params: PackingParams = DEFAULTS.packing,
) -> PlacedSchedule | None:
    """The schedule laid out within the arena (bytes) by placement, or else by `pack`."""
    placed = lay_out(schedule, arena).placed
    if placed.arena_bytes <= arena:
        return placed
    if not schedule.fits(arena):
        return None
    until = min(deadline, time.monotonic() + params.seconds)
    packed = pack(process, schedule, arena, until, params)
    return packed if packed is not None and packed.arena_bytes <= arena else None
