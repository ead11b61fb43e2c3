"""
Sequence of runs, and the state of a search over sequences.

An event reads the latest copy of each input, and a copy lives until its last read. Every sequence
whose reads find what they need is a schedule, if `Problem.chained` ops and those of different
phases run for the first time in program order.
"""

import math
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coop_plan.planner.core.arrays import Flags, Ints, Program, to_arrays, to_program
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.search.compute.params import OrderParams

# Columns of `SearchState.event`: the op that runs; its block, and its place among those of the
# block; the first of its accesses; whether it is in the candidate; whether it is the op's first
# run; whether the current sequence does not have it.
CODE, BLOCK, INDEX, ACCESSES, PRESENT, FIRST_RUN, NEW = range(7)
# Columns of `SearchState.bytes`, per event: of copies that begin with it, of those that end with
# it, of what is live for it only, of what it needs less because an output takes the place of an
# input.
UP, DOWN, ONCE, SAVED = range(4)
# Columns of `SearchState.block`: its events, and how many they were in the current sequence if it
# has changed, else NONE; whether what follows must be found anew: by how many bytes more are live
# after it than before it; what an event of it needs at most and what lives in all its events, both
# beyond what is live before it; how many of them are first runs; the first access of those which
# begin a copy that outlives the block and could be spared, and the last block in which one ends.
EVENTS, KEPT, DIRTY, NET, MOST, LIVED, FIRSTS, LONG, REACH = range(9)
# Columns of `SearchState.access`: tensor and event; what the event does to it, READ or MAKE; the
# next and the last access of the tensor, in the order of the candidate; the next of the event; the
# access that began the copy it is of, and the event with which one that it began ends; the next one
# like this of the block that outlives it.
TENSOR, DOES, EVENT, NEXT, LAST, ALONG, COPY, END, LATER = range(9)
READ, MAKE = range(2)
# Columns of `SearchState.tensor`: the first and the last access; whether its copies must be found
# anew, and whether its events may serve nothing.
HEAD, TAIL, STALE, QUEUED = range(4)
# Rows of `SearchState.lists`: events that are free; that the candidate has and the current sequence
# has not, the other way round, and at another place; tensors that are stale, and queued; blocks in
# which the candidate differs from the current sequence.
FREE, BORN, REMOVED, MOVED, STALES, QUEUE, DIFFER = range(7)
# Entries of `SearchState.counts`: events of the sequence at hand; of the lists; blocks in use, and
# whether one had no room; the free access to be taken next; the fullest event and by how many bytes
# it is too full.
(
    LENGTH,
    FREE_COUNT,
    BORN_COUNT,
    REMOVED_COUNT,
    MOVED_COUNT,
    STALE_COUNT,
    QUEUE_COUNT,
    DIFFER_COUNT,
    BLOCKS,
    FULL,
    FREE_ACCESS,
    FREE_ACCESSES,
    WORST,
    OVER,
    MARGINS,
    COUNTS,
) = range(16)
# Entries of `SearchState.sums`: what computes in the candidate, and in the current sequence, µs;
# bytes that live in the candidate, from event to event, times events.
COMPUTE, ACCEPTED, AREA = range(3)
NONE = -1
"""No event, no access."""
MIN_FILL = 16
"""Events that a block holds at least, if there are as many."""
LEAST_US = 1e-9
"""Lower bound on a recompute cost, µs."""


class MoveNumbers(NamedTuple):
    """`OrderParams` for compiled code; see there."""

    repairs: int
    least_excess: float
    spread: float
    mend_chance: float
    recompute_chance: float
    move_chance: float
    tries: int
    first_chance: float
    to_bound_chance: float
    stray_chance: float
    removed_block: float
    moved_block: float
    moved_block_chance: float
    furthest: float
    later_chance: float
    earliest: float
    early_chance: float
    usually: float
    resident_usually: float
    resident_rarely: float
    evicted_usually: float
    evicted_rarely: float
    insertion: int
    margins: int


Numbers = npt.NDArray[np.int32]


class SearchState(NamedTuple):
    """
    State of a Metropolis search in compiled code.

    `sequence` is the current one as ops, of which `counts[LENGTH]` are in use. In a search its
    events have numbers, and `sequence.size` is the number of its end. They lie in blocks, a `row`
    of each with its events in order, so that a change and a look at what it did to memory cost the
    square root of their number: `begin` has the place of a block's first event, and that of the end
    last, `kept` what the row was before the step, and `weight` the sums of `worth` of what outlives
    a block. `event`, `bytes`, `block`, `access` and `tensor` know them and
    what they do to tensors; see above. `op` tells the event of its first run. `inserted` lists what
    one change puts in. `again` says of an op whether it may run anywhere after its first run,
    `needed` of a tensor whether it is there in the end, `worth` what it is worth not to keep it,
    bytes a µs, and that for a byte of it: 0 where it cannot be computed again; `part` its bytes for
    each op that reads it, and `renewal` what it takes to have it again, µs.
    `chained` and `phase` of ops what keeps their first runs in order. `margin` lists (position, op,
    bytes to leave free while it runs between the first runs before and of that position), and
    `tight` counts the positions in it before each.
    """

    numbers: MoveNumbers
    again: Flags
    needed: Flags
    worth: npt.NDArray[np.float64]
    part: npt.NDArray[np.float64]
    renewal: npt.NDArray[np.float64]
    chained: Flags
    phase: Flags
    sequence: Ints
    row: Numbers
    kept: Numbers
    begin: Ints
    block: Ints
    weight: npt.NDArray[np.float64]
    event: Numbers
    bytes: Ints
    access: Numbers
    tensor: Numbers
    op: Ints
    lists: Ints
    inserted: Ints
    margin: Ints
    tight: Ints
    counts: Ints
    sums: npt.NDArray[np.float64]


