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

from coop_plan.planner.core.arrays import Arrays, Flags, Floats, Ints, to_arrays
from coop_plan.planner.core.lifetimes import OFFLOAD as DO_OFFLOAD
from coop_plan.planner.core.lifetimes import PREFETCH, RUN, WAIT
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.joint.params import TRANSFERS, MoveParams

OFFLOAD, LEAVE, FETCH = range(3)
"""What may happen to a tensor beside being computed: added to n + 3t."""

NEVER = 1 << 40
"""An event that is not in the window."""

# Rows of `WalkState.tensor`. Of the trial: the copy that is read now; needed later; written outside
# the arena; the copy that is taken to the host; whether one that was fetched has not been waited
# for; whether it is fetched later; where its copy on the host stands, and its life; its reads next
# to an event; its offload. Of the window: where its tensor leaves the device, -1 before the window.
# Of what is around the window: there when it begins, and read; written outside the arena by then;
# needed after it; the state of its copies when it begins; the first transfer after it. And lists:
# there when it begins; needed after it; copied to the host; written outside.
(
    CURRENT,
    ALIVE,
    WRITTEN,
    TAKEN,
    FLYING,
    WANTED,
    HOST,
    HOST_BEGIN,
    HOST_END,
    LAST_READ,
    NEXT_READ,
    AT_OFFLOAD,
    AT_LEAVE,
    READY,
    GONE,
    NEEDED,
    HOST_READY,
    FLYING_READY,
    TAKEN_READY,
    AFTER,
    READY_LIST,
    NEEDED_LIST,
    COPIED_LIST,
    WRITTEN_LIST,
    TENSOR_ROWS,
) = range(25)
# Entries of HOST: no copy on the host, one under way, one there; and of AFTER, beside transfers.
NOWHERE, UNDER_WAY, THERE = range(3)
NOTHING = -1
# Rows of `WalkState.when`, µs from the begin of the window: the copy to the host is over, the copy
# back is; the same when the window begins; and how much nearer the end of all they are than compute
# when the window ends, or -inf where nobody waits for them any more.
AWAY, BACK, AWAY_READY, BACK_READY, AWAY_AFTER, BACK_AFTER = range(6)
# Entries of `WalkState.engine`: the same of the engines to the host and back.
OUT_READY, IN_READY, OUT_AFTER, IN_AFTER = range(4)
# Rows of `WalkState.op`: event of the first run, -1 before the window; whether it ran; marks.
FIRST, RAN, SEEN = range(3)
# Rows of `WalkState.copy`; events are the window's, -1 for what is there when it begins.
TENSOR, BEGIN, END = range(3)
# Entries of `WalkState.counts`.
(
    LENGTH,
    WINDOW,
    TRIAL,
    ROOM,
    READY_COUNT,
    NEEDED_COUNT,
    COPIED_READY,
    COPIED_COUNT,
    WRITTEN_COUNT,
    COPIES_READY,
    COPIES,
    WORST,
    OVER,
    POSITION,
    MARGINS,
    LINKED,
    COUNTS,
) = range(17)


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


class WalkState(NamedTuple):
    """
    Where the walk is, and what it needs besides.

    `sequence` is the one at hand, of which `counts[LENGTH]` events are in use; `window` a part of
    it, and `trial` what that may become; `begins` and `trial_begins` are when their events begin,
    µs from the window's begin. `inserted` lists what one change puts in. `again` says of an op
    whether it may run anywhere after its first run, `movable` of a tensor whether it may be copied
    to the host; `out_us` and `in_us` are what its copies take. `margin` lists (position, op, bytes
    to leave free while it runs between the first runs before and of that position), and `tight`
    flags the positions in it. `live` and `host_live` are scratch per event, `heads` and `nexts`
    lists of events to be put in.
    """

    numbers: MoveNumbers
    again: Flags
    movable: Flags
    out_us: Floats
    in_us: Floats
    sequence: Ints
    window: Ints
    trial: Ints
    begins: Floats
    trial_begins: Floats
    is_first: Flags
    stay: Flags
    live: Ints
    host_live: Ints
    tensor: Ints
    when: Floats
    engine: Floats
    op: Ints
    copy: Ints
    inserted: Ints
    heads: Ints
    nexts: Ints
    margin: Ints
    tight: Flags
    counts: Ints


def start(problem: Problem, room: int, params: MoveParams = TRANSFERS) -> WalkState:
    """A walk at no sequence yet, with room for so many events."""
    a, device = to_arrays(problem), problem.device
    n, count = a.ops, a.size.size
    makes = 1 + int(np.diff(a.makes_ptr).max(initial=1))
    with np.errstate(divide="ignore", invalid="ignore"):  # 0 bytes without a link
        out_us = device.copy_latency_us + a.bytes * 1e6 / np.float64(device.d2h_bytes_per_s)
        in_us = device.copy_latency_us + a.bytes * 1e6 / np.float64(device.h2d_bytes_per_s)
    movable = params.fetch_chance > 0 and "transfers" in problem.beyond_recomputation
    state = WalkState(
        numbers=MoveNumbers(**asdict(params)),
        again=np.array(problem.repeatable, dtype=np.uint8),
        movable=np.array(problem.movable, dtype=np.uint8) * np.uint8(movable),
        out_us=out_us,
        in_us=in_us,
        sequence=np.zeros(room, dtype=np.int64),
        window=np.zeros(room, dtype=np.int64),
        trial=np.zeros(room, dtype=np.int64),
        begins=np.zeros(room + 1),
        trial_begins=np.zeros(room + 1),
        is_first=np.zeros(room, dtype=np.uint8),
        stay=np.zeros(room, dtype=np.uint8),
        live=np.zeros(room + 2, dtype=np.int64),
        host_live=np.zeros(room + 2, dtype=np.int64),
        tensor=np.zeros((TENSOR_ROWS, count), dtype=np.int64),
        when=np.zeros((6, count)),
        engine=np.zeros(4),
        op=np.zeros((3, n), dtype=np.int64),
        copy=np.zeros((3, room * makes + 2 * count), dtype=np.int64),
        inserted=np.zeros(params.insertion, dtype=np.int64),
        heads=np.zeros(room + 2, dtype=np.int64),
        nexts=np.zeros(room, dtype=np.int64),
        margin=np.zeros((3, params.margins), dtype=np.int64),
        tight=np.zeros(n + 1, dtype=np.uint8),
        counts=np.zeros(COUNTS, dtype=np.int64),
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
