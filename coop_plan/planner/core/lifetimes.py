"""Liveness: converts a sequence of events to buffers, live bytes per event, and blocks to place.

Rule of bytes: blocks are counted in units of the alignment, so sizes are rounded up to it
(`Problem.size`) before they are added. An arena of B bytes has ⌈B / alignment⌉ units
(`Problem.rounded`); the last one may be partial, and the block there may end before its rounded
size. A layout fits if the exact ends of its blocks do; offsets are whole units.

Rule of time: a buffer is live from the event that writes it to the last event that uses it, both
included. Of two buffers that share one address in place, only the earlier one counts at the event
that writes the later one.
"""

from typing import NamedTuple

import numpy as np

from coop_plan.planner.core.arrays import Arrays, Flags, Ints, IntTable
from coop_plan.planner.core.inplace import choose_pairs
from coop_plan.planner.core.jit import inner, linked, njit

RUN, OFFLOAD, PREFETCH, WAIT = range(4)
"""Kinds of events: run a variant; copy a tensor to the host or back; wait for its last copy."""

OUTSIDE = -1
"""Marks a read or write outside the arena."""

MISSING = -2
"""Marks a read, copy or wait of a tensor that is not resident: the events are no schedule."""


class Trace(NamedTuple):
    """The buffers of a sequence of events, numbered in the order of their production.

    Per buffer: its tensor, the events that write it and use it last, the buffer whose address it
    takes over in place (`shares`, else −1), and a flag if it survives the step. Per event: row
    `reads_ptr[e]:reads_ptr[e + 1]` of `reads` follows the inputs of the variant, `writes` its
    outputs; `moved` is the buffer of a transfer, `source` the buffer whose host copy a prefetch
    reads, else −1.
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
    """The buffers of events: kind `do[e]` of variant (`RUN`) or tensor (else) `what[e]`.

    An op reads the latest buffer of each input. A buffer is live until its last use, and a
    recomputed one replaces it from then on. If an op overwrites the tensor, the first buffer stays
    the current one, and a recomputed one ends at once. The last buffer of an output of the step
    stays to the end. In-place pairs are used if an input ends with the run that reads it
    (`planner.core.inplace`).
    """
    t = _trace(a, do, what, True, np.empty((0, 3), np.int64), np.empty((0, 2), np.int64))
    _share(a, do, what, t)
    return t


@njit
def trace_with_decisions(
    a: Arrays, do: Ints, what: Ints, taken: IntTable, dropped: IntTable
) -> Trace:
    """As `trace`, for a run with its own eviction and in-place decisions, as of online methods.

    `taken` lists (event, output, input) of addresses taken over in place, `dropped` (event, tensor)
    of tensors that end after an event, both sorted by event. A tensor that is recomputed while it
    is resident keeps its buffer.
    """
    return _trace(a, do, what, False, taken, dropped)


@linked
def _trace(
    a: Arrays, do: Ints, what: Ints, free: bool, taken: IntTable, dropped: IntTable
) -> Trace:
    events, count = do.size, a.size.size
    reads_ptr = np.zeros(events + 1, dtype=np.int64)
    writes_ptr = np.zeros(events + 1, dtype=np.int64)
    capacity = 0  # most buffers: a prefetch writes one, a run one per output
    for e in range(events):
        reads_ptr[e + 1], writes_ptr[e + 1] = reads_ptr[e], writes_ptr[e]
        if do[e] == RUN:
            reads_ptr[e + 1] += a.inputs_ptr[what[e] + 1] - a.inputs_ptr[what[e]]
            writes_ptr[e + 1] += a.makes_ptr[what[e] + 1] - a.makes_ptr[what[e]]
        capacity += do[e] == PREFETCH
    capacity += writes_ptr[events]
    reads = np.full(reads_ptr[events], MISSING, dtype=np.int64)
    writes = np.full(writes_ptr[events], OUTSIDE, dtype=np.int64)
    moved, source = np.full(events, -1, np.int64), np.full(events, -1, np.int64)
    tensor, first = np.empty(capacity, dtype=np.int64), np.empty(capacity, dtype=np.int64)
    last, shares = np.empty(capacity, dtype=np.int64), np.full(capacity, -1, dtype=np.int64)
    survives = np.zeros(capacity, dtype=np.uint8)
    # Per tensor: the buffer that is read now, the one with a copy on the host, the one of the last
    # copy in flight, and if the tensor has been written outside the arena.
    current = np.full(count, MISSING, dtype=np.int64)
    host, pending = np.full(count, MISSING, np.int64), np.full(count, MISSING, np.int64)
    left_arena = np.zeros(count, dtype=np.uint8)
    made = next_taken = next_dropped = 0
    for e in range(events):
        x = what[e]
        if do[e] == RUN:
            for k in range(a.inputs_ptr[x + 1] - a.inputs_ptr[x]):
                t = a.inputs[a.inputs_ptr[x] + k]
                if a.resident[t] == 1 or left_arena[t] == 1:
                    reads[reads_ptr[e] + k] = OUTSIDE
                elif current[t] >= 0:
                    reads[reads_ptr[e] + k] = current[t]
                    last[current[t]] = e
            for k in range(a.makes_ptr[x + 1] - a.makes_ptr[x]):
                t = a.makes[a.makes_ptr[x] + k]
                if a.outside[t] == 1 and left_arena[t] == 0:
                    left_arena[t] = 1
                    continue
                tensor[made], first[made], last[made] = t, e, e
                for j in range(next_taken, taken.shape[0]):
                    if taken[j, 0] != e:
                        break
                    if taken[j, 1] == t:
                        shares[made] = current[taken[j, 2]]
                        current[taken[j, 2]] = MISSING
                # A recomputed buffer becomes the current one, but that of an overwritten tensor.
                if left_arena[t] == 0 and (current[t] < 0 or (free and a.overwritten[t] == 0)):
                    current[t] = made
                writes[writes_ptr[e] + k] = made
                made += 1
        elif do[e] == OFFLOAD:
            moved[e] = host[x] = pending[x] = current[x]
            if current[x] >= 0:
                last[current[x]] = e
        elif do[e] == PREFETCH:
            tensor[made], first[made], last[made] = x, e, e
            source[e] = host[x]
            moved[e] = pending[x] = current[x] = made
            made += 1
        else:
            moved[e] = pending[x]
            if pending[x] >= 0:
                last[pending[x]] = e
            pending[x] = MISSING
        while next_taken < taken.shape[0] and taken[next_taken, 0] <= e:
            next_taken += 1
        while next_dropped < dropped.shape[0] and dropped[next_dropped, 0] <= e:
            t = dropped[next_dropped, 1]
            if current[t] >= 0:
                last[current[t]] = e
                current[t] = MISSING
            next_dropped += 1
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
    """The buffer of a tensor in a row of reads or writes; −1 if the row has none."""
    for k in range(size):
        if tensors[begin + k] == tensor:
            return int(row[at + k])
    return -1


@linked
def _share(a: Arrays, do: Ints, what: Ints, t: Trace) -> None:
    """Set `shares`: outputs take over addresses of inputs that end with the run."""
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
    """Arena bytes live at each event, workspace included, addresses shared in place counted once.

    `size` is bytes per tensor and `scratch` per variant. Pass both rounded up (`Arrays.size`,
    `.workspace`) for the bytes that a layout needs, or both exact (`Arrays.bytes`, `.scratch`).
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
    """The blocks to place: one per buffer, then one per workspace; lifetimes half-open, in events.

    `size` is exact bytes. Buffers that share one address are one block over their joint lifetime:
    that of the first and largest of them; the others have size 0. `shares` are the pairs of the
    trace that are used so: all of equal sizes, and smaller outputs where that lowers the peak, as
    the block stays as large as its first buffer. `event` is the event of each workspace. `live` is
    the maximum over events of the live blocks, sizes rounded up.
    """

    lower: Ints
    upper: Ints
    size: Ints
    shares: Ints
    event: Ints
    live: int


