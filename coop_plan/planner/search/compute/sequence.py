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
from coop_plan.planner.search.compute.params import ComputeMoveParams

Int32s = npt.NDArray[np.int32]
Int32Table = Annotated[Int32s, 2]

# Columns of `SearchState.event`: the op; the block and the index in it; the first of its accesses;
# flags: in the candidate, the op's first run, not in the current sequence.
CODE, BLOCK, INDEX, FIRST_ACCESS, PRESENT, FIRST_RUN, IS_NEW = range(7)
# Columns of `SearchState.event_bytes`: bytes of the copies whose lifetime begins with the event,
# and ends with it; bytes live during the event only; bytes that an in-place output saves.
ALLOCATED, FREED, TRANSIENT, INPLACE_SAVED = range(4)
# Columns of `SearchState.block`: number of events; their number before the step if the block has
# changed, else NONE; whether the summary in the other columns is out of date. The summary: net
# change of live bytes; peak and sum over events of the live bytes, both relative to the block's
# start; number of first runs; the first write of a copy that outlives the block and can be
# evicted; the last block in which such a copy ends.
EVENTS, SAVED_COUNT, DIRTY, NET, PEAK, BLOCK_AREA, FIRST_RUNS, FIRST_LONG, LAST_END = range(9)
# Columns of `SearchState.access`: tensor; READ or WRITE; event; next and previous access of the
# tensor, in candidate order; next access of the event; the write that began the copy, and, of such
# a write, the event that ends the copy; next write of the list that FIRST_LONG begins.
TENSOR, ACCESS_KIND, EVENT, NEXT, PREVIOUS, NEXT_OF_EVENT, COPY, END, NEXT_LONG = range(9)
READ, WRITE = range(2)
# Columns of `SearchState.tensor`: first and last access; whether its lifetimes are out of date;
# whether it is queued for dead-code elimination.
HEAD, TAIL, STALE, QUEUED = range(4)
# Rows of `SearchState.lists`: free events; events of the candidate that the current sequence does
# not have, the reverse, and events that moved; stale tensors; tensors queued for dead-code
# elimination; changed blocks.
FREE, ADDED, REMOVED, MOVED, STALES, QUEUE, CHANGED = range(7)
# Entries of `SearchState.counts`: length of the stored sequence; lengths of the lists; blocks in
# use; whether an insertion found a full block; head and length of the list of free accesses; the
# event of the peak and its bytes above the capacity; margins in use.
(
    LENGTH,
    FREE_COUNT,
    ADDED_COUNT,
    REMOVED_COUNT,
    MOVED_COUNT,
    STALE_COUNT,
    QUEUE_COUNT,
    CHANGED_COUNT,
    BLOCKS,
    FULL,
    FREE_ACCESS,
    FREE_ACCESSES,
    PEAK_EVENT,
    PEAK_EXCESS,
    MARGIN_COUNT,
    COUNTS,
) = range(16)
# Entries of `SearchState.sums`: compute cost (µs) of the candidate and of the current sequence;
# live bytes summed over the candidate's events.
CANDIDATE_COST, CURRENT_COST, AREA = range(3)
NONE = -1
"""Null index of an event or an access."""
MIN_BLOCK_EVENTS = 16
"""Least number of events that a block is made for."""
MIN_COST_US = 1e-9
"""Lower bound on a recompute cost in a ratio of bytes to µs."""


class ComputeMoveValues(NamedTuple):
    """The fields of `ComputeMoveParams`, for compiled code."""

    max_repairs: int
    min_excess: float
    total_excess_weight: float
    repair_chance: float
    recompute_chance: float
    move_chance: float
    max_draws: int
    first_run_chance: float
    to_bound_chance: float
    drift_chance: float
    remove_more_chance: float
    move_more_chance: float
    move_group_chance: float
    max_move: float
    move_later_chance: float
    max_lead: float
    lead_chance: float
    usual_chance: float
    recompute_live_usual: float
    recompute_live_rare: float
    recompute_evicted_usual: float
    recompute_evicted_rare: float
    max_insertion: int
    max_margins: int


