"""
A sequence with marks: what runs in which order, and what is read from a copy out of the host.

Of a program of n ops, o < n is a run of op o, and n + t a mark: what is read of tensor t from there
on is a copy that was fetched from the host. A mark says nothing of when: when tensors leave and
are fetched follows from the sequence (`planner.joint.timing`). A tensor is copied to the host once,
after its first run, if any of its reads is marked. An event reads the latest copy of each input,
and a copy lives until its last read. Every sequence in which first runs come in program order and
whose reads find what they need is a schedule.

The last op is none of the graph's: it reads the outputs of the step, so that these may be away
until its end.
"""

from dataclasses import asdict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coop_plan.planner.core.arrays import Flags, Floats, Ints, Program, to_arrays, to_program
from coop_plan.planner.core.compiled import inner
from coop_plan.planner.core.lifetimes import OFFLOAD, PREFETCH, RUN, WAIT
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.joint.params import MarkParams

Numbers = npt.NDArray[np.int32]

NONE = -1
"""No event, no copy."""

# Columns of `MarkState.copy`: its tensor; the event that makes it, or is its mark; the first and
# the last one that reads it, the number of events where it is there in the end; whether it is
# fetched; the next copy of the tensor.
TENSOR, BEGIN, FIRST, LAST, FETCHED, NEXT = range(6)
# Columns of `MarkState.transfer`: the event that it is listed before, what it is, and its tensor.
BEFORE, KIND, WHAT = range(3)
# What a transfer is: the begin of a copy to the host, the moment the tensor leaves the device, when
# that is over, the begin of a copy back, and the wait for it.
GO, LEAVE, FETCH, ARRIVE = range(4)
# Entries of `MarkState.counts`: events, copies, fetched copies; the fullest event, and by how many
# bytes it is too full.
EVENTS, COPIES, FETCHES, WORST, OVER = range(5)
# Entries of `MarkState.clock`, µs: when compute comes to the event at hand, and when the engines to
# the host and back are free; and (bytes) what the host has too much at all begins of copies.
NOW, OUT_FREE, IN_FREE, HOST_TOTAL = range(4)
# Entries of `MarkState.flow`: bytes that are live, those of them that wait to leave and are of no
# use any more, bytes on the host, and by how many it has too much at most; the tensors queued,
# those that have begun to leave and those of them that have left, and transfers.
LIVE, HELD, HOST_LIVE, HOST_MOST, QUEUED, LEAVING, LEFT_COUNT, TRANSFERS = range(8)
# Columns of `MarkState.tensor`: whether the host gets it, whether it has left the device, and the
# last copy that is fetched.
MOVES, LEFT, LAST_FETCH = range(3)


class MarkNumbers(NamedTuple):
    """`MarkParams` for compiled code; see there."""

    repairs: int
    least_excess: float
    spread: float
    mend_chance: float
    recompute_chance: float
    fetch_chance: float
    convert_chance: float
    move_chance: float
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
    link_price: float
    insertion: int


class MarkState(NamedTuple):
    """
    Two sequences, the current one and a trial, each with what is known of it, and scratch.

    The first index of `code`, `first_run`, `copy`, `head`, `counts` and `op` is the *side*, which
    of both. `code` lists the events, `first_run` flags those of ops' first runs, `op` is the event
    of each op's first run. `copy` are the copies of tensors, `head` the first one of each. The rest
    is of the side that was evaluated last. `tail` are the last copies; `begins` is when events
    begin if nobody waits, µs; `ending` and `beside` list the copies that end with each event;
    `fetched` lists fetched copies in the order of their first reads, `latest` the events before
    which they begin to be fetched for nobody to wait, `back` when they are there, µs. `queue` is a
    heap of tensors to be copied to the host, by when that would be of use; `leaving` and `leaves`
    list those that are being copied and when each is over, µs; `transfer` all that goes and comes.
    `inserted` lists what one change puts in.

    `again` says of an op whether it may run anywhere after its first run, `movable` of a tensor
    whether it may be copied to the host; `out_us` and `in_us` are what its copies take.
    """

    numbers: MarkNumbers
    again: Flags
    movable: Flags
    out_us: Floats
    in_us: Floats
    code: Ints
    first_run: Flags
    copy: Numbers
    head: Numbers
    counts: Ints
    op: Numbers
    tail: Numbers
    begins: Floats
    ending: Numbers
    beside: Numbers
    fetched: Numbers
    latest: Numbers
    back: Floats
    tensor: Numbers
    queue: Ints
    leaving: Numbers
    leaves: Floats
    transfer: Numbers
    clock: Floats
    flow: Ints
    inserted: Ints
    wanted: Flags


def to_closed_program(problem: Problem) -> Program:
    """
    The program of `problem` and the op behind it that reads the outputs of the step.

    As it reads them all, an output may lie in the place of another one that comes back before.
    """
    arrays, n = to_arrays(problem), problem.op_count
    a = to_program(arrays)
    outputs = np.flatnonzero(arrays.is_output & (1 - a.outside) & (a.producer >= 0))
    reads, makes, shares = a.reads_ptr[n], a.makes_ptr[n], arrays.shares_ptr[: n + 1]
    out, source = arrays.shares_out[: shares[n]], arrays.shares_in[: shares[n]]
    passed_on = (a.size[out] == a.size[source]) & (a.outside[out] == 0)
    pairs = np.append(0, passed_on.cumsum())[shares]
    return a._replace(
        ops=n + 1,
        reads_ptr=np.append(a.reads_ptr[: n + 1], reads + outputs.size),
        reads=np.append(a.reads[:reads], outputs),
        makes_ptr=np.append(a.makes_ptr[: n + 1], makes),
        pairs_ptr=np.append(pairs, pairs[n]),
        pairs_out=out[passed_on],
        pairs_in=source[passed_on],
        cost=np.append(a.cost[:n], 0.0),
        workspace=np.append(a.workspace[:n], 0),
        evictable=np.array(problem.remakeable, dtype=np.uint8),
    )