@njit
def blocks_of(a: Arrays, do: Ints, what: Ints, t: Trace) -> Blocks:
    """The blocks of a trace."""
    buffers, events = t.tensor.size, do.size
    scratch = 0
    for e in range(events):
        scratch += do[e] == RUN and a.scratch[what[e]] > 0
    shares = t.shares.copy()
    lower = np.empty(buffers + scratch, dtype=np.int64)
    upper = np.empty(buffers + scratch, dtype=np.int64)
    size = np.empty(buffers + scratch, dtype=np.int64)
    root = np.empty(buffers, dtype=np.int64)
    smaller = 0  # outputs smaller than the input they may take over: at first blocks of their own
    for b in range(buffers):
        lower[b], upper[b], size[b], root[b] = t.first[b], t.last[b] + 1, a.bytes[t.tensor[b]], b
        if shares[b] >= 0 and a.size[t.tensor[b]] < a.size[t.tensor[shares[b]]]:
            shares[b] = -1
            smaller += 1
        elif shares[b] >= 0:
            root[b] = root[shares[b]]
            upper[root[b]] = max(upper[root[b]], upper[b])
    event = np.empty(scratch, dtype=np.int64)
    load = np.zeros(events + 1, dtype=np.int64)
    made = 0
    for b in range(buffers):
        if root[b] == b:
            load[lower[b]] += a.size[t.tensor[b]]
            load[upper[b]] -= a.size[t.tensor[b]]
    load = load.cumsum()
    for e in range(events):
        if do[e] == RUN and a.scratch[what[e]] > 0:
            b = buffers + made
            lower[b], upper[b], size[b], event[made] = e, e + 1, a.scratch[what[e]], e
            load[e] += a.workspace[what[e]]
            made += 1
    if smaller > 0:
        _merge_smaller(a, t, shares, root, upper, load)
    for b in range(buffers):
        if root[b] != b:
            size[b], upper[b] = 0, lower[b] + 1
    return Blocks(lower, upper, size, shares, event, max(0, load.max()))


