"""State of the joint search: a sequence of runs and prefetch markers, and its simulated transfers.

In a closed program of n ops, code o < n is a run of op o and code n + t a prefetch marker of tensor
t: from there on, reads of t use a copy prefetched from the host. The marker fixes no time;
`planner.search.makespan.objective` computes when each transfer begins. A tensor with a marker is
offloaded once, after its first run. An event reads the latest copy of each input, and a copy is
live until its last read. A sequence is a schedule if first runs are in program order and each read
has a live copy.

`planner.search.compute` treats a marker as a run that writes its tensor at no cost. The last op of
a closed program is artificial: it reads the outputs of the step, which may be evicted until then.
"""

from typing import NamedTuple

import numpy as np

from coop_plan.planner.core.arrays import Floats, Ints, Program, to_arrays, to_program
from coop_plan.planner.core.lifetimes import PREFETCH, RUN
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.records import Int32, Record, Table, record, table
from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.search.compute import sequence
from coop_plan.planner.search.compute.params import MoveParams
from coop_plan.planner.search.compute.sequence import (
    MIN_COST_US,
    NONE,
    Int32s,
    SearchState,
    allocate,
)


class Tensor(Record):
    """A tensor: the times of its copies (µs), and its offload in the candidate.

    `host_us` (0 for other tensors) is that of `planner.core.problem.Homes`; `host_bytes` is the
    bytes of a copy on the host, 0 of a home, which has its own place. An offloaded tensor is listed
    by the event that produces it and by the last that reads that copy.
    """

    offload_us: float
    prefetch_us: float
    host_us: float
    bytes: int
    host_bytes: int
    last_prefetch: Int32
    producer: Int32
    last_reader: Int32
    next_produced: Int32
    next_last_read: Int32
    is_offloaded: bool
    is_away: bool  # its offload has ended


class Event(Record):
    """First offloaded tensor that an event produces, and first of which it is the last reader."""

    produced: Int32
    last_reads: Int32


class Returned(Record):
    """An entry of `Homes.returned` (`planner.core.problem`)."""

    tensor: Int32
    op: Int32


class Version(Record):
    """An entry of `Homes.versions` (`planner.core.problem`): an output and its input."""

    made: Int32
    used: Int32


class Prefetch(Record):
    """A prefetch: its marker's access, the position of its first read, and its end.

    `latest_start` is the last position at which it can begin without a stall.
    """

    arrival_us: float
    marker: Int32
    first_reader: Int32
    latest_start: Int32


class Queued(Record):
    """A tensor to offload, and the position of its last reader, the key of the heap."""

    last_reader: int
    tensor: int


class Sent(Record):
    """An offload that began, and its end."""

    end_us: float
    tensor: Int32


class Transfer(Record):
    """A transfer event: its kind in `planner.core.lifetimes`, and the position that it precedes."""

    before: Int32
    kind: Int32
    tensor: Int32


class Flow(Record):
    """Clocks (µs), bytes and counts of the simulation of a candidate."""

    now_us: float  # compute's clock
    out_free_us: float  # when the engine to the host is free
    in_free_us: float  # when the engine from the host is free
    host_end_us: float  # when the host has computed what follows the offloads begun
    launched_us: float  # when the host has launched what it launches ahead of the device
    launch_us: float  # of an op, if the host runs ahead; else a part of its cost
    copy_launch_us: float
    runs_ahead: bool
    host_excess_sum: float  # bytes, over all offloads
    host_capacity: int  # negative: no limit
    live: int
    awaiting_offload: int  # of the live bytes: unused and waiting for their offload
    host_live: int
    host_excess: int
    queued: int  # lengths of the lists
    sent: int
    left: int  # offloads ended
    transfers: int
    events: int
    prefetches: int
    offloaded: int
    look_ahead: bool  # prefetches wait for memory that events before their read will need


