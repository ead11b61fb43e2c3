"""State of one simulated step, as arrays for compiled code."""

from itertools import permutations
from typing import NamedTuple

import numpy as np

from coop_plan.planner.core.arrays import Flags, Floats, FloatTable, Ints, IntTable
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.online import columns as c

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


class ArenaState(NamedTuple):
    """Blocks, evicted components, tensors and the record of a run.

    Few arrays of many rows, because compile time grows with their number. Adjacent free blocks are
    always merged. An owner is a tensor, `FREE`, or the number of tensors for a transient buffer of
    the current op. Sizes and offsets are bytes, times µs. `near_ptr` and `near` are the adjacency
    of e*, `component` the cost of each component.

    `out_us` and `in_us` are the times of a tensor's copies to the host and back. At least
    `reserve_bytes` shall be free or being offloaded after each op.

    With `whole_closure` 1 an op's whole recompute closure is pinned at once, a tensor read only by
    it is freed with its last pin, and an access is dated to the start of an op that reads or writes
    the tensor.
    """

    capacity: int
    counts: Ints
    total: Floats
    block: IntTable
    costs: Floats
    near_ptr: Ints
    near: Ints
    tensor: IntTable
    times: FloatTable
    op: IntTable
    part: IntTable
    component: Floats
    event: IntTable
    record: IntTable
    stack: Ints
    transient: Ints
    out_us: Floats
    in_us: Floats
    transfers: Transfers
    host_budget: int
    reserve_bytes: int
    whole_closure: int


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
    drops = -(-events * outputs // max(n, 1)) + 2 * count + 64
    near_ptr, near = _neighbours(problem, dependents=dependents)
    state = ArenaState(
        capacity=capacity,
        counts=np.zeros(16, dtype=np.int64),
        total=np.zeros(4),
        block=np.empty((6, blocks), dtype=np.int64),
        costs=np.empty(blocks),
        near_ptr=near_ptr,
        near=near,
        tensor=np.zeros((16, count + 1), dtype=np.int64),
        times=np.zeros((4, count)),
        op=np.zeros((3, n), dtype=np.int64),
        part=np.zeros((2, drops), dtype=np.int64),
        component=np.empty(drops),
        event=np.zeros((3, events), dtype=np.int64),
        record=np.empty((6, drops), dtype=np.int64),
        stack=np.empty(events + count, dtype=np.int64),
        transient=np.empty(max_outputs + 1, dtype=np.int64),
        out_us=np.full(count, np.inf),
        in_us=np.full(count, np.inf),
        transfers=transfers,
        host_budget=-1 if problem.host_budget is None else problem.host_budget,
        reserve_bytes=capacity // 10,
        whole_closure=int(whole_closure),
    )
    state.tensor[c.NODE] = -1
    if transfers.swaps and problem.device.linked:
        device, size = problem.device, np.array(problem.bytes)
        state.tensor[c.MOVABLE, :count] = np.array(problem.movable) > np.array(problem.is_output)
        state.out_us[:] = device.copy_latency_us + size * 1e6 / device.d2h_bytes_per_s
        state.in_us[:] = device.copy_latency_us + size * 1e6 / device.h2d_bytes_per_s
    state.tensor[c.EVICTABLE, :count] = problem.evictable
    state.times[c.OWN_COST] = [problem.cost[p] if p >= 0 else 0.0 for p in problem.producer]
    if partition:
        state.op[c.FROM_RIGHT] = _is_expensive(problem)
    if capacity:
        state.block[[c.BLOCK_AT, c.HOLE_AT], 0] = 0
        state.block[[c.BLOCK_SIZE, c.HOLE_SIZE], 0] = capacity if gaps else 1 << 62
        state.block[c.OWNER, 0] = c.FREE
        state.counts[c.BLOCKS] = state.counts[c.HOLES] = 1
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


def _is_expensive(problem: Problem) -> Flags:
    """Flags of ops whose outputs are expensive: cost density above that of the whole program.

    Cost density is cost / output bytes (Coop, section 3.3).
    """
    made = np.array([sum(problem.size[t] for t in tensors) for tensors in problem.op_outputs])
    total = made.sum()
    mean = problem.base_cost_us / total if total else 0.0
    return (np.array(problem.cost) > mean * made).astype(np.uint8)
