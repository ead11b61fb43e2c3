"""State of one simulated step, as arrays for compiled code."""

from itertools import permutations
from typing import NamedTuple

import numpy as np

from coop_plan.planner.core.arrays import Flags, Ints
from coop_plan.planner.core.lifetimes import OFFLOAD, RUN, WAIT
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.records import Record, Table, record, table

FREE = -1
"""Owner of a free block."""

MIN_STALENESS_US = 1e-3
"""Lower bound on the staleness of a tensor in a score, µs."""


class Rule(NamedTuple):
    """Choice of victims: Coop's window, DTR's tensor, or DTE's (`counts_neighbours`)."""

    window: bool = False
    counts_neighbours: bool = False


class Transfers(NamedTuple):
    """Parts of a method with transfers (`planner.online.delta`); by default there are none."""

    swaps: bool = False
    recomputes: bool = False
    filter: bool = False
    director: bool = False
    prefetch: bool = False
    overlap: bool = False


class Block(Record):
    """A block of the arena, and its cost in the current choice of a window, µs per µs.

    An owner is a tensor, `FREE`, or the number of tensors for a transient buffer of the current op.
    """

    offset: int
    bytes: int
    owner: int
    cost: float


class Hole(Record):
    """A free block."""

    offset: int
    bytes: int


class Tensor(Record):
    """A tensor: its producer's cost, its last access and its copies (µs), and its residency."""

    cost_us: float
    last_access_us: float
    offload_us: float  # of a copy to the host
    prefetch_us: float
    offload_end_us: float
    prefetch_end_us: float
    offset: int
    visited: int  # stamp of the last graph traversal
    node: int  # of the union-find, or -1
    pins: int
    offload_order: int  # number of its offload
    is_live: bool
    was_live: bool  # before the current op
    is_written: bool  # it was produced before
    is_retained: bool  # though dead
    is_evictable: bool
    is_hosted: bool  # on the host
    is_leaving: bool  # being offloaded
    is_arriving: bool  # being prefetched
    is_movable: bool  # can be offloaded
    is_home: bool  # a resident with a home on the host; clean if `is_hosted`


class Op(Record):
    """An op: the stamp of the last graph traversal, and its allocation."""

    seen: int
    from_right: bool  # its outputs are allocated from the right
    is_open: bool  # on the stack with its inputs pinned


class Part(Record):
    """A node of the union-find of evicted tensors: component cost, µs; stamp of the last query."""

    cost_us: float
    parent: int
    seen: int


class Event(Record):
    """An event: its kind and subject (`planner.core.lifetimes`), and its workspace's offset."""

    do: int
    what: int
    workspace: int


class Drop(Record):
    """The end of a tensor's lifetime after an event."""

    event: int
    tensor: int


class Inplace(Record):
    """An output that took over the address of an input."""

    event: int
    out: int
    source: int


class Now(Record):
    """Scalars of a run: clocks (µs), bytes, and lengths of lists."""

    clock_us: float
    out_free_us: float  # when the engine to the host is free
    in_free_us: float  # when the engine from the host is free
    free_ratios: float  # sum over failed allocations
    used: int  # bytes allocated
    host_bytes: int
    blocks: int
    holes: int
    nodes: int
    events: int
    offsets: int
    drops: int
    inplace: int
    transient: int
    retained: int
    failures: int  # allocations
    evicted: int  # tensors, by failed allocations
    offloads: int
    stamp: int  # of the last graph traversal
    has_prefetched: bool


class ArenaState(NamedTuple):
    """Blocks, evicted components, tensors and the record of a run.

    `block` is in address order; adjacent free blocks are always merged. `hole` lists the free ones,
    sorted by bytes and offset, `victims` the tensors of an eviction, `retained` dead tensors, and
    `transient` the offsets of the current op's transient buffers. `near_ptr` and `near` are the
    adjacency of e*. `overwrites` flags the entries of `Arrays.reads` that their op overwrites.
    `stack` and `to_visit` are stacks of graph traversals.

    At least `reserve_bytes` shall be free or being offloaded after each op.

    With `whole_closure` an op's whole recompute closure is pinned at once, a tensor read only by it
    is freed with its last pin, and an access is dated to the start of an op that reads or writes
    the tensor.
    """

    capacity: int
    host_budget: int
    reserve_bytes: int
    whole_closure: bool
    transfers: Transfers
    now: Now
    block: Table[Block]
    hole: Table[Hole]
    victims: Ints
    near_ptr: Ints
    near: Ints
    overwrites: Flags
    tensor: Table[Tensor]
    op: Table[Op]
    part: Table[Part]
    event: Table[Event]
    offsets: Ints
    drop: Table[Drop]
    inplace: Table[Inplace]
    stack: Ints
    transient: Ints
    retained: Ints
    to_visit: Ints