@linked
def _merge_smaller(a: Arrays, t: Trace, shares: Ints, root: Ints, upper: Ints, load: Ints) -> None:
    """Merge outputs into the blocks of larger inputs where that lowers the peak of `load`.

    `load` is the bytes of live blocks per event. A merge at event e saves the output's bytes there,
    and costs the difference of both sizes until the output's block ends. Only the highest loads
    matter, so outputs are tried in the order of their loads. The search ends at the first load that
    is no higher than `floor`, below which the peak cannot sink.
    """
    outs = np.flatnonzero((t.shares >= 0) & (shares < 0))
    floor = 0
    may_sink = np.zeros(load.size, dtype=np.uint8)
    for b in outs:
        may_sink[t.first[b]] = 1
    for e in range(load.size):
        if may_sink[e] == 0:
            floor = max(floor, load[e])
    for k in np.argsort(-load[t.first[outs]], kind="mergesort"):
        b, e = outs[k], t.first[outs[k]]
        if load[e] <= floor:
            break
        block = t.shares[b]
        while root[block] != block:
            block = root[block]
        own, extra = a.size[t.tensor[b]], a.size[t.tensor[block]] - a.size[t.tensor[b]]
        highest = load[e] - own
        for later in range(e + 1, upper[b]):
            highest = max(highest, load[later] + extra)
        if highest >= load[e]:
            floor = load[e]
            continue
        load[e] -= own
        for later in range(e + 1, upper[b]):
            load[later] += extra
            floor = max(floor, load[later]) if may_sink[later] == 0 else floor
        shares[b], root[b], upper[block] = t.shares[b], block, upper[b]


class HostCopies(NamedTuple):
    """The copies to place in the host slab: one per offload; lifetimes half-open, in events.

    A copy is live from its offload to the last wait on it or on a prefetch from it. `size` is exact
    bytes, `live` the maximum of live bytes over events, sizes rounded up.
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
    # Per buffer: the last copy of it, and the copy that its transfer in flight writes or reads.
    latest = np.full(t.tensor.size, -1, dtype=np.int64)
    pending = np.full(t.tensor.size, -1, dtype=np.int64)
    change = np.zeros(do.size + 1, dtype=np.int64)
    made = 0
    for e in range(do.size):
        if do[e] == RUN:
            continue
        if do[e] == OFFLOAD:
            latest[t.moved[e]] = pending[t.moved[e]] = made
            lower[made], size[made] = e, a.bytes[what[e]]
            upper[made] = e + 1
            made += 1
            continue
        if do[e] == PREFETCH:
            pending[t.moved[e]] = latest[t.source[e]]
        upper[pending[t.moved[e]]] = e + 1
    for k in range(count):
        change[lower[k]] += a.size[what[lower[k]]]
        change[upper[k]] -= a.size[what[lower[k]]]
    peak = 0
    for live in change.cumsum():
        peak = max(peak, live)
    return HostCopies(lower, upper, size, peak)