def start(problem: Problem, a: Program, room: int, params: MarkParams) -> MarkState:
    """A state at no sequence of a closed program yet, with room for so many events."""
    device = problem.device
    n, count, bytes_ = a.ops, a.size.size, to_arrays(problem).bytes
    most = int(np.diff(a.makes_ptr[: n + 1]).max(initial=1))
    copies = min(room * most, room + 4 * int(a.makes_ptr[n]) + 64 * most)
    with np.errstate(divide="ignore", invalid="ignore"):  # 0 bytes without a link
        out_us = device.copy_latency_us + bytes_ * 1e6 / np.float64(device.d2h_bytes_per_s)
        in_us = device.copy_latency_us + bytes_ * 1e6 / np.float64(device.h2d_bytes_per_s)
    linked = "transfers" in problem.beyond_recomputation
    return MarkState(
        numbers=MarkNumbers(**asdict(params)),
        again=np.array([*problem.repeatable(problem.remakeable), False], dtype=np.uint8),
        movable=np.array(problem.movable, dtype=np.uint8) * np.uint8(linked),
        out_us=out_us,
        in_us=in_us,
        code=np.zeros((2, room), dtype=np.int64),
        first_run=np.zeros((2, room), dtype=np.uint8),
        copy=np.zeros((2, copies, 6), dtype=np.int32),
        head=np.zeros((2, count), dtype=np.int32),
        counts=np.zeros((2, 5), dtype=np.int64),
        op=np.zeros((2, n), dtype=np.int32),
        tail=np.zeros(count, dtype=np.int32),
        begins=np.zeros(room + 1),
        ending=np.zeros(room + 1, dtype=np.int32),
        beside=np.zeros(copies, dtype=np.int32),
        fetched=np.zeros(room, dtype=np.int32),
        latest=np.zeros(room, dtype=np.int32),
        back=np.zeros(copies),
        tensor=np.zeros((count, 3), dtype=np.int32),
        queue=np.zeros((count, 2), dtype=np.int64),
        leaving=np.zeros(count, dtype=np.int32),
        leaves=np.zeros(count),
        transfer=np.zeros((2 * room + 2 * count, 3), dtype=np.int32),
        clock=np.zeros(4),
        flow=np.zeros(8, dtype=np.int64),
        inserted=np.zeros(params.insertion, dtype=np.int64),
        wanted=np.zeros(count, dtype=np.uint8),
    )


def go_to(state: MarkState, sequence: Ints) -> None:
    """Be at a sequence, or at one of runs without the last op, which is added."""
    last = state.op.shape[1] - 1
    closed = sequence if last in sequence else np.append(sequence, last)
    state.code[0, : closed.size] = closed
    state.counts[0, EVENTS] = closed.size


def here(state: MarkState) -> Ints:
    """The sequence at hand."""
    return state.code[0, : state.counts[0, EVENTS]].copy()


def to_events(state: MarkState) -> tuple[Ints, Ints]:
    """
    Kinds and subjects of the events of the schedule at hand (`planner.core.lifetimes`).

    The sequence is the one that was measured last.
    """
    kinds = (OFFLOAD, WAIT, PREFETCH, WAIT)
    last = state.op.shape[1] - 1
    do: list[int] = []
    what: list[int] = []
    listed = iter(state.transfer[: state.flow[TRANSFERS]].tolist())
    following = next(listed, None)
    for event, code in enumerate(here(state).tolist()):
        while following is not None and following[BEFORE] <= event:
            do.append(kinds[following[KIND]])
            what.append(following[WHAT])
            following = next(listed, None)
        if code < last:
            do.append(RUN)
            what.append(code)
    return np.array(do, dtype=np.int64), np.array(what, dtype=np.int64)


@inner
def collect(a: Program, s: MarkState, side: int) -> None:
    """Take out runs and marks that serve nothing, and find the first run of each op."""
    size, code, first_run = s.counts[side, EVENTS], s.code[side], s.first_run[side]
    wanted = s.wanted
    for op in range(a.ops):
        s.op[side, op] = NONE
    for e in range(size):
        first_run[e] = 0
        if code[e] < a.ops and s.op[side, code[e]] == NONE:
            s.op[side, code[e]] = e
            first_run[e] = 1
    wanted[:] = 0
    kept = size
    for e in range(size - 1, -1, -1):
        of_use = bool(first_run[e] == 1)
        if code[e] >= a.ops:
            of_use = bool(wanted[code[e] - a.ops] == 1)
            wanted[code[e] - a.ops] = 0
        else:
            made, end = a.makes_ptr[code[e]], a.makes_ptr[code[e] + 1]
            for k in range(made, end):
                of_use = of_use or bool(wanted[a.makes[k]] & a.evictable[a.makes[k]])
            for k in range(made, end if of_use else made):
                wanted[a.makes[k]] &= 1 - a.evictable[a.makes[k]]
            read = a.reads_ptr[code[e]]
            for k in range(read, a.reads_ptr[code[e] + 1] if of_use else read):
                wanted[a.reads[k]] = 1
        if of_use:
            kept -= 1
            code[kept], first_run[kept] = code[e], first_run[e]
    s.counts[side, EVENTS] = size - kept
    for e in range(size - kept):
        code[e], first_run[e] = code[kept + e], first_run[kept + e]
        if first_run[e] == 1:
            s.op[side, code[e]] = e
