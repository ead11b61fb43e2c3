"""
State of the Metropolis search: a sequence of runs and its lifetimes, as arrays for compiled code.

An event reads the latest copy of each input, and a copy is live until its last read. A sequence is
a schedule if each read has a live copy, and if `Problem.chained` ops and ops of different phases
first run in program order.
"""

import math
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt

from coop_plan.planner.core.arrays import Flags, Ints, Program, to_arrays, to_program
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.records import Int32, Record, Table, record, table
from coop_plan.planner.search.compute.params import MoveParams

Int32s = npt.NDArray[np.int32]
Int32Table = Annotated[Int32s, 2]

NONE = -1
"""Null index of an event or an access."""

MIN_COST_US = 1e-9
"""Lower bound on the time of a new copy in a ratio of bytes to µs."""


class Op(Record):
    """An op or marker: the event of its first run, and the constraints of its order."""

    first_run: Int32
    phase: Int32
    is_chained: bool
    can_rerun: bool  # after its first run


class Tensor(Record):
    """A tensor and its accesses in the candidate.

    `gain_per_byte` bounds from above the bytes that an eviction frees per µs, for one byte (0 if it
    cannot be evicted), and `gain` that for all. A copy to the host and back frees `away_per_byte`,
    or `again_per_byte` if the host has it already. `input_share` is its bytes divided by its number
    of reading ops, `input_us` the cost of its producer, infinite if it cannot be recomputed. `head`
    and `tail` are its first and last access.
    """

    gain: float
    gain_per_byte: float
    away_per_byte: float
    again_per_byte: float
    input_share: float
    input_us: float
    head: Int32
    tail: Int32
    can_rerun: bool  # a move may rerun its producer for it
    is_movable: bool  # can be offloaded and prefetched
    is_output: bool  # must be live at the end
    is_stale: bool  # its lifetimes are out of date
    is_queued: bool  # for dead-code elimination


class Event(Record):
    """An event: its op or prefetch marker, its place in a block, its first access and its bytes.

    `allocated` is the bytes of the copies whose lifetime begins with the event, `freed` of those
    that end with it, `transient` those live during the event only, `inplace_saved` those that an
    in-place output saves.
    """

    allocated: int
    freed: int
    transient: int
    inplace_saved: int
    code: Int32
    block: Int32
    index: Int32
    first_access: Int32
    is_present: bool  # in the candidate
    is_first_run: bool
    is_new: bool  # not in the current sequence


class Access(Record):
    """A read or write of a tensor, listed by tensor in candidate order, and by event.

    `write` is the write that began the copy, and `end`, of such a write, the event that ends the
    copy. `next_long` is the next write of the list that `Block.first_long` begins.
    """

    tensor: Int32
    event: Int32
    next: Int32
    previous: Int32
    next_of_event: Int32
    write: Int32
    end: Int32
    next_long: Int32
    is_read: bool


class Block(Record):
    """A block of adjacent events: its first position and their number.

    `saved_events` is their number before the step if the block has changed, else NONE. The summary:
    `net` change of live bytes; `peak` and sum over events (`area`) of the live bytes, both relative
    to the block's start; the first write of a copy that outlives the block and can be evicted; the
    last block in which such a copy ends; the sums of `Tensor.gain` and `.gain_per_byte` over them.
    """

    start: int
    events: int
    saved_events: int
    net: int
    peak: int
    area: int
    first_long: int
    last_end: int
    gain: float
    gain_per_byte: float
    is_dirty: bool  # the summary is out of date


class Now(Record):
    """Scalars of a search: lengths of the stored sequence and of the lists, and of the candidate.

    Costs are µs; `area` is the live bytes summed over the candidate's events, `peak_excess` the
    bytes above the capacity at the event of the peak.
    """

    candidate_cost: float
    current_cost: float
    area: float
    length: int
    free: int
    added: int
    removed: int
    moved: int
    stale: int
    queued: int
    changed: int
    blocks: int  # in use
    free_access: int  # the first free access
    free_accesses: int
    peak_event: int
    peak_excess: int
    is_full: bool  # an insertion found a full block


