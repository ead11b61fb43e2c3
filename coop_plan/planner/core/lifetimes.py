"""
Lifetimes: from the order of events to buffers, to what is live when, and to blocks that are placed.

The one rule of bytes: blocks are counted in units of the alignment, so a size is rounded up to it
(`Problem.size`) wherever sizes are added; an arena of B bytes has ⌈B / alignment⌉ units
(`Problem.rounded`), the last one cut short, and the block that ends there may end short of its
rounded size. Whether a layout fits is decided by the exact ends of its blocks, whose offsets are
whole units.

The one rule of time: a buffer lives from the event that makes it to the last one that touches it,
both included. Of two buffers that share one address in place, the later one lies in the earlier
one's place during the event that makes it.
"""

from typing import NamedTuple

import numpy as np

from coop_plan.planner.core.arrays import Arrays, Flags, Ints
from coop_plan.planner.core.jit import inner, linked, njit
from coop_plan.planner.core.inplace import choose_pairs

RUN, OFFLOAD, PREFETCH, WAIT = range(4)
"""Kinds of events: run a variant; copy a tensor to the host, or back; wait for its last copy."""

OUTSIDE = -1
"""Stands for a read or a write that does not touch the arena."""

MISSING = -2
"""Stands for the read, copy or wait of something that is not there: the order is no schedule."""


class Trace(NamedTuple):
    """
    What an order of events comes to, in buffers, numbered in the order they are made.

    Per buffer: its tensor, the events that make it and touch it last, the buffer whose address it
    takes over in place or −1, and whether it survives the step. Per event: row
    `reads_ptr[e]:reads_ptr[e + 1]` of `reads` follows the inputs of the variant, `writes` its outputs;
    `moved` is the buffer of a transfer, `source` the one that a prefetch was copied from, else −1.
    """

    tensor: Ints
    first: Ints
    last: Ints
    shares: Ints
    survives: Flags
    reads_ptr: Ints
    reads: Ints
    writes_ptr: Ints
    writes: Ints
    moved: Ints
    source: Ints


@njit
def trace(a: Arrays, do: Ints, what: Ints) -> Trace:
    """
    The buffers of events: kind `do[e]` of variant (`RUN`) or tensor (else) `what[e]`.

    An op reads the latest copy of each input. A copy lives until its last touch, and what is made
    again takes over from then on, unless an op overwrites it: then the first copy stays, and a new
    one ends at once. Of an output of the step the last copy stays to its end. In-place pairs are
    used wherever an input ends with the run that reads it (`planner.core.inplace`).
    """
    t = _trace(a, do, what, True, np.empty((0, 3), np.int64), np.empty((0, 2), np.int64))
    _share(a, do, what, t)
    return t


@njit
def trace_as_told(a: Arrays, do: Ints, what: Ints, taken: Ints, dropped: Ints) -> Trace:
    """
    As `trace`, of a run that has decided for itself what ends when, as online methods do.

    `taken` lists (event, output, input) of addresses taken over, `dropped` (event, tensor) of what
    ends after an event, both by event. What is made again while it is there stays as it was.
    """
    return _trace(a, do, what, False, taken, dropped)


