"""
A sequence: what runs, and what is copied when, as one list of numbers.

Op o that runs is o. Of tensor t, with n ops in the program, n + 3t is the begin of its copy to the
host, n + 3t + 1 the moment it leaves the device, when that copy is over, and n + 3t + 2 the begin
of a copy back. A tensor is copied to the host once and may be fetched more than once. An event
reads the latest copy of each input, and a copy lives until its last read; compute waits for a
fetched copy right before its first read. Every sequence in which first runs come in program order
and whose reads and transfers find what they need is a schedule.
"""

from dataclasses import asdict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coop_plan.planner.core.arrays import Arrays, Flags, Floats, Ints, to_arrays
from coop_plan.planner.core.lifetimes import OFFLOAD as DO_OFFLOAD
from coop_plan.planner.core.lifetimes import PREFETCH, RUN, WAIT
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.joint.params import TRANSFERS, MoveParams

OFFLOAD, LEAVE, FETCH = range(3)
"""What may happen to a tensor beside being computed: added to n + 3t."""

# Columns of `WalkState.event`: what happens in it (a code as above); its place in the trial; the
# first of its touches; whether it is in the trial; how many of its reads wait for a copy back;
# whether it is an op's first run; whether the current sequence does not have it.
CODE, AT, TOUCHES, PRESENT, WAITS, FIRST_RUN, NEW = range(7)
# Columns of `WalkState.bytes`, per event: of copies that begin with it, of those that end with it,
# of what is live for it only, of what it needs less because an output takes the place of an input;
# and of copies on the host that begin and end with it.
UP, DOWN, ONCE, SAVED, HOST_UP, HOST_DOWN = range(6)
# Columns of `WalkState.touch`: tensor and event; what the event does to it, OFFLOAD, LEAVE, FETCH
# or one of those below; the next and the last touch of the tensor, in the order of the trial; the
# next of the event; the touch that began the copy it is of, and the event with which one that it
# began ends; whether its read waits for a copy back.
TENSOR, DOES, EVENT, NEXT, LAST, ALONG, COPY, END, WAITING = range(9)
READ, MAKE = 3, 4
# Columns of `WalkState.tensor`: the first and the last touch; whether its copies must be found
# anew, and whether its events may serve nothing; where its copy on the host begins and ends.
HEAD, TAIL, STALE, QUEUED, HOST_BEGIN, HOST_END = range(6)
# Rows of `WalkState.when`, µs: the copy to the host is over, the copy back is.
AWAY, BACK = range(2)
# Rows of `WalkState.lists`: events that are free; that the trial has and the current sequence has
# not, the other way round, and at another place; tensors that are stale, and queued; heads and
# nexts of lists of events to be put in.
FREE, BORN, GONE, MOVED, STALES, QUEUE, HEADS, NEXTS = range(8)
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
    LINKED,
    COUNTS,
) = range(18)
# Entries of `WalkState.sums`, µs: what computes in the trial, and in the current sequence.
COMPUTE, ACCEPTED = range(2)
NONE = -1
"""No event, no touch."""


class MoveNumbers(NamedTuple):
    """`MoveParams` for compiled code; see there."""

    repairs: int
    least_excess: float
    spread: float
    mend_chance: float
    recompute_chance: float
    fetch_chance: float
    convert_chance: float
    move_chance: float
    retime_chance: float
    tries: int
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
    fetched_chance: float
    punctual_chance: float
    link_price: float
    insertion: int
    margins: int


Numbers = npt.NDArray[np.int32]


class Program(NamedTuple):
    """What the walk needs of `Arrays`; see there. Every call in compiled code passes all of it."""

    ops: int
    reads_ptr: Ints
    reads: Ints
    makes_ptr: Ints
    makes: Ints
    pairs_ptr: Ints
    pairs_out: Ints
    pairs_in: Ints
    size: Ints
    cost: Floats
    workspace: Ints
    producer: Ints
    evictable: Flags
    overwritten: Flags
    outside: Flags


def to_program(arrays: Arrays) -> Program:
    """The program that arrays are of."""
    return Program(*(getattr(arrays, name) for name in Program._fields))


class WalkState(NamedTuple):
    """
    Where the walk is, and what it needs besides.

    `sequence` is the one at hand as codes, of which `counts[LENGTH]` are in use. In a walk its
    events have numbers: `current` lists them as they are, `trial` as they may become, with the
    number `sequence.size` at the end of each; `begins` and `trial_begins` are when they begin, µs.
    `event`, `bytes`, `touch` and `tensor` know them and what they do to tensors; see above. `op`
    tells the event of its first run. `inserted` lists what one change puts in. `again` says of an
    op whether it may run anywhere after its first run, `movable` of a tensor whether it may be
    copied to the host, `needed` whether it is there in the end; `out_us` and `in_us` are what its
    copies take. `margin` lists (position, op, bytes to leave free while it runs between the first
    runs before and of that position), and `tight` flags the positions in it.
    """

    numbers: MoveNumbers
    again: Flags
    movable: Flags
    needed: Flags
    out_us: Floats
    in_us: Floats
    sequence: Ints
    current: Ints
    trial: Ints
    begins: Floats
    trial_begins: Floats
    event: Numbers
    bytes: Ints
    touch: Numbers
    tensor: Numbers
    when: Floats
    op: Ints
    lists: Ints
    inserted: Ints
    margin: Ints
    tight: Flags
    counts: Ints
    sums: Floats