class SearchState(NamedTuple):
    """The current sequence, the candidate that a step makes of it, and data of the program.

    `sequence` holds the stored sequence as ops, `now.length` of them. Inside a search each event
    has a number; `sequence.size` is the end of the step. Events lie in blocks, so that an edit and
    the search for the peak cost the square root of their number.

    Per block: `members` lists its events, `saved_members` those before the step. The block behind
    the last one starts at the length.

    Lists: `free` events; events of the candidate that the current sequence does not have (`added`),
    the reverse (`removed`), and events that `moved`; `stale` tensors; tensors `queued` for
    dead-code elimination; `changed` blocks. `pending` is the buffer of ops to insert.
    """

    params: MoveParams
    op: Table[Op]
    tensor: Table[Tensor]
    event: Table[Event]
    access: Table[Access]
    block: Table[Block]
    now: Now
    sequence: Ints
    members: Int32Table
    saved_members: Int32Table
    free: Ints
    added: Ints
    removed: Ints
    moved: Ints
    stale: Ints
    queued: Ints
    changed: Ints
    pending: Ints


def new_state(problem: Problem, max_events: int, params: MoveParams) -> SearchState:
    """State without a sequence, for up to `max_events` events."""
    arrays = to_arrays(problem)
    recomputable = np.array(problem.rerunnable(problem.evictable), dtype=np.uint8)
    evictable = (arrays.size > 0) & (arrays.evictable == 1) & (recomputable[arrays.producer] == 1)
    gain_per_byte = evictable / np.maximum(arrays.cost[arrays.producer], MIN_COST_US)
    state = allocate(to_program(arrays), max_events, params, recomputable, gain_per_byte)
    state.tensor["can_rerun"] = recomputable[arrays.producer]
    state.tensor["is_output"] = arrays.is_output & (1 - arrays.outside)
    op = state.op[: problem.op_count]  # without further variants
    op["is_chained"], op["phase"] = problem.chained, problem.phase
    return state


def allocate(
    a: Program,
    max_events: int,
    params: MoveParams,
    recomputable: Flags,
    gain_per_byte: npt.NDArray[np.float64],
) -> SearchState:
    """State for up to `max_events` events of a program, with no outputs and no chained ops.

    `recomputable` is per op, `gain_per_byte` per tensor.
    """
    ops, tensors = a.reads_ptr.size - 1, a.size.size
    program_accesses = int(a.reads_ptr[ops] + a.makes_ptr[ops])
    max_accesses = int((np.diff(a.reads_ptr) + np.diff(a.makes_ptr)).max(initial=1))
    fill = max(16, math.isqrt(max_events) // 4)
    blocks, width = max_events // fill + 2, 2 * fill + params.max_insertion
    evictable = (a.evictable == 1) & (recomputable[a.producer] == 1)
    accesses = 4 * program_accesses + 64 * max_accesses + max_events
    accesses = min(max_events * max_accesses, accesses)
    lists = ("free", "added", "removed", "moved", "stale", "queued", "changed")
    entries = max(max_events + 2, tensors + 1)  # of a list
    state = SearchState(
        params,
        op=table(Op, ops),
        tensor=table(Tensor, tensors),
        event=table(Event, max_events + 1),
        access=table(Access, accesses),
        block=table(Block, blocks + 1),
        now=record(Now),
        sequence=np.zeros(max_events, dtype=np.int64),
        members=np.zeros((blocks, width), dtype=np.int32),
        saved_members=np.zeros((blocks, width), dtype=np.int32),
        pending=np.zeros(params.max_insertion, dtype=np.int64),
        **{name: np.zeros(entries, dtype=np.int64) for name in lists},
    )
    state.op["can_rerun"][: recomputable.size] = recomputable
    tensor = state.tensor
    tensor["gain"], tensor["gain_per_byte"] = a.size * gain_per_byte, gain_per_byte
    tensor["can_rerun"] = evictable
    tensor["input_share"] = a.size / np.maximum(np.bincount(a.reads, minlength=tensors), 1)
    tensor["input_us"] = np.where(evictable, a.cost[a.producer], np.inf)
    return state


def set_sequence(state: SearchState, sequence: Ints) -> None:
    """Set the stored sequence."""
    state.sequence[: sequence.size] = sequence
    state.now.length = sequence.size


def current_sequence(state: SearchState) -> Ints:
    """Copy of the stored sequence."""
    return state.sequence[: state.now.length].copy()