@linked
def _trace(a: Arrays, do: Ints, what: Ints, free: bool, taken: Ints, dropped: Ints) -> Trace:
    events, count = do.size, a.size.size
    reads_ptr = np.zeros(events + 1, dtype=np.int64)
    writes_ptr = np.zeros(events + 1, dtype=np.int64)
    most = 0
    for e in range(events):
        reads_ptr[e + 1], writes_ptr[e + 1] = reads_ptr[e], writes_ptr[e]
        if do[e] == RUN:
            reads_ptr[e + 1] += a.inputs_ptr[what[e] + 1] - a.inputs_ptr[what[e]]
            writes_ptr[e + 1] += a.makes_ptr[what[e] + 1] - a.makes_ptr[what[e]]
        most += do[e] == PREFETCH
    most += writes_ptr[events]
    reads = np.full(reads_ptr[events], MISSING, dtype=np.int64)
    writes = np.full(writes_ptr[events], OUTSIDE, dtype=np.int64)
    moved, source = np.full(events, -1, np.int64), np.full(events, -1, np.int64)
    tensor, first = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
    last, shares = np.empty(most, dtype=np.int64), np.full(most, -1, dtype=np.int64)
    survives = np.zeros(most, dtype=np.uint8)
    current = np.full(count, MISSING, dtype=np.int64)  # by tensor the buffer that is read now
    host, flying = np.full(count, MISSING, np.int64), np.full(count, MISSING, np.int64)
    left = np.zeros(count, dtype=np.uint8)  # written outside the arena
    made = told = ended = 0
    for e in range(events):
        x = what[e]
        if do[e] == RUN:
            for k in range(a.inputs_ptr[x + 1] - a.inputs_ptr[x]):
                t = a.inputs[a.inputs_ptr[x] + k]
                if a.resident[t] == 1 or left[t] == 1:
                    reads[reads_ptr[e] + k] = OUTSIDE
                elif current[t] >= 0:
                    reads[reads_ptr[e] + k] = current[t]
                    last[current[t]] = e
            for k in range(a.makes_ptr[x + 1] - a.makes_ptr[x]):
                t = a.makes[a.makes_ptr[x] + k]
                if a.outside[t] == 1 and left[t] == 0:
                    left[t] = 1
                    continue
                tensor[made], first[made], last[made] = t, e, e
                for j in range(told, taken.shape[0]):
                    if taken[j, 0] != e:
                        break
                    if taken[j, 1] == t:
                        shares[made] = current[taken[j, 2]]
                        current[taken[j, 2]] = MISSING
                if left[t] == 0 and (current[t] < 0 or (free and a.overwritten[t] == 0)):
                    current[t] = made
                writes[writes_ptr[e] + k] = made
                made += 1
        elif do[e] == OFFLOAD:
            moved[e] = host[x] = flying[x] = current[x]
            if current[x] >= 0:
                last[current[x]] = e
        elif do[e] == PREFETCH:
            tensor[made], first[made], last[made] = x, e, e
            source[e] = host[x]
            moved[e] = flying[x] = current[x] = made
            made += 1
        else:
            moved[e] = flying[x]
            if flying[x] >= 0:
                last[flying[x]] = e
            flying[x] = MISSING
        while told < taken.shape[0] and taken[told, 0] <= e:
            told += 1
        while ended < dropped.shape[0] and dropped[ended, 0] <= e:
            t = dropped[ended, 1]
            if current[t] >= 0:
                last[current[t]] = e
                current[t] = MISSING
            ended += 1
    for t in range(count):
        if current[t] >= 0 and a.outside[t] == 0 and (a.is_output[t] == 1 or not free):
            last[current[t]] = events - 1
            survives[current[t]] = a.is_output[t]
    return Trace(
        tensor[:made],
        first[:made],
        last[:made],
        shares[:made],
        survives[:made],
        reads_ptr,
        reads,
        writes_ptr,
        writes,
        moved,
        source,
    )


@inner
def _at(row: Ints, tensors: Ints, begin: int, size: int, at: int, tensor: int) -> int:
    """The buffer of a tensor in a row of reads or writes, or −1."""
    for k in range(size):
        if tensors[begin + k] == tensor:
            return int(row[at + k])
    return -1


@linked
def _share(a: Arrays, do: Ints, what: Ints, t: Trace) -> None:
    """Let outputs take over the addresses of inputs that end with the run."""
    for e in range(do.size):
        if do[e] != RUN or a.shares_ptr[what[e]] == a.shares_ptr[what[e] + 1]:
            continue
        variant = what[e]
        low, high = a.shares_ptr[variant], a.shares_ptr[variant + 1]
        allowed = np.zeros(high - low, dtype=np.uint8)
        outs, sources = np.empty(high - low, np.int64), np.empty(high - low, np.int64)
        for k in range(high - low):
            at, size = a.inputs_ptr[variant], a.inputs_ptr[variant + 1] - a.inputs_ptr[variant]
            sources[k] = _at(t.reads, a.inputs, at, size, t.reads_ptr[e], a.shares_in[low + k])
            at, size = a.makes_ptr[variant], a.makes_ptr[variant + 1] - a.makes_ptr[variant]
            outs[k] = _at(t.writes, a.makes, at, size, t.writes_ptr[e], a.shares_out[low + k])
            source = sources[k]
            if outs[k] >= 0 and source >= 0 and t.last[source] == e and t.survives[source] == 0:
                allowed[k] = 1
        chosen = choose_pairs(a, variant, allowed)
        for k in range(high - low):
            if chosen[k] == 1:
                t.shares[outs[k]] = sources[k]


