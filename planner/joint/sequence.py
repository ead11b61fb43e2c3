"""
A sequence: what runs, and what is copied when, as one list of numbers.

Op o that runs is o. Of tensor t, with n ops in the program, n + 3t is the begin of its copy to the
host, n + 3t + 1 the moment it leaves the device, when that copy is over, and n + 3t + 2 the begin
of a copy back. A tensor is copied to the host once and may be fetched more than once. An event
reads the latest copy of each input, and a copy lives until its last read; compute waits for a
fetched copy right before its first read.
"""

from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from coop_plan.planner.core.arrays import Arrays, Flags, Floats, Ints, to_arrays
from coop_plan.planner.core.lifetimes import OFFLOAD as DO_OFFLOAD
from coop_plan.planner.core.lifetimes import PREFETCH, RUN, WAIT
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.joint.params import DEFAULTS, MoveParams

OFFLOAD, LEAVE, FETCH = range(3)
"""What may happen to a tensor beside being computed: added to n + 3t."""

# Rows of `JointState.tensor`: the copy that is read now; needed later, and at the end of the step;
# written outside the arena; where its copy on the host stands (see below); the copy that is taken;
# whether one that was fetched has not been waited for; whether it is fetched later; where the
# sequence at hand offloads it and lets it go, -1 for nowhere; the life of its copy on the host;
# its reads next to an event.
(
    CURRENT,
    ALIVE,
    NEEDED,
    WRITTEN,
    HOST,
    TAKEN,
    FLYING,
    WANTED,
    AT_OFFLOAD,
    AT_LEAVE,
    HOST_BEGIN,
    HOST_END,
    LAST_READ,
    NEXT_READ,
) = range(14)
# Entries of that row: no copy on the host, one under way, one there.
NOWHERE, UNDER_WAY, THERE = range(3)
# Rows of `JointState.when`, µs: the copy to the host is over; the copy back is.
AWAY, BACK = range(2)
# Rows of `JointState.op`: event of the first run, and marks.
FIRST, SEEN = range(2)
# Rows of `JointState.copy`.
TENSOR, BEGIN, END = range(3)
# Entries of `JointState.counts`.
LENGTH, TRIAL, COPIES, WORST, OVER, INSERTED = range(6)


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
    earliest: float
    early_chance: float
    usually: float
    kept_rarely: float
    gone_usually: float
    gone_rarely: float
    fetched_chance: float
    punctual_chance: float
    link_price: float
    insertion: int


class JointState(NamedTuple):
    """
    Where the walk is, and what it needs besides.

    `sequence` is the one at hand, of which `counts[LENGTH]` events are in use, and `trial` what it
    may become; `begins` and `trial_begins` are when their events begin, µs. `again` says of an op
    whether it may run anywhere after its first run, `movable` of a tensor whether it may be copied
    to the host; `out_us` and `in_us` are what its copies take. `change` and `host_change` are
    scratch per event, `heads` and `nexts` lists of events to be put in.
    """

    numbers: MoveNumbers
    again: Flags
    movable: Flags
    out_us: Floats
    in_us: Floats
    sequence: Ints
    trial: Ints
    begins: Floats
    trial_begins: Floats
    is_first: Flags
    stay: Flags
    live: Ints
    host_live: Ints
    tensor: Ints
    when: Floats
    op: Ints
    copy: Ints
    inserted: Ints
    heads: Ints
    nexts: Ints
    counts: Ints


def start(problem: Problem, room: int, params: MoveParams = DEFAULTS.moves) -> JointState:
    """A walk at no sequence yet, with room for so many events."""
    a, device = to_arrays(problem), problem.device
    n, count = a.ops, a.size.size
    makes = 1 + int(np.diff(a.makes_ptr).max(initial=1))
    with np.errstate(divide="ignore"):
        out_us = device.copy_latency_us + a.bytes * 1e6 / np.float64(device.d2h_bytes_per_s)
        in_us = device.copy_latency_us + a.bytes * 1e6 / np.float64(device.h2d_bytes_per_s)
    state = JointState(
        numbers=MoveNumbers(**asdict(params)),
        again=np.array(problem.repeatable, dtype=np.uint8),
        movable=np.array(problem.movable, dtype=np.uint8),
        out_us=out_us,
        in_us=in_us,
        sequence=np.zeros(room, dtype=np.int64),
        trial=np.zeros(room, dtype=np.int64),
        begins=np.zeros(room + 1),
        trial_begins=np.zeros(room + 1),
        is_first=np.zeros(room, dtype=np.uint8),
        stay=np.zeros(room, dtype=np.uint8),
        live=np.zeros(room + 2, dtype=np.int64),
        host_live=np.zeros(room + 2, dtype=np.int64),
        tensor=np.zeros((14, count), dtype=np.int64),
        when=np.zeros((2, count)),
        op=np.zeros((2, n), dtype=np.int64),
        copy=np.zeros((3, room * makes), dtype=np.int64),
        inserted=np.zeros(params.insertion, dtype=np.int64),
        heads=np.zeros(room + 2, dtype=np.int64),
        nexts=np.zeros(room, dtype=np.int64),
        counts=np.zeros(6, dtype=np.int64),
    )
    state.tensor[NEEDED] = a.is_output.astype(np.int64) * (a.outside == 0)
    state.tensor[ALIVE] = state.tensor[NEEDED]
    return state


def go_to(state: JointState, sequence: Ints) -> None:
    """Be at a sequence."""
    state.sequence[: sequence.size] = sequence
    state.counts[LENGTH] = sequence.size


def here(state: JointState) -> Ints:
    """The sequence at hand."""
    return state.sequence[: state.counts[LENGTH]].copy()


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
