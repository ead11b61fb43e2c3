"""
State of the Metropolis search: a sequence of runs and its lifetimes, as arrays for compiled code.

An event reads the latest copy of each input, and a copy is live until its last read. A sequence is
a schedule if each read has a live copy, and if `Problem.chained` ops and ops of different phases
first run in program order.
"""

import math
from dataclasses import asdict
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt

from coop_plan.planner.core.arrays import (
    Flags,
    FloatTable,
    Ints,
    IntTable,
    Program,
    to_arrays,
    to_program,
)
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.search.compute import columns as c
from coop_plan.planner.search.compute.params import MoveParams, MoveValues

Int32s = npt.NDArray[np.int32]
Int32Table = Annotated[Int32s, 2]


class SearchState(NamedTuple):
    """The current sequence, the candidate that a step makes of it, and data of the program.

    `sequence` holds the stored sequence as ops, `counts[LENGTH]` of them. Inside a search each
    event has a number; `sequence.size` is the end of the step. Events lie in blocks, so that an
    edit and the search for the peak cost the square root of their number.

    Per op: `recomputable` if it may run again after its first run, `chained` and `phase` constrain
    the order of first runs, and `first_run` is the event of the first run.

    Per tensor: `rerun_for` if a move may rerun its producer for it, `movable` if it can be
    offloaded and prefetched, and `is_output` if it must be live at the end; `gain_bound[:, 0]`, its
    bytes freed per µs of recomputation, and `[:, 1]`, the same for one byte (0 if it cannot be
    evicted), which bound the gain of an eviction from above; `input_share`, its bytes divided by
    its number of reading ops; `input_us`, the cost of its producer, infinite if it cannot be
    recomputed.

    Per block: `members` lists its events, `saved_members` those before the step, `block_start` its
    first position (the last entry is the length), and `long_gain` sums `gain_bound` over its
    long-lived copies.

    `event`, `event_bytes`, `block`, `access`, `tensor`, `lists`, `counts` and `sums` have the
    columns of `columns`. `pending` is the buffer of ops to insert.
    """

    params: MoveParams  # as `MoveValues`
    recomputable: Flags
    rerun_for: Flags
    movable: Flags
    is_output: Flags
    gain_bound: FloatTable
    input_share: npt.NDArray[np.float64]
    input_us: npt.NDArray[np.float64]
    chained: Flags
    phase: Flags
    sequence: Ints
    members: Int32Table
    saved_members: Int32Table
    block_start: Ints
    block: IntTable
    long_gain: FloatTable
    event: Int32Table
    event_bytes: IntTable
    access: Int32Table
    tensor: Int32Table
    first_run: Ints
    lists: IntTable
    pending: Ints
    counts: Ints
    sums: npt.NDArray[np.float64]


def new_state(problem: Problem, max_events: int, params: MoveParams) -> SearchState:
    """State without a sequence, for up to `max_events` events."""
    arrays = to_arrays(problem)
    recomputable = np.array(problem.rerunnable(problem.evictable), dtype=np.uint8)
    evictable = (arrays.size > 0) & (arrays.evictable == 1) & (recomputable[arrays.producer] == 1)
    gain_per_byte = evictable / np.maximum(arrays.cost[arrays.producer], c.MIN_COST_US)
    state = allocate(to_program(arrays), max_events, params, recomputable, gain_per_byte)
    return state._replace(
        rerun_for=recomputable[arrays.producer],
        is_output=arrays.is_output & (1 - arrays.outside),
        chained=np.array(problem.chained, dtype=np.uint8),
        phase=np.array(problem.phase, dtype=np.uint8),
    )


def allocate(
    a: Program,
    max_events: int,
    params: MoveParams,
    recomputable: Flags,
    gain_per_byte: npt.NDArray[np.float64],
) -> SearchState:
    """State for up to `max_events` events of a program, with no outputs and no chained ops.

    `gain_per_byte` is column 1 of `SearchState.gain_bound`.
    """
    ops, tensors = a.reads_ptr.size - 1, a.size.size
    program_accesses = int(a.reads_ptr[ops] + a.makes_ptr[ops])
    max_accesses = int((np.diff(a.reads_ptr) + np.diff(a.makes_ptr)).max(initial=1))
    fill = max(16, math.isqrt(max_events) // 4)
    blocks, width = max_events // fill + 2, 2 * fill + params.max_insertion
    evictable = (a.evictable == 1) & (recomputable[a.producer] == 1)
    accesses = 4 * program_accesses + 64 * max_accesses + max_events
    accesses = min(max_events * max_accesses, accesses)
    return SearchState(
        params=MoveValues(**asdict(params)),
        recomputable=recomputable,
        rerun_for=evictable.astype(np.uint8),
        movable=np.zeros(tensors, dtype=np.uint8),
        is_output=np.zeros(tensors, dtype=np.uint8),
        gain_bound=np.stack([a.size * gain_per_byte, gain_per_byte], axis=1),
        input_share=a.size / np.maximum(np.bincount(a.reads, minlength=tensors), 1),
        input_us=np.where(evictable, a.cost[a.producer], np.inf),
        chained=np.zeros(ops, dtype=np.uint8),
        phase=np.zeros(ops, dtype=np.uint8),
        sequence=np.zeros(max_events, dtype=np.int64),
        members=np.zeros((blocks, width), dtype=np.int32),
        saved_members=np.zeros((blocks, width), dtype=np.int32),
        block_start=np.zeros(blocks + 1, dtype=np.int64),
        block=np.zeros((blocks + 1, 8), dtype=np.int64),
        long_gain=np.zeros((blocks, 2)),
        event=np.zeros((max_events + 1, 7), dtype=np.int32),
        event_bytes=np.zeros((max_events + 1, 4), dtype=np.int64),
        access=np.zeros((accesses, 9), dtype=np.int32),
        tensor=np.zeros((tensors, 4), dtype=np.int32),
        first_run=np.zeros(ops, dtype=np.int64),
        lists=np.zeros((7, max(max_events + 2, tensors + 1)), dtype=np.int64),
        pending=np.zeros(params.max_insertion, dtype=np.int64),
        counts=np.zeros(c.COUNTS, dtype=np.int64),
        sums=np.zeros(3),
    )


def set_sequence(state: SearchState, sequence: Ints) -> None:
    """Set the stored sequence."""
    state.sequence[: sequence.size] = sequence
    state.counts[c.LENGTH] = sequence.size


def current_sequence(state: SearchState) -> Ints:
    """Copy of the stored sequence."""
    return state.sequence[: state.counts[c.LENGTH]].copy()