def start(problem: Problem, room: int, params: OrderParams) -> SearchState:
    """State for sequences of at most `room` events; the current one is empty."""
    arrays = to_arrays(problem)
    again = np.array(problem.rerunnable(problem.evictable), dtype=np.uint8)
    spare = (arrays.size > 0) & (arrays.evictable == 1) & (again[arrays.producer] == 1)
    each = spare / np.maximum(arrays.cost[arrays.producer], LEAST_US)
    state = allocate(to_program(arrays), room, params, again, each)
    return state._replace(
        needed=arrays.is_output & (1 - arrays.outside),
        chained=np.array(problem.chained, dtype=np.uint8),
        phase=np.array(problem.phase, dtype=np.uint8),
    )


def allocate(
    a: Program, room: int, params: OrderParams, again: Flags, worth: npt.NDArray[np.float64]
) -> SearchState:
    """
    A state with room for so many events of a program; nothing is needed in the end, or chained.

    `worth` is that of a byte of each tensor, as in `SearchState`.
    """
    codes, count = a.reads_ptr.size - 1, a.size.size
    accesses = int(a.reads_ptr[codes] + a.makes_ptr[codes])
    most = int((np.diff(a.reads_ptr) + np.diff(a.makes_ptr)).max(initial=1))
    fill = max(MIN_FILL, math.isqrt(room) // 2)
    blocks, width = room // fill + 2, 2 * fill + params.insertion
    return SearchState(
        numbers=MoveNumbers(**asdict(params)),
        again=again,
        needed=np.zeros(count, dtype=np.uint8),
        worth=np.stack([a.size * worth, worth], axis=1),
        part=a.size / np.maximum(np.bincount(a.reads, minlength=count), 1),
        renewal=np.where((a.evictable == 1) & (again[a.producer] == 1), a.cost[a.producer], np.inf),
        chained=np.zeros(codes, dtype=np.uint8),
        phase=np.zeros(codes, dtype=np.uint8),
        sequence=np.zeros(room, dtype=np.int64),
        row=np.zeros((blocks, width), dtype=np.int32),
        kept=np.zeros((blocks, width), dtype=np.int32),
        begin=np.zeros(blocks + 1, dtype=np.int64),
        block=np.zeros((blocks + 1, 9), dtype=np.int64),
        weight=np.zeros((blocks, 2)),
        event=np.zeros((room + 1, 7), dtype=np.int32),
        bytes=np.zeros((room + 1, 4), dtype=np.int64),
        access=np.zeros((min(room * most, 4 * accesses + 64 * most + room), 9), dtype=np.int32),
        tensor=np.zeros((count, 4), dtype=np.int32),
        op=np.zeros(codes, dtype=np.int64),
        lists=np.zeros((7, max(room + 2, count + 1)), dtype=np.int64),
        inserted=np.zeros(params.insertion, dtype=np.int64),
        margin=np.zeros((3, params.margins), dtype=np.int64),
        tight=np.zeros(codes + 2, dtype=np.int64),
        counts=np.zeros(COUNTS, dtype=np.int64),
        sums=np.zeros(3),
    )


def set_sequence(state: SearchState, sequence: Ints) -> None:
    """Make `sequence` the current one."""
    state.sequence[: sequence.size] = sequence
    state.counts[LENGTH] = sequence.size


def current_sequence(state: SearchState) -> Ints:
    """Copy of the current sequence."""
    return state.sequence[: state.counts[LENGTH]].copy()


def reserve_margin(state: SearchState, event: int, margin: int) -> None:
    """Reserve `margin` bytes whenever the event's op runs at the same program position."""
    before = state.sequence[:event]
    position, op = np.unique(before).size, state.sequence[event]
    known = state.margin[:, : state.counts[MARGINS]]
    same = np.flatnonzero((known[0] == position) & (known[1] == op))
    if same.size:
        known[2, same[0]] = margin
    elif known.shape[1] < state.margin.shape[1]:
        state.margin[:, known.shape[1]] = position, op, margin
        state.tight[position + 1 :] += 1
        state.counts[MARGINS] += 1