@linked
def live_bytes(do: Ints, what: Ints, t: Trace, size: Ints, scratch: Ints) -> Ints:
    """
    Arena bytes live at each event, workspace included, addresses shared in place counted once.

    `size` is bytes per tensor and `scratch` per variant: both rounded up (`Arrays.size`, `.workspace`)
    for what a layout needs, or both exact (`Arrays.bytes`, `.scratch`).
    """
    change = np.zeros(do.size + 1, dtype=np.int64)
    for b in range(t.tensor.size):
        begin = t.first[b] + (t.shares[b] >= 0)
        change[begin] += size[t.tensor[b]]
        change[t.last[b] + 1] -= size[t.tensor[b]]
    live = change.cumsum()[: do.size]
    for e in range(do.size):
        if do[e] == RUN:
            live[e] += scratch[what[e]]
    return live


class Blocks(NamedTuple):
    """
    What is placed: a block per buffer, then one per workspace; lifetimes half-open, in events.

    `size` is exact bytes. Buffers that share one address are one block over their joint lifetime,
    the first one's, as large as the largest; the others have no bytes of their own. `event` is that
    of each workspace. `live` is the most bytes live at one event, sizes rounded up.
    """

    lower: Ints
    upper: Ints
    size: Ints
    event: Ints
    live: int


@njit
def blocks_of(a: Arrays, do: Ints, what: Ints, t: Trace) -> Blocks:
    """The blocks of a trace."""
    buffers, events = t.tensor.size, do.size
    scratch = 0
    for e in range(events):
        scratch += do[e] == RUN and a.scratch[what[e]] > 0
    lower = np.empty(buffers + scratch, dtype=np.int64)
    upper = np.empty(buffers + scratch, dtype=np.int64)
    size = np.empty(buffers + scratch, dtype=np.int64)
    root = np.empty(buffers, dtype=np.int64)
    for b in range(buffers):
        lower[b], upper[b], size[b], root[b] = t.first[b], t.last[b] + 1, a.bytes[t.tensor[b]], b
        if t.shares[b] >= 0:  # the earlier one is the larger one
            root[b] = root[t.shares[b]]
            upper[root[b]] = max(upper[root[b]], upper[b])
            size[b], upper[b] = 0, lower[b] + 1
    event = np.empty(scratch, dtype=np.int64)
    made = 0
    for e in range(events):
        if do[e] == RUN and a.scratch[what[e]] > 0:
            b = buffers + made
            lower[b], upper[b], size[b], event[made] = e, e + 1, a.scratch[what[e]], e
            made += 1
    most = 0
    for live in live_bytes(do, what, t, a.size, a.workspace):
        most = max(most, live)
    return Blocks(lower, upper, size, event, most)


class HostCopies(NamedTuple):
    """
    What is placed in the host's slab: a copy per offload, lifetimes half-open, in events.

    A copy lives from the offload that makes it to the last wait on it or on a prefetch from it.
    `size` is exact bytes, `live` the most bytes at one event, sizes rounded up.
    """

    lower: Ints
    upper: Ints
    size: Ints
    live: int


@njit
def host_copies(a: Arrays, do: Ints, what: Ints, t: Trace) -> HostCopies:
    """The copies on the host of a trace."""
    count = 0
    for e in range(do.size):
        count += do[e] == OFFLOAD
    lower, upper = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    size = np.empty(count, dtype=np.int64)
    taken = np.full(t.tensor.size, -1, dtype=np.int64)  # by buffer the last copy made of it
    flying = np.full(t.tensor.size, -1, dtype=np.int64)  # by buffer the copy it is part of
    change = np.zeros(do.size + 1, dtype=np.int64)
    made = 0
    for e in range(do.size):
        if do[e] == RUN:
            continue
        if do[e] == OFFLOAD:
            taken[t.moved[e]] = flying[t.moved[e]] = made
            lower[made], size[made] = e, a.bytes[what[e]]
            upper[made] = e + 1
            made += 1
            continue
        if do[e] == PREFETCH:
            flying[t.moved[e]] = taken[t.source[e]]
        upper[flying[t.moved[e]]] = e + 1
    for k in range(count):
        change[lower[k]] += a.size[what[lower[k]]]
        change[upper[k]] -= a.size[what[lower[k]]]
    most = 0
    for live in change.cumsum():
        most = max(most, live)
    return HostCopies(lower, upper, size, most)