class MakespanState(NamedTuple):
    """State of the joint search, and the transfers of the candidate that was evaluated last.

    `search` holds the sequence and its liveness. Per position: `order` is the event, `start_us` its
    start if compute never waits for copies, `work_us` the cost of the runs before. `prefetch` is in
    the order of first reads, `sent` in the order of starts, `queue` a heap, and `offloaded` lists
    tensors.

    `home_copies` is `planner.core.problem.Homes.copies`.
    """

    search: SearchState
    home_copies: Ints
    returned: Table[Returned]
    versions: Table[Version]
    tensor: Table[Tensor]
    event: Table[Event]
    order: Int32s
    start_us: Floats
    work_us: Floats
    prefetch: Table[Prefetch]
    offloaded: Int32s
    queue: Table[Queued]
    sent: Table[Sent]
    transfer: Table[Transfer]
    flow: Flow


def to_closed_program(problem: Problem) -> Program:
    """The program, an op that reads the outputs of the step, and a marker per tensor.

    As that op reads all outputs at the end, an output can be evicted before. `ops` does not count
    markers.
    """
    arrays, n, count = to_arrays(problem), problem.op_count, problem.tensor_count
    a = to_program(arrays)
    outputs = np.flatnonzero(arrays.is_output & (1 - a.outside) & (a.producer >= 0))
    reads, makes, shares = a.reads_ptr[n], a.makes_ptr[n], arrays.shares_ptr[: n + 1]
    out, source = arrays.shares_out[: shares[n]], arrays.shares_in[: shares[n]]
    pairs_allowed = (a.size[out] == a.size[source]) & (a.outside[out] == 0)
    pairs = np.append(0, pairs_allowed.cumsum())[shares]
    zeros = np.zeros(1 + count, dtype=np.int64)
    return a._replace(
        ops=n + 1,
        reads_ptr=np.append(a.reads_ptr[: n + 1], reads + outputs.size + zeros),
        reads=np.append(a.reads[:reads], outputs),
        makes_ptr=np.append(a.makes_ptr[: n + 1], makes + np.arange(1 + count)),
        makes=np.append(a.makes[:makes], np.arange(count)),
        pairs_ptr=np.append(pairs, pairs[n] + zeros),
        pairs_out=out[pairs_allowed],
        pairs_in=source[pairs_allowed],
        cost=np.append(a.cost[:n], zeros.astype(np.float64)),
        workspace=np.append(a.workspace[:n], zeros),
        evictable=np.array(problem.rematerializable, dtype=np.uint8),
    )


