"""The state of one simulated step, as arrays that compiled code can share."""

from itertools import permutations
from typing import NamedTuple

import numpy as np

from coop_plan.planner.core.arrays import Flags, Floats, Ints
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.online.params import OnlineParams

FREE = -1
"""Owner of a free block."""

ENDLESS = 2**62
"""Bytes that no step takes."""

# Entries of `ArenaState.counts`.
(
    BLOCKS,
    HOLES,
    NODES,
    EVENTS,
    OFFSETS,
    DROPS,
    WRITES,
    FAILURES,
    EVICTED,
    RETAINED,
    STAMP,
    TRANSIENT,
    SWAPS,
    FETCHED,
    HOST_BYTES,
    USED,
) = range(16)

# Entries of `ArenaState.total`, µs and a sum of shares; when the copy engines are free.
CLOCK, FREE_RATIOS, OUT_FREE, IN_FREE = range(4)

# Rows of `ArenaState.block`: blocks in address order, free ones again by (size, offset), scratch.
BLOCK_AT, BLOCK_SIZE, OWNER, HOLE_AT, HOLE_SIZE, VICTIM = range(6)

# Rows of `ArenaState.tensor`; three are lists and marks, the last five are about the host.
NODE, LIVE, KEPT, WRITTEN, RETAINED_NOW, PINS, EVICTABLE = range(7)
ADDRESS, WAITING, TO_VISIT, MARK = range(7, 11)
HOSTED, LEAVING, FLYING, MOVABLE, SWAPPED = range(11, 16)

# Rows of `ArenaState.times`, µs.
OWN_COST, LAST_ACCESS, AWAY, BACK = range(4)

# Rows of `ArenaState.op`.
RIGHT, SEEN, WAITS = range(3)

# Rows of `ArenaState.part`: the union-find over evicted tensors.
PARENT, ROOT_SEEN = range(2)

# Rows of `ArenaState.event` and, each with a length of its own, of `ArenaState.record`.
EVENT_OP, EVENT_WORKSPACE, EVENT_DO = range(3)
OFFSET, DROPPED, DROP_EVENT, INPLACE_EVENT, INPLACE_OUT, INPLACE_SOURCE = range(6)


class ArenaState(NamedTuple):
    """
    Blocks, evicted components, tensors and the record of a run.

    Few arrays of many rows, because compile time grows with their number. Adjacent free blocks are
    always merged; an owner is a tensor, `FREE`, or the number of tensors for what lives during one
    op only. Sizes and offsets are bytes, times µs. `out_us` and `in_us` are what copies of a tensor
    to the host and back take, `transfers` the flags of `planner.online.transfers`, 0 for none, and
    `ahead` the bytes that are to be free or on their way to the host after every op, `prefetched`
    how many tensors may be on their way back. With `whole_closure` 1 all that an op needs, through
    everything that must run again before it, is pinned at once, and what only they read goes when
    nothing pins it any more; then a tensor is accessed when an op that reads or makes it begins.
    """

    capacity: int
    min_staleness_us: float
    counts: Ints
    total: Floats
    block: Ints
    costs: Floats
    near_ptr: Ints
    near: Ints
    tensor: Ints
    times: Floats
    op: Ints
    part: Ints
    component: Floats
    event: Ints
    record: Ints
    stack: Ints
    transient: Ints
    out_us: Floats
    in_us: Floats
    transfers: int
    host_budget: int
    ahead: int
    prefetched: int
    whole_closure: int


def empty_arena(
    problem: Problem,
    capacity: int,
    events: int,
    params: OnlineParams,
    *,
    partition: bool,
    whole_closure: bool = True,
    dependents: bool = True,
    transfers: int = 0,
    gaps: bool = True,
) -> ArenaState:
    """
    An empty arena of `capacity` bytes and a record of `events` events at most.

    Without `gaps` only the bytes count: addresses go on, so that no free block is too small.
    `dependents` as in `_neighbours`.
    """
    n, count = problem.op_count, problem.tensor_count
    most = max((len(tensors) for tensors in problem.op_outputs), default=0)
    total = max(1, sum(len(tensors) for tensors in problem.op_outputs))
    blocks = 2 * (count + most) + 8
    # Between two events at most every tensor is dropped once.
    drops = -(-events * total // max(n, 1)) + 2 * count + 64
    near_ptr, near = _neighbours(problem, dependents=dependents)
    state = ArenaState(
        capacity=capacity,
        min_staleness_us=params.min_staleness_us,
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
        transient=np.empty(most + 1, dtype=np.int64),
        out_us=np.full(count, np.inf),
        in_us=np.full(count, np.inf),
        transfers=transfers,
        host_budget=-1 if problem.host_budget is None else problem.host_budget,
        ahead=int(params.ahead_share * capacity),
        prefetched=params.prefetched,
        whole_closure=int(whole_closure),
    )
    state.tensor[NODE] = -1
    if transfers and problem.device.linked:
        device, size = problem.device, np.array(problem.bytes)
        state.tensor[MOVABLE, :count] = np.array(problem.movable) > np.array(problem.is_output)
        state.out_us[:] = device.copy_latency_us + size * 1e6 / device.d2h_bytes_per_s
        state.in_us[:] = device.copy_latency_us + size * 1e6 / device.h2d_bytes_per_s
    state.tensor[EVICTABLE, :count] = problem.evictable
    state.times[OWN_COST] = [problem.cost[p] if p >= 0 else 0.0 for p in problem.producer]
    if partition:
        state.op[RIGHT] = _expensive(problem)
    if capacity:
        state.block[[BLOCK_AT, HOLE_AT], 0] = 0
        state.block[[BLOCK_SIZE, HOLE_SIZE], 0] = capacity if gaps else ENDLESS
        state.block[OWNER, 0] = FREE
        state.counts[BLOCKS] = state.counts[HOLES] = 1
    return state


def _neighbours(problem: Problem, *, dependents: bool) -> tuple[Ints, Ints]:
    """
    Rows of the tensors beside each in e*: what an op makes it from, and makes from it (DTR).

    Without `dependents`: what an op makes it from, and makes beside it (OneFlow).
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


def _expensive(problem: Problem) -> Flags:
    """
    Flags of ops with expensive outputs: cost density above that of the whole program.

    Cost density is cost / output bytes (Coop, section 3.3).
    """
    made = np.array([sum(problem.size[t] for t in tensors) for tensors in problem.op_outputs])
    total = made.sum()
    mean = problem.base_cost_us / total if total else 0.0
    return (np.array(problem.cost) > mean * made).astype(np.uint8)
