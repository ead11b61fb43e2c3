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

from coop_plan.planner.core.arrays import (
    Floats,
    Ints,
    IntTable,
    Program,
    to_arrays,
    to_program,
)
from coop_plan.planner.core.lifetimes import OFFLOAD, PREFETCH, RUN, WAIT
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.search.compute import columns as c
from coop_plan.planner.search.compute import sequence
from coop_plan.planner.search.compute.params import MoveParams
from coop_plan.planner.search.compute.sequence import Int32s, Int32Table, SearchState, allocate
from coop_plan.planner.search.makespan import columns as mc


class MakespanState(NamedTuple):
    """State of the joint search, and the transfers of the candidate that was evaluated last.

    `search` holds the sequence and its liveness. Per tensor:
    `offload_us` and `prefetch_us` the times of its copies, and `offload`.

    Per position: `order` is the event, `start_us` its start if compute never waits. Per prefetch,
    in the order of first reads: `prefetches` is the marker's access, `first_reader` the position of
    the first read, `latest_start` the last position at which it can begin without a stall,
    `arrival_us` its end.

    `offloaded` lists the offloaded tensors and `offload_head` their lists by event. `queue` is a
    heap of tensors to offload, keyed by the last reader's position. `sent` and `sent_end_us` list
    offloads in the order of their starts. `transfer` lists all transfer events; see
    `columns` for the columns and entries of `offload`, `transfer`, `clock` and `flow`.

    `home_copies`, `returned`, `versions` and `host_us` (0 for other tensors) are those of
    `planner.core.problem.Homes`; `host_size` is the bytes of a copy on the host, 0 of a home, which
    has its own place.
    """

    search: SearchState
    home_copies: Ints
    returned: IntTable
    versions: IntTable
    host_us: Floats
    host_size: Ints
    offload_us: Floats
    prefetch_us: Floats
    order: Int32s
    start_us: Floats
    prefetches: Int32s
    first_reader: Int32s
    latest_start: Int32s
    arrival_us: Floats
    offloaded: Int32s
    offload: Int32Table
    offload_head: Int32Table
    queue: IntTable
    sent: Int32s
    sent_end_us: Floats
    transfer: Int32Table
    clock: Floats
    flow: Ints


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
    device, tensors, bytes_ = problem.device, a.size.size, to_arrays(problem).bytes
    with np.errstate(divide="ignore", invalid="ignore"):  # 0 bytes without a link
        offload_us = device.copy_latency_us + bytes_ * 1e6 / np.float64(device.d2h_bytes_per_s)
        prefetch_us = device.copy_latency_us + bytes_ * 1e6 / np.float64(device.h2d_bytes_per_s)
    homes = problem.homes
    home_copies = np.array(homes.copies, dtype=np.int64)
    returned = np.array(homes.returned, dtype=np.int64).reshape(-1, 2)
    versions = np.array(homes.versions, dtype=np.int64).reshape(-1, 2)
    host_size = a.size.copy()
    host_us = np.zeros(tensors)
    for t, duration_us in homes.host_us:
        host_us[t] = duration_us
    host_size[home_copies] = host_size[returned[host_us[returned[:, 0]] == 0.0, 0]] = 0
    offload_us[home_copies] = prefetch_us[returned[:, 0]] = 0.0
    linked = "transfers" in problem.beyond_recomputation
    movable = np.array(problem.movable, dtype=np.uint8) * np.uint8(linked)
    movable[np.setdiff1d(versions[:, 1], home_copies)] = 0
    recomputable = np.array([*problem.rerunnable(problem.rematerializable), False], dtype=np.uint8)
    evictable = (a.producer >= 0) & (
        (movable == 1) | ((a.evictable == 1) & (recomputable[a.producer] == 1))
    )
    search = allocate(a, max_events, params, recomputable, evictable * (a.size > 0) * 1.0)
    return MakespanState(
        search=search._replace(movable=movable),
        home_copies=home_copies,
        returned=returned,
        versions=versions,
        host_us=host_us,
        host_size=host_size,
        offload_us=offload_us,
        prefetch_us=prefetch_us,
        order=np.zeros(max_events, dtype=np.int32),
        start_us=np.zeros(max_events + 1),
        prefetches=np.zeros(max_events, dtype=np.int32),
        first_reader=np.zeros(max_events, dtype=np.int32),
        latest_start=np.zeros(max_events, dtype=np.int32),
        arrival_us=np.zeros(max_events),
        offloaded=np.zeros(tensors, dtype=np.int32),
        offload=np.zeros((tensors, 7), dtype=np.int32),
        offload_head=np.full((max_events + 1, 2), c.NONE, dtype=np.int32),
        queue=np.zeros((tensors, 2), dtype=np.int64),
        sent=np.zeros(tensors, dtype=np.int32),
        sent_end_us=np.zeros(tensors),
        transfer=np.zeros((2 * max_events + 2 * tensors, 3), dtype=np.int32),
        clock=np.zeros(5),
        flow=np.zeros(mc.FLOW_SIZE, dtype=np.int64),
    )


def set_sequence(state: MakespanState, events: Ints) -> None:
    """Set the stored sequence; the artificial last op is appended if it is missing."""
    last = state.search.recomputable.size - 1
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
    kinds = (OFFLOAD, WAIT, PREFETCH, WAIT)
    last = state.search.recomputable.size - 1
    event_kinds: list[int] = []
    subjects: list[int] = []
    transfers = iter(state.transfer[: state.flow[mc.TRANSFER_COUNT]].tolist())
    transfer = next(transfers, None)
    for position, code in enumerate(current_sequence(state).tolist()):
        while transfer is not None and transfer[mc.BEFORE] <= position:
            event_kinds.append(kinds[transfer[mc.KIND]])
            subjects.append(transfer[mc.MOVED_TENSOR])
            transfer = next(transfers, None)
        if code < last:
            event_kinds.append(RUN)
            subjects.append(code)
    return np.array(event_kinds, dtype=np.int64), np.array(subjects, dtype=np.int64)