def new_state(problem: Problem, a: Program, max_events: int, params: MoveParams) -> MakespanState:
    """State without a sequence, for up to `max_events` events of a closed program."""
    device, homes, bytes_ = problem.device, problem.homes, to_arrays(problem).bytes
    home_copies = np.array(homes.copies, dtype=np.int64)
    returned, versions = table(Returned, len(homes.returned)), table(Version, len(homes.versions))
    returned[:], versions[:] = list(homes.returned), list(homes.versions)
    tensor, event = table(Tensor, a.size.size), table(Event, max_events + 1)
    with np.errstate(divide="ignore", invalid="ignore"):  # 0 bytes without a link
        tensor["offload_us"] = bytes_ * 1e6 / np.float64(device.d2h_bytes_per_s)
        tensor["prefetch_us"] = bytes_ * 1e6 / np.float64(device.h2d_bytes_per_s)
    tensor["offload_us"] += device.copy_latency_us
    tensor["prefetch_us"] += device.copy_latency_us
    tensor["bytes"] = tensor["host_bytes"] = a.size
    for t, duration_us in homes.host_us:
        tensor[t].host_us = duration_us
    tensor["offload_us"][home_copies] = tensor["host_bytes"][home_copies] = 0
    for t, _ in homes.returned:
        tensor[t].prefetch_us = 0.0
        if tensor[t].host_us == 0.0:
            tensor[t].host_bytes = 0
    event["produced"] = event["last_reads"] = NONE
    linked = "transfers" in problem.beyond_recomputation
    movable = np.array(problem.movable, dtype=np.uint8) * np.uint8(linked)
    movable[np.setdiff1d(versions["used"], home_copies)] = 0
    recomputable = np.array([*problem.rerunnable(problem.rematerializable), False], dtype=np.uint8)
    rerunnable = (a.evictable == 1) & (recomputable[a.producer] == 1)
    # A copy engine's µs counts 0.3 of compute's; its launch counts in full.
    launch_us = device.copy_launch_us
    again = movable / np.fmax(0.3 * tensor["prefetch_us"] + launch_us, MIN_COST_US)
    both_us = tensor["offload_us"] + tensor["prefetch_us"]
    gain_per_byte = again + rerunnable / np.maximum(a.cost[a.producer], MIN_COST_US)
    gain_per_byte *= (a.producer >= 0) & (a.size > 0)
    search = allocate(a, max_events, params, recomputable, gain_per_byte)
    search.tensor["is_movable"], search.tensor["again_per_byte"] = movable, again
    search.tensor["away_per_byte"] = movable / np.fmax(0.3 * both_us + 2 * launch_us, MIN_COST_US)
    flow, host = record(Flow), problem.host_budget
    flow.host_capacity = -1 if host is None else host
    flow.runs_ahead, flow.copy_launch_us = not device.is_host, device.copy_launch_us
    flow.launch_us = 0.0 if device.is_host else device.launch_us
    return MakespanState(
        search=search,
        home_copies=home_copies,
        returned=returned,
        versions=versions,
        tensor=tensor,
        event=event,
        order=np.zeros(max_events, dtype=np.int32),
        start_us=np.zeros(max_events + 1),
        work_us=np.zeros(max_events + 1),
        prefetch=table(Prefetch, max_events),
        offloaded=np.zeros(a.size.size, dtype=np.int32),
        queue=table(Queued, a.size.size),
        sent=table(Sent, a.size.size),
        transfer=table(Transfer, 2 * max_events + 2 * a.size.size),
        flow=flow,
    )


def _last_op(state: MakespanState) -> int:
    """The artificial last op, before the markers, one per tensor."""
    return state.search.op.size - state.tensor.size - 1


def set_sequence(state: MakespanState, events: Ints) -> None:
    """Set the stored sequence; the artificial last op is appended if it is missing."""
    last = _last_op(state)
    sequence.set_sequence(state.search, events if last in events else np.append(events, last))


def current_sequence(state: MakespanState) -> Ints:
    """Copy of the stored sequence."""
    return sequence.current_sequence(state.search)


def to_sequence(schedule: Schedule) -> Ints:
    """Sequence of a schedule: its runs, with a prefetch marker at the start of each prefetch."""
    op_of = np.array([variant.op for variant in schedule.problem.variants], dtype=np.int64)
    runs = schedule.do == RUN
    codes = schedule.what + schedule.problem.op_count + 1
    codes[runs] = op_of[schedule.what[runs]]
    kept: Ints = codes[runs | (schedule.do == PREFETCH)]
    return kept


def to_events(state: MakespanState) -> tuple[Ints, Ints]:
    """Event kinds and subjects (`planner.core.lifetimes`) of the sequence evaluated last."""
    kinds: list[int] = []
    subjects: list[int] = []
    transfers = iter(state.transfer[: state.flow.transfers].tolist())
    before, kind, tensor = next(transfers, (np.inf, 0, 0))
    for position, code in enumerate(current_sequence(state).tolist()):
        while before <= position:
            kinds.append(kind)
            subjects.append(tensor)
            before, kind, tensor = next(transfers, (np.inf, 0, 0))
        if code < _last_op(state):
            kinds.append(RUN)
            subjects.append(code)
    return np.array(kinds, dtype=np.int64), np.array(subjects, dtype=np.int64)