class SearchState(NamedTuple):
    """
    The current sequence, the candidate that a step makes of it, and data of the program.

    `sequence` holds the stored sequence as ops, `counts[LENGTH]` of them. Inside a search each
    event has a number; `sequence.size` is the end of the step. Events lie in blocks, so that an
    edit and the search for the peak cost the square root of their number.

    Per op: `recomputable` if it may run again after its first run, `chained` and `phase` constrain
    the order of first runs, and `first_run` is the event of the first run.

    Per tensor: `is_output` if it must be live at the end; `gain_bound[:, 0]`, its bytes freed per
    µs of recomputation, and `[:, 1]`, the same for one byte (0 if it cannot be evicted), which
    bound the gain of an eviction from above; `input_share`, its bytes divided by its number of
    reading ops; `input_us`, the cost of its producer, infinite if it cannot be recomputed.

    Per block: `members` lists its events, `saved_members` those before the step, `block_start` its
    first position (the last entry is the length), and `long_gain` sums `gain_bound` over its
    long-lived copies.

    `event`, `event_bytes`, `block`, `access`, `tensor`, `lists`, `counts` and `sums` have the
    columns listed above. `pending` is the buffer of ops to insert. `margin` has rows
    (position, op, bytes): bytes to keep free if the op runs after `position` first runs;
    `margin_prefix` counts the margins before each position.
    """

    params: ComputeMoveValues
    recomputable: Flags
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
    margin: IntTable
    margin_prefix: Ints
    counts: Ints
    sums: npt.NDArray[np.float64]


def new_state(problem: Problem, max_events: int, params: ComputeMoveParams) -> SearchState:
    """State without a sequence, for up to `max_events` events."""
    arrays = to_arrays(problem)
    recomputable = np.array(problem.rerunnable(problem.evictable), dtype=np.uint8)
    evictable = (arrays.size > 0) & (arrays.evictable == 1) & (recomputable[arrays.producer] == 1)
    gain_per_byte = evictable / np.maximum(arrays.cost[arrays.producer], MIN_COST_US)
    state = allocate(to_program(arrays), max_events, params, recomputable, gain_per_byte)
    return state._replace(
        is_output=arrays.is_output & (1 - arrays.outside),
        chained=np.array(problem.chained, dtype=np.uint8),
        phase=np.array(problem.phase, dtype=np.uint8),
    )


def allocate(
    a: Program,
    max_events: int,
    params: ComputeMoveParams,
    recomputable: Flags,
    gain_per_byte: npt.NDArray[np.float64],
) -> SearchState:
    """
    State for up to `max_events` events of a program, with no outputs and no chained ops.

    `gain_per_byte` is column 1 of `SearchState.gain_bound`.
    """
    ops, tensors = a.reads_ptr.size - 1, a.size.size
    program_accesses = int(a.reads_ptr[ops] + a.makes_ptr[ops])
    max_accesses = int((np.diff(a.reads_ptr) + np.diff(a.makes_ptr)).max(initial=1))
    fill = max(MIN_BLOCK_EVENTS, math.isqrt(max_events) // 2)
    blocks, width = max_events // fill + 2, 2 * fill + params.max_insertion
    evictable = (a.evictable == 1) & (recomputable[a.producer] == 1)
    accesses = 4 * program_accesses + 64 * max_accesses + max_events
    accesses = min(max_events * max_accesses, accesses)
    return SearchState(
        params=ComputeMoveValues(**asdict(params)),
        recomputable=recomputable,
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
        block=np.zeros((blocks + 1, 9), dtype=np.int64),
        long_gain=np.zeros((blocks, 2)),
        event=np.zeros((max_events + 1, 7), dtype=np.int32),
        event_bytes=np.zeros((max_events + 1, 4), dtype=np.int64),
        access=np.zeros((accesses, 9), dtype=np.int32),
        tensor=np.zeros((tensors, 4), dtype=np.int32),
        first_run=np.zeros(ops, dtype=np.int64),
        lists=np.zeros((7, max(max_events + 2, tensors + 1)), dtype=np.int64),
        pending=np.zeros(params.max_insertion, dtype=np.int64),
        margin=np.zeros((3, params.max_margins), dtype=np.int64),
        margin_prefix=np.zeros(ops + 2, dtype=np.int64),
        counts=np.zeros(COUNTS, dtype=np.int64),
        sums=np.zeros(3),
    )


def set_sequence(state: SearchState, sequence: Ints) -> None:
    """Set the stored sequence."""
    state.sequence[: sequence.size] = sequence
    state.counts[LENGTH] = sequence.size


def current_sequence(state: SearchState) -> Ints:
    """Copy of the stored sequence."""
    return state.sequence[: state.counts[LENGTH]].copy()


def add_margin(state: SearchState, event: int, margin: int) -> None:
    """
    Keep `margin` bytes free from now on if the op of this event runs at its position.

    For a candidate that was within the capacity but had no layout.
    """
    earlier = state.sequence[:event]
    position, op = np.unique(earlier).size, state.sequence[event]
    margins = state.margin[:, : state.counts[MARGIN_COUNT]]
    same = np.flatnonzero((margins[0] == position) & (margins[1] == op))
    if same.size:
        margins[2, same[0]] = margin
    elif margins.shape[1] < state.margin.shape[1]:
        state.margin[:, margins.shape[1]] = position, op, margin
        state.margin_prefix[position + 1 :] += 1
        state.counts[MARGIN_COUNT] += 1