def start(problem: Problem, room: int, params: MoveParams = TRANSFERS) -> WalkState:
    """A walk at no sequence yet, with room for so many events."""
    a, device = to_arrays(problem), problem.device
    n, count = a.ops, a.size.size
    touches = int(a.reads_ptr[n] + a.makes_ptr[n])
    most = int((np.diff(a.reads_ptr[: n + 1]) + np.diff(a.makes_ptr[: n + 1])).max(initial=1))
    with np.errstate(divide="ignore", invalid="ignore"):  # 0 bytes without a link
        out_us = device.copy_latency_us + a.bytes * 1e6 / np.float64(device.d2h_bytes_per_s)
        in_us = device.copy_latency_us + a.bytes * 1e6 / np.float64(device.h2d_bytes_per_s)
    movable = params.fetch_chance > 0 and "transfers" in problem.beyond_recomputation
    state = WalkState(
        numbers=MoveNumbers(**asdict(params)),
        again=np.array(problem.repeatable, dtype=np.uint8),
        movable=np.array(problem.movable, dtype=np.uint8) * np.uint8(movable),
        needed=a.is_output & (1 - a.outside),
        out_us=out_us,
        in_us=in_us,
        sequence=np.zeros(room, dtype=np.int64),
        current=np.zeros(room + 1, dtype=np.int64),
        trial=np.zeros(room + 1, dtype=np.int64),
        begins=np.zeros(room + 1),
        trial_begins=np.zeros(room + 1),
        event=np.zeros((room + 1, 7), dtype=np.int32),
        bytes=np.zeros((room + 1, 6), dtype=np.int64),
        touch=np.zeros((min(room * most, 4 * touches + 64 * most + room), 9), dtype=np.int32),
        tensor=np.zeros((count, 6), dtype=np.int32),
        when=np.zeros((2, count)),
        op=np.zeros(n, dtype=np.int64),
        lists=np.zeros((8, max(room + 2, count + 1)), dtype=np.int64),
        inserted=np.zeros(params.insertion, dtype=np.int64),
        margin=np.zeros((3, params.margins), dtype=np.int64),
        tight=np.zeros(n + 1, dtype=np.uint8),
        counts=np.zeros(COUNTS, dtype=np.int64),
        sums=np.zeros(2),
    )
    state.counts[LINKED] = state.movable.any()
    return state


def go_to(state: WalkState, sequence: Ints) -> None:
    """Be at a sequence."""
    state.sequence[: sequence.size] = sequence
    state.counts[LENGTH] = sequence.size


def here(state: WalkState) -> Ints:
    """The sequence at hand."""
    return state.sequence[: state.counts[LENGTH]].copy()


def leave_room(arrays: Arrays, state: WalkState, event: int, margin: int) -> None:
    """From now on leave so many bytes free when the event's op runs for the same position."""
    before = state.sequence[:event]
    position, op = np.unique(before[before < arrays.ops]).size, state.sequence[event]
    known = state.margin[:, : state.counts[MARGINS]]
    same = np.flatnonzero((known[0] == position) & (known[1] == op))
    if same.size:
        known[2, same[0]] = margin
    elif known.shape[1] < state.margin.shape[1]:
        state.margin[:, known.shape[1]] = position, op, margin
        state.tight[position] = 1
        state.counts[MARGINS] += 1


def to_events(arrays: Arrays, sequence: Ints) -> tuple[Ints, Ints]:
    """Kinds and subjects of the events of a schedule (`planner.core.lifetimes`), waits included."""
    n = arrays.ops
    do: list[int] = []
    what: list[int] = []
    flying: set[int] = set()
    for code in sequence.tolist():
        if code < n:
            row = arrays.reads[arrays.reads_ptr[code] : arrays.reads_ptr[code + 1]].tolist()
            for t in row if flying else ():
                if t in flying:
                    flying.discard(t)
                    do.append(WAIT)
                    what.append(t)
            do.append(RUN)
            what.append(code)
            continue
        t, kind = divmod(code - n, 3)
        do.append((DO_OFFLOAD, WAIT, PREFETCH)[kind])
        what.append(t)
        if kind == FETCH:
            flying.add(t)
    return np.array(do, dtype=np.int64), np.array(what, dtype=np.int64)