def empty_arena(
    problem: Problem,
    capacity: int,
    events: int,
    *,
    partition: bool,
    whole_closure: bool = True,
    dependents: bool = True,
    transfers: Transfers | None = None,
    gaps: bool = True,
) -> ArenaState:
    """An empty arena of `capacity` bytes with a record of up to `events` events.

    Without `gaps` only bytes count: addresses are unlimited, so no free block is too small. For
    `dependents` see `_neighbours`.
    """
    transfers = transfers or Transfers()
    n, count = problem.op_count, problem.tensor_count
    max_outputs = max((len(tensors) for tensors in problem.op_outputs), default=0)
    outputs = max(1, sum(len(tensors) for tensors in problem.op_outputs))
    blocks = 2 * (count + max_outputs) + 8
    # Between two events at most every tensor is dropped once.
    drops = -(-events * outputs // max(n, 1)) + 2 * count + 64 + events * transfers.swaps
    near_ptr, near = _neighbours(problem, dependents=dependents)
    state = ArenaState(
        capacity=capacity,
        host_budget=-1 if problem.host_budget is None else problem.host_budget,
        reserve_bytes=capacity // 10,
        whole_closure=whole_closure,
        transfers=transfers,
        now=record(Now),
        block=table(Block, blocks),
        hole=table(Hole, blocks),
        victims=np.empty(blocks, dtype=np.int64),
        near_ptr=near_ptr,
        near=near,
        overwrites=_overwrites(problem),
        tensor=table(Tensor, count),
        op=table(Op, n),
        part=table(Part, drops),
        event=table(Event, events),
        offsets=np.empty(drops, dtype=np.int64),
        drop=table(Drop, drops),
        inplace=table(Inplace, drops),
        stack=np.empty(events + count, dtype=np.int64),
        transient=np.empty(max_outputs + 1, dtype=np.int64),
        retained=np.empty(count, dtype=np.int64),
        to_visit=np.empty(count + 1, dtype=np.int64),
    )
    tensor = state.tensor
    tensor["node"] = -1
    tensor["offload_us"] = tensor["prefetch_us"] = np.inf
    if transfers.swaps and problem.device.linked:
        device, size = problem.device, np.array(problem.bytes)
        tensor["is_movable"] = np.array(problem.movable) > np.array(problem.is_output)
        fixed_us = device.copy_latency_us + device.copy_launch_us
        tensor["offload_us"] = fixed_us + size * 1e6 / device.d2h_bytes_per_s
        tensor["prefetch_us"] = fixed_us + size * 1e6 / device.h2d_bytes_per_s
    tensor["is_evictable"] = problem.evictable
    tensor["cost_us"] = [problem.cost[p] if p >= 0 else 0.0 for p in problem.producer]
    if partition:
        state.op["from_right"] = _is_expensive(problem)
    _begin_on_host(problem, state)
    if capacity:
        state.block[0].bytes = state.hole[0].bytes = capacity if gaps else 1 << 62
        state.block[0].owner = FREE
        state.now.blocks = state.now.holes = 1
    return state


def _neighbours(problem: Problem, *, dependents: bool) -> tuple[Ints, Ints]:
    """
    Adjacency of e*: per tensor, the inputs of its producer and the outputs computed from it (DTR).

    Without `dependents`: the inputs of its producer and the producer's other outputs (OneFlow).
    """
    pairs = [
        (made, read)
        for makes, reads in zip(problem.makes, problem.reads, strict=True)
        for made in makes
        for read in reads
    ]
    if dependents:
        pairs += [(read, made) for made, read in pairs]
    else:
        pairs += [pair for makes in problem.makes for pair in permutations(makes, 2)]
    table = np.unique(np.array(pairs, dtype=np.int64).reshape(-1, 2), axis=0)
    pointer = np.zeros(problem.tensor_count + 1, dtype=np.int64)
    np.cumsum(np.bincount(table[:, 0], minlength=problem.tensor_count), out=pointer[1:])
    return pointer, np.ascontiguousarray(table[:, 1])


def _overwrites(problem: Problem) -> Flags:
    """Flags of the entries of `Arrays.reads` of default variants that their op overwrites."""
    tensors = problem.graph.tensors
    return np.array(
        [
            tensors[t].id in op.mutates
            for op, reads in zip(problem.graph.ops, problem.reads, strict=True)
            for t in reads
        ],
        dtype=np.uint8,
    )


def _begin_on_host(problem: Problem, state: ArenaState) -> None:
    """Record the ops that produce residents with homes (`planner.homes.lower`): the first ones.

    Each resident is offloaded and dropped before the next op, so that all are at offset 0.
    """
    for t in problem.homes.copies:
        state.tensor[t].is_home = state.tensor[t].is_movable = state.tensor[t].is_hosted = True
        now, first = state.now, state.now.events
        state.event["do"][first : first + 3] = RUN, OFFLOAD, WAIT
        state.event["what"][first : first + 3] = problem.producer[t], t, t
        state.drop[now.drops].event, state.drop[now.drops].tensor = first + 2, t
        state.offsets[now.offsets] = 0
        now.events, now.drops, now.offsets = first + 3, now.drops + 1, now.offsets + 1


def _is_expensive(problem: Problem) -> Flags:
    """Flags of ops whose outputs are expensive: cost density above that of the whole program.

    Cost density is cost / output bytes (Coop, section 3.3).
    """
    made = np.array([sum(problem.size[t] for t in tensors) for tensors in problem.op_outputs])
    total = made.sum()
    mean = problem.base_cost_us / total if total else 0.0
    return (np.array(problem.cost) > mean * made).astype(np.uint8)
