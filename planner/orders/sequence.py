"""
An order of runs: which ops run, one after the other.

An event reads the latest copy of each input, and a copy lives until its last read. Every sequence
whose reads find what they need is a schedule, if `Problem.chained` ops and those of different
phases run for the first time in program order.
"""

from dataclasses import asdict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coop_plan.planner.core.arrays import Flags, Ints, to_arrays
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.orders.params import OrderParams

# Columns of `WalkState.event`: the op that runs; its place in the trial; the first of its touches;
# whether it is in the trial; whether it is the op's first run; whether the current sequence does
# not have it.
CODE, AT, TOUCHES, PRESENT, FIRST_RUN, NEW = range(6)
# Columns of `WalkState.bytes`, per event: of copies that begin with it, of those that end with it,
# of what is live for it only, of what it needs less because an output takes the place of an input.
UP, DOWN, ONCE, SAVED = range(4)
# Columns of `WalkState.touch`: tensor and event; what the event does to it, READ or MAKE; the next
# and the last touch of the tensor, in the order of the trial; the next of the event; the touch that
# began the copy it is of, and the event with which one that it began ends.
TENSOR, DOES, EVENT, NEXT, LAST, ALONG, COPY, END = range(8)
READ, MAKE = range(2)
# Columns of `WalkState.tensor`: the first and the last touch; whether its copies must be found
# anew, and whether its events may serve nothing.
HEAD, TAIL, STALE, QUEUED = range(4)
# Rows of `WalkState.lists`: events that are free; that the trial has and the current sequence has
# not, the other way round, and at another place; tensors that are stale, and queued.
FREE, BORN, GONE, MOVED, STALES, QUEUE = range(6)
# Entries of `WalkState.counts`: events of the sequence at hand, the current one and the trial;
# of the lists; holes in the trial; from which event on it differs from the current one; the free
# touch to be taken next; the fullest event and by how many bytes it is too full.
(
    LENGTH,
    CURRENT,
    TRIAL,
    FREE_COUNT,
    BORN_COUNT,
    GONE_COUNT,
    MOVED_COUNT,
    STALE_COUNT,
    QUEUE_COUNT,
    HOLES,
    CHANGED,
    FREE_TOUCH,
    FREE_TOUCHES,
    WORST,
    OVER,
    MARGINS,
    COUNTS,
) = range(17)
# Entries of `WalkState.sums`: what computes in the trial, and in the current sequence, µs; bytes
# that live in the trial, from event to event, times events.
COMPUTE, ACCEPTED, AREA = range(3)
NONE = -1
"""No event, no touch."""


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
    kept_usually: float
    kept_rarely: float
    gone_usually: float
    gone_rarely: float
    insertion: int
    margins: int


Numbers = npt.NDArray[np.int32]


class WalkState(NamedTuple):
    """
    Where the walk is, and what it needs besides.

    `sequence` is the one at hand as ops, of which `counts[LENGTH]` are in use. In a walk its
    events have numbers: `current` lists them as they are, `trial` as they may become, with the
    number `sequence.size` at the end of each. `event`, `bytes`, `touch` and `tensor` know them and
    what they do to tensors; see above. `op` tells the event of its first run. `inserted` lists what
    one change puts in. `again` says of an op whether it may run anywhere after its first run,
    `needed` of a tensor whether it is there in the end, `chained` and `phase` of ops what keeps
    their first runs in order. `margin` lists (position, op, bytes to
    leave free while it runs between the first runs before and of that position), and `tight` flags
    the positions in it.
    """

    numbers: MoveNumbers
    again: Flags
    needed: Flags
    chained: Flags
    phase: Flags
    sequence: Ints
    current: Ints
    trial: Ints
    event: Numbers
    bytes: Ints
    touch: Numbers
    tensor: Numbers
    op: Ints
    lists: Ints
    inserted: Ints
    margin: Ints
    tight: Flags
    counts: Ints
    sums: npt.NDArray[np.float64]


def start(problem: Problem, room: int, params: OrderParams) -> WalkState:
    """A walk at no sequence yet, with room for so many events."""
    a = to_arrays(problem)
    n, count = a.ops, a.size.size
    touches = int(a.reads_ptr[n] + a.makes_ptr[n])
    most = int((np.diff(a.reads_ptr[: n + 1]) + np.diff(a.makes_ptr[: n + 1])).max(initial=1))
    return WalkState(
        numbers=MoveNumbers(**asdict(params)),
        again=np.array(problem.repeatable(problem.evictable), dtype=np.uint8),
        needed=a.is_output & (1 - a.outside),
        chained=np.array(problem.chained, dtype=np.uint8),
        phase=np.array(problem.phase, dtype=np.uint8),
        sequence=np.zeros(room, dtype=np.int64),
        current=np.zeros(room + 1, dtype=np.int64),
        trial=np.zeros(room + 1, dtype=np.int64),
        event=np.zeros((room + 1, 6), dtype=np.int32),
        bytes=np.zeros((room + 1, 4), dtype=np.int64),
        touch=np.zeros((min(room * most, 4 * touches + 64 * most + room), 8), dtype=np.int32),
        tensor=np.zeros((count, 4), dtype=np.int32),
        op=np.zeros(n, dtype=np.int64),
        lists=np.zeros((6, max(room + 2, count + 1)), dtype=np.int64),
        inserted=np.zeros(params.insertion, dtype=np.int64),
        margin=np.zeros((3, params.margins), dtype=np.int64),
        tight=np.zeros(n + 1, dtype=np.uint8),
        counts=np.zeros(COUNTS, dtype=np.int64),
        sums=np.zeros(3),
    )


def go_to(state: WalkState, sequence: Ints) -> None:
    """Be at a sequence."""
    state.sequence[: sequence.size] = sequence
    state.counts[LENGTH] = sequence.size


def here(state: WalkState) -> Ints:
    """The sequence at hand."""
    return state.sequence[: state.counts[LENGTH]].copy()


def leave_room(state: WalkState, event: int, margin: int) -> None:
    """From now on leave so many bytes free when the event's op runs for the same position."""
    before = state.sequence[:event]
    position, op = np.unique(before).size, state.sequence[event]
    known = state.margin[:, : state.counts[MARGINS]]
    same = np.flatnonzero((known[0] == position) & (known[1] == op))
    if same.size:
        known[2, same[0]] = margin
    elif known.shape[1] < state.margin.shape[1]:
        state.margin[:, known.shape[1]] = position, op, margin
        state.tight[position] = 1
        state.counts[MARGINS] += 1
