"""
A sequence with marks: what runs in which order, and what is read from a copy out of the host.

Of a closed program of n ops, o < n is a run of op o, and n + t a mark: what is read of tensor t
from there on is a copy that was fetched from the host. A mark says nothing of when: when tensors
leave and are fetched follows from the sequence (`planner.search.makespan.objective`). A tensor is
copied to the host once, after its first run, if any of its reads is marked. An event reads the
latest copy of each input, and a copy lives until its last read. Every sequence in which first runs
come in program order and whose reads find what they need is a schedule.

To a search a mark is a run that makes its tensor of nothing, in no time (`planner.search.compute`).
The last op is none of the graph's: it reads the outputs of the step, so that these may be away
until its end.
"""

from dataclasses import asdict, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coop_plan.planner.core.arrays import Flags, Floats, Ints, Program, to_arrays, to_program
from coop_plan.planner.core.lifetimes import OFFLOAD, PREFETCH, RUN, WAIT
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.search.compute import sequence
from coop_plan.planner.search.compute.params import DEFAULTS as ORDERS
from coop_plan.planner.search.compute.sequence import SearchState, allocate
from coop_plan.planner.search.makespan.params import MarkParams

Numbers = npt.NDArray[np.int32]

# Columns of `MarkerSearchState.transfer`: the place of the event that it is listed before, what it
# is, and its tensor.
BEFORE, KIND, WHAT = range(3)
# What a transfer is: the begin of a copy to the host, the moment the tensor leaves the device, when
# that is over, the begin of a copy back, and the wait for it.
GO, LEAVE, FETCH, ARRIVE = range(4)
# Entries of `MarkerSearchState.clock`, µs: when compute comes to the event at hand, and when the
# engines to the host and back are free; and (bytes) what the host has too much at all begins of
# copies.
NOW, OUT_FREE, IN_FREE, HOST_TOTAL = range(4)
# Entries of `MarkerSearchState.flow`: bytes that are live, those of them that wait to leave and are
# of no use any more, bytes on the host, and by how many it has too much at most; the tensors
# queued, those that have begun to leave and those of them that have left, and transfers; events,
# fetches, and the tensors that are moved; and whether fetches wait for what comes before their
# reads.
(
    LIVE,
    HELD,
    HOST_LIVE,
    HOST_MOST,
    QUEUED,
    LEAVING,
    LEFT_COUNT,
    TRANSFERS,
    SIZE,
    FETCHES,
    MOVED_COUNT,
    AHEAD,
    FLOWS,
) = range(13)
# Columns of `MarkerSearchState.mover`, of a tensor: whether the host gets it, whether it has left
# the device, its last fetch; the event of its first run, and the last one that reads what that
# made; the next tensor with the same one of the first and of the last.
MOVES, LEFT, LAST_FETCH, MADE, LAST_READ, NEXT_MADE, NEXT_READ = range(7)
# Columns of `MarkerSearchState.first_of`, of an event: the first tensor that is moved and made by
# it, and the first of which it is the last to read what was made.
MAKES, READS = range(2)


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
    resident_usually: float
    resident_rarely: float
    evicted_usually: float
    evicted_rarely: float
    fetched_chance: float
    link_price: float
    insertion: int


class MarkerSearchState(NamedTuple):
    """
    A search among sequences of runs and marks, and what the engines do in the one evaluated last.

    `orders` is the search. `movable` says of a tensor whether it may be copied to the host;
    `out_us` and `in_us` are what its copies take. The rest is of the candidate. `order` has the
    event of each place, `begins` is when it begins if nobody waits, µs; `fetched` lists the
    accesses of marks that are read, in the order of their first reads, and `reader` the places of
    these; `latest` has the places before which they begin to be fetched for nobody to wait, and
    `back` when they are there, µs. `moved` lists the tensors that the host gets, `mover` and
    `first_of` are about them. `queue` is a heap of those to be copied, by when that would be of
    use; `leaving` and `leaves` list those that are being copied and when each is over, µs;
    `transfer` all that goes and comes.
    """

    numbers: MarkNumbers
    orders: SearchState
    movable: Flags
    out_us: Floats
    in_us: Floats
    order: Numbers
    begins: Floats
    fetched: Numbers
    reader: Numbers
    latest: Numbers
    back: Floats
    moved: Numbers
    mover: Numbers
    first_of: Numbers
    queue: Ints
    leaving: Numbers
    leaves: Floats
    transfer: Numbers
    clock: Floats
    flow: Ints


def to_closed_program(problem: Problem) -> Program:
    """
    The program of `problem`, an op behind it that reads the outputs of the step, and the marks.

    As the op reads all outputs, one may lie in the place of another that comes back before. The
    marks are no ops of the program: `ops` does not count them.
    """
    arrays, n, count = to_arrays(problem), problem.op_count, problem.tensor_count
    a = to_program(arrays)
    outputs = np.flatnonzero(arrays.is_output & (1 - a.outside) & (a.producer >= 0))
    reads, makes, shares = a.reads_ptr[n], a.makes_ptr[n], arrays.shares_ptr[: n + 1]
    out, source = arrays.shares_out[: shares[n]], arrays.shares_in[: shares[n]]
    passed_on = (a.size[out] == a.size[source]) & (a.outside[out] == 0)
    pairs = np.append(0, passed_on.cumsum())[shares]
    nothing = np.zeros(1 + count, dtype=np.int64)
    return a._replace(
        ops=n + 1,
        reads_ptr=np.append(a.reads_ptr[: n + 1], reads + outputs.size + nothing),
        reads=np.append(a.reads[:reads], outputs),
        makes_ptr=np.append(a.makes_ptr[: n + 1], makes + np.arange(1 + count)),
        makes=np.append(a.makes[:makes], np.arange(count)),
        pairs_ptr=np.append(pairs, pairs[n] + nothing),
        pairs_out=out[passed_on],
        pairs_in=source[passed_on],
        cost=np.append(a.cost[:n], nothing.astype(np.float64)),
        workspace=np.append(a.workspace[:n], nothing),
        evictable=np.array(problem.rematerializable, dtype=np.uint8),
    )


def start(problem: Problem, a: Program, room: int, params: MarkParams) -> MarkerSearchState:
    """A state at no sequence yet of a closed program, with room for so many events."""
    device, count, bytes_ = problem.device, a.size.size, to_arrays(problem).bytes
    with np.errstate(divide="ignore", invalid="ignore"):  # 0 bytes without a link
        out_us = device.copy_latency_us + bytes_ * 1e6 / np.float64(device.d2h_bytes_per_s)
        in_us = device.copy_latency_us + bytes_ * 1e6 / np.float64(device.h2d_bytes_per_s)
    linked = "transfers" in problem.beyond_recomputation
    movable = np.array(problem.movable, dtype=np.uint8) * np.uint8(linked)
    again = np.array([*problem.rerunnable(problem.rematerializable), False], dtype=np.uint8)
    made, orders = a.producer >= 0, replace(ORDERS, insertion=params.insertion)
    spare = made & ((movable == 1) | ((a.evictable == 1) & (again[a.producer] == 1)))
    return MarkerSearchState(
        numbers=MarkNumbers(**asdict(params)),
        orders=allocate(a, room, orders, again, spare * (a.size > 0) * 1.0),
        movable=movable,
        out_us=out_us,
        in_us=in_us,
        order=np.zeros(room, dtype=np.int32),
        begins=np.zeros(room + 1),
        fetched=np.zeros(room, dtype=np.int32),
        reader=np.zeros(room, dtype=np.int32),
        latest=np.zeros(room, dtype=np.int32),
        back=np.zeros(room),
        moved=np.zeros(count, dtype=np.int32),
        mover=np.zeros((count, 7), dtype=np.int32),
        first_of=np.full((room + 1, 2), sequence.NONE, dtype=np.int32),
        queue=np.zeros((count, 2), dtype=np.int64),
        leaving=np.zeros(count, dtype=np.int32),
        leaves=np.zeros(count),
        transfer=np.zeros((2 * room + 2 * count, 3), dtype=np.int32),
        clock=np.zeros(4),
        flow=np.zeros(FLOWS, dtype=np.int64),
    )


def set_sequence(state: MarkerSearchState, events: Ints) -> None:
    """Be at a sequence, or at one of runs without the last op, which is added."""
    last = state.orders.again.size - 1
    sequence.set_sequence(state.orders, events if last in events else np.append(events, last))


def current_sequence(state: MarkerSearchState) -> Ints:
    """The sequence at hand."""
    return sequence.current_sequence(state.orders)


def to_events(state: MarkerSearchState) -> tuple[Ints, Ints]:
    """
    Kinds and subjects of the events of the schedule at hand (`planner.core.lifetimes`).

    The sequence is the one that was measured last.
    """
    kinds = (OFFLOAD, WAIT, PREFETCH, WAIT)
    last = state.orders.again.size - 1
    do: list[int] = []
    what: list[int] = []
    listed = iter(state.transfer[: state.flow[TRANSFERS]].tolist())
    following = next(listed, None)
    for place, code in enumerate(current_sequence(state).tolist()):
        while following is not None and following[BEFORE] <= place:
            do.append(kinds[following[KIND]])
            what.append(following[WHAT])
            following = next(listed, None)
        if code < last:
            do.append(RUN)
            what.append(code)
    return np.array(do, dtype=np.int64), np.array(what, dtype=np.int64)
