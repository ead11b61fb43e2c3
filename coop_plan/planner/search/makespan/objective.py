"""Objective of the joint search: makespan and memory excess from a simulation of the copy engines.

The engines follow `planner.core.timeline`. Offloads: when the engine is free, the queued tensor
whose last reader before its prefetch comes first is copied; its bytes are free once the copy ends.
Prefetches begin as late as possible without a stall, in the order of their reads. If memory is
short, prefetches are delayed and compute waits for offloads; what still exceeds the capacity counts
as excess. With `LOOK_AHEAD` a prefetch is also delayed if memory will be short before its read:
that costs time and saves memory.
"""

import numpy as np

from coop_plan.planner.core.arrays import Ints, Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.search.compute import columns as c
from coop_plan.planner.search.compute.event_list import position_of
from coop_plan.planner.search.compute.liveness import overwritable_copy
from coop_plan.planner.search.compute.objective import candidate_cost, excess_share
from coop_plan.planner.search.makespan import columns as mc
from coop_plan.planner.search.makespan.sequence import MakespanState


@inner
def evaluate(
    a: Program, m: MakespanState, capacity: int, host: int, limit: float
) -> tuple[float, float]:
    """Makespan (µs) of the candidate and its memory excess, as shares of the capacities (bytes).

    Infinite if the sequence is no schedule or its makespan exceeds `limit`. A negative `host` is no
    limit.
    """
    if candidate_cost(a, m.search, limit) == np.inf or not _respects_homes(a, m):
        return np.inf, np.inf
    _list_events(a, m)
    _list_offloads(m)
    _find_latest_starts(m)
    return _simulate(a, m, capacity, host, limit)


@inlined
def _respects_homes(a: Program, m: MakespanState) -> bool:
    """True if the candidate keeps the rules of `planner.core.problem.Homes`."""
    s = m.search
    # The first access of a tensor is its first run's write, which begins a copy.
    for i in range(m.home_copies.size):
        x = s.tensor[m.home_copies[i], c.HEAD]
        if s.access[x, c.END] != s.access[x, c.EVENT]:
            return False
    for i in range(m.returned.shape[0]):
        x = s.tensor[m.returned[i, 0], c.TAIL]
        while s.event[s.access[x, c.EVENT], c.CODE] != m.returned[i, 1]:
            x = s.access[x, c.PREVIOUS]
        if s.event[s.access[s.access[x, c.COPY], c.EVENT], c.CODE] < a.ops:
            return False
    for i in range(m.versions.shape[0]):
        made = s.access[s.tensor[m.versions[i, 0], c.HEAD], c.EVENT]
        used = s.access[s.tensor[m.versions[i, 1], c.TAIL], c.EVENT]
        if position_of(s, used) > position_of(s, made):
            return False
    return True


@inlined
def _list_events(a: Program, m: MakespanState) -> None:
    """List the candidate's events with their stall-free starts, and the markers with a read."""
    s = m.search
    start, at, prefetches = 0.0, 0, 0
    for b in range(s.counts[c.BLOCKS]):
        for i in range(s.block[b, c.EVENTS]):
            e = s.members[b, i]
            m.order[at], m.start_us[at] = e, start
            at += 1
            code = s.event[e, c.CODE]
            if code < a.ops:
                start += a.cost[code]
                continue
            # A marker without a read is dead. Insertion sort by first reader: nearly sorted
            # already.
            x = s.event[e, c.FIRST_ACCESS]
            read = s.access[x, c.NEXT]
            if read == c.NONE or s.access[read, c.ACCESS_KIND] != c.READ:
                continue
            first, k = position_of(s, s.access[read, c.EVENT]), prefetches
            while k > 0 and m.first_reader[k - 1] > first:
                m.first_reader[k], m.prefetches[k] = m.first_reader[k - 1], m.prefetches[k - 1]
                k -= 1
            m.first_reader[k], m.prefetches[k] = first, x
            prefetches += 1
    m.start_us[at] = start
    m.flow[mc.EVENT_COUNT], m.flow[mc.PREFETCH_COUNT] = at, prefetches


@inlined
def _list_offloads(m: MakespanState) -> None:
    """List the offloaded tensors, also by the event that produces each and by its last reader."""
    s, flow = m.search, m.flow
    for i in range(flow[mc.OFFLOADED_COUNT]):
        t = m.offloaded[i]
        m.offload_head[m.offload[t, mc.PRODUCER_EVENT], mc.PRODUCED] = c.NONE
        m.offload_head[m.offload[t, mc.LAST_READER], mc.LAST_READS] = c.NONE
        m.offload[t, mc.IS_OFFLOADED] = m.offload[t, mc.IS_AWAY] = 0
    flow[mc.OFFLOADED_COUNT] = 0
    for i in range(flow[mc.PREFETCH_COUNT]):
        t = s.access[m.prefetches[i], c.TENSOR]
        m.offload[t, mc.LAST_PREFETCH] = i
        if m.offload[t, mc.IS_OFFLOADED] == 1:
            continue
        x = s.tensor[t, c.HEAD]
        producer, reader = s.access[x, c.EVENT], s.access[x, c.END]
        m.offload[t, mc.IS_OFFLOADED] = 1
        m.offload[t, mc.PRODUCER_EVENT], m.offload[t, mc.LAST_READER] = producer, reader
        m.offload[t, mc.NEXT_PRODUCED] = m.offload_head[producer, mc.PRODUCED]
        m.offload[t, mc.NEXT_LAST_READ] = m.offload_head[reader, mc.LAST_READS]
        m.offload_head[producer, mc.PRODUCED] = m.offload_head[reader, mc.LAST_READS] = t
        m.offloaded[flow[mc.OFFLOADED_COUNT]] = t
        flow[mc.OFFLOADED_COUNT] += 1


@inlined
def _find_latest_starts(m: MakespanState) -> None:
    """Latest positions at which the prefetches begin without a stall, computed backwards."""
    at, latest = m.flow[mc.EVENT_COUNT] - 1, np.inf
    # One engine: a prefetch must end before its read, and before the next one must begin.
    for i in range(m.flow[mc.PREFETCH_COUNT] - 1, -1, -1):
        t = m.search.access[m.prefetches[i], c.TENSOR]
        latest = min(latest, m.start_us[m.first_reader[i]]) - m.prefetch_us[t]
        while at > m.first_reader[i] or (at > 0 and m.start_us[at] > latest):
            at -= 1
        m.latest_start[i] = at


@inner
def _simulate(
    a: Program, m: MakespanState, capacity: int, host: int, limit: float
) -> tuple[float, float]:
    """Simulate compute and both copy engines, event by event; see `evaluate`."""
    s, clock, flow = m.search, m.clock, m.flow
    s.counts[c.PEAK_EVENT], s.counts[c.PEAK_EXCESS] = c.NONE, 0
    clock[:] = 0.0
    flow[: mc.EVENT_COUNT] = 0
    started = arrived = worst = 0
    last_overflow = c.NONE
    total, stall_free_end = 0.0, m.start_us[flow[mc.EVENT_COUNT]]
    for at in range(flow[mc.EVENT_COUNT]):
        e = m.order[at]
        op = s.event[e, c.CODE]
        if op >= a.ops:
            continue
        # Bytes that the event adds. An input that waits for its offload cannot be overwritten in
        # place.
        new_bytes = s.event_bytes[e, c.ALLOCATED] + s.event_bytes[e, c.TRANSIENT]
        if s.event_bytes[e, c.INPLACE_SAVED] > 0:
            none_waits = flow[mc.OFFLOADED_COUNT] == 0
            saved = s.event_bytes[e, c.INPLACE_SAVED]
            new_bytes -= saved if none_waits else _inplace_saving(a, m, e, op)
        # Offloads that begin before this op ends, and those that have ended by now.
        _start_offloads(m, at, a.cost[op], host, a.size)
        while (
            flow[mc.LEFT_COUNT] < flow[mc.SENT_COUNT]
            and m.sent_end_us[flow[mc.LEFT_COUNT]] <= clock[mc.NOW]
        ):
            _finish_offload(m, at, host, a.size)
        # Prefetches due now. One whose first read is still ahead is delayed as long as its bytes
        # are not free.
        while started < flow[mc.PREFETCH_COUNT] and m.latest_start[started] <= at:
            x = m.prefetches[started]
            t = s.access[x, c.TENSOR]
            if m.first_reader[started] > at:
                if at <= last_overflow or m.offload[t, mc.IS_AWAY] == 0:
                    break
                if flow[mc.LIVE] + new_bytes + a.size[t] > capacity:
                    break
                if position_of(s, s.access[s.access[x, c.PREVIOUS], c.EVENT]) >= at:
                    break
                if flow[mc.LOOK_AHEAD] == 1:
                    until = m.first_reader[started]
                    last_overflow = _last_overflow(a, m, at, until, capacity - a.size[t])
                    if at <= last_overflow:
                        break
            # A tensor must have been offloaded before it is prefetched.
            while m.offload[t, mc.IS_AWAY] == 0 and _has_pending_offload(m):
                _finish_offload(m, at, host, a.size)
            _wait_for_room(m, at, a.size[t], capacity, host, a.size)
            clock[mc.IN_FREE] = max(clock[mc.NOW], clock[mc.IN_FREE]) + m.prefetch_us[t]
            m.arrival_us[started] = clock[mc.IN_FREE]
            _record(m, at, mc.PREFETCH_START, t)
            flow[mc.LIVE] += a.size[t]
            started += 1
        _wait_for_room(m, at, new_bytes, capacity, host, a.size)
        # Compute waits for the prefetches that this op reads.
        while arrived < started and m.first_reader[arrived] == at:
            t = s.access[m.prefetches[arrived], c.TENSOR]
            clock[mc.NOW] = max(clock[mc.NOW], m.arrival_us[arrived])
            _record(m, at, mc.PREFETCH_END, t)
            flow[mc.HOST_LIVE] -= m.host_size[t] if m.offload[t, mc.LAST_PREFETCH] == arrived else 0
            arrived += 1
        _start_offloads(m, at, a.cost[op], host, a.size)  # compute may have waited since
        clock[mc.NOW] += a.cost[op]
        # Lower bound on the makespan: no stall from here on.
        if clock[mc.NOW] + (stall_free_end - m.start_us[at + 1]) > limit:
            return np.inf, np.inf
        excess = flow[mc.LIVE] + new_bytes - capacity
        if excess > 0:
            total += excess
            if excess > worst:
                worst = excess
                s.counts[c.PEAK_EVENT], s.counts[c.PEAK_EXCESS] = at, excess
        flow[mc.LIVE] += s.event_bytes[e, c.ALLOCATED] - s.event_bytes[e, c.FREED]
        # After its last reader a tensor stays live until its offload has ended.
        t = m.offload_head[e, mc.LAST_READS]
        while t != c.NONE:
            if m.offload[t, mc.IS_AWAY] == 0:
                flow[mc.LIVE] += a.size[t]
                flow[mc.AWAITING_OFFLOAD] += a.size[t]
            t = m.offload[t, mc.NEXT_LAST_READ]
        # A tensor can be offloaded once it is produced.
        t = m.offload_head[e, mc.PRODUCED]
        while t != c.NONE:
            _enqueue(m, position_of(s, m.offload[t, mc.LAST_READER]), t)
            t = m.offload[t, mc.NEXT_PRODUCED]
    share = excess_share(worst, total, capacity)
    if host >= 0:
        share += excess_share(flow[mc.HOST_EXCESS], clock[mc.HOST_EXCESS_SUM], host)
    return max(clock[mc.NOW], clock[mc.HOST_END]), share


@inlined
def _last_overflow(a: Program, m: MakespanState, at: int, until: int, capacity: int) -> int:
    """Last event from `at` to `until` - 1 at which the live bytes exceed `capacity`; NONE if none.

    Assumes that queued offloads end after event `at`.
    """
    s, found, live = m.search, c.NONE, m.flow[mc.LIVE]
    for k in range(at, until):
        e = m.order[k]
        if s.event[e, c.CODE] < a.ops:
            peak = live + s.event_bytes[e, c.ALLOCATED] + s.event_bytes[e, c.TRANSIENT]
            if peak - s.event_bytes[e, c.INPLACE_SAVED] > capacity:
                found = k
            live += s.event_bytes[e, c.ALLOCATED] - s.event_bytes[e, c.FREED]
        if k == at:
            live -= m.flow[mc.AWAITING_OFFLOAD]
    return found


@inlined
def _inplace_saving(a: Program, m: MakespanState, e: int, code: int) -> int:
    """Bytes that an in-place output saves; none if the input waits for its offload."""
    s = m.search
    for k in range(a.pairs_ptr[code], a.pairs_ptr[code + 1]):
        t = a.pairs_in[k]
        x = overwritable_copy(s, e, t)
        is_offloaded = x == s.tensor[t, c.HEAD] and m.offload[t, mc.IS_OFFLOADED] == 1
        if x != c.NONE and not (is_offloaded and m.offload[t, mc.IS_AWAY] == 0):
            return int(a.size[a.pairs_out[k]])
    return 0


@inlined
def _record(m: MakespanState, at: int, kind: int, t: int) -> None:
    row = m.transfer[m.flow[mc.TRANSFER_COUNT]]
    row[mc.BEFORE], row[mc.KIND], row[mc.MOVED_TENSOR] = at, kind, t
    m.flow[mc.TRANSFER_COUNT] += 1


@inlined
def _has_pending_offload(m: MakespanState) -> bool:
    """True if an offload is under way or queued."""
    return bool(m.flow[mc.LEFT_COUNT] < m.flow[mc.SENT_COUNT] or m.flow[mc.QUEUE_LENGTH] > 0)


@inlined
def _wait_for_room(
    m: MakespanState, at: int, bytes_: int, capacity: int, host: int, size: Ints
) -> None:
    """Wait for offloads to end until `bytes_` more fit, if they ever suffice."""
    flow = m.flow
    while _has_pending_offload(m):
        missing = flow[mc.LIVE] + bytes_ - capacity
        if missing <= 0 or missing > flow[mc.AWAITING_OFFLOAD]:
            break
        _finish_offload(m, at, host, size)


@inlined
def _finish_offload(m: MakespanState, at: int, host: int, size: Ints) -> None:
    """Wait for the next offload to end; its bytes are free unless the tensor is still read."""
    flow = m.flow
    if flow[mc.LEFT_COUNT] == flow[mc.SENT_COUNT]:
        _start_offload(m, at, host, size)
    t = m.sent[flow[mc.LEFT_COUNT]]
    m.clock[mc.NOW] = max(m.clock[mc.NOW], m.sent_end_us[flow[mc.LEFT_COUNT]])
    flow[mc.LEFT_COUNT] += 1
    m.offload[t, mc.IS_AWAY] = 1
    _record(m, at, mc.OFFLOAD_END, t)
    if position_of(m.search, m.offload[t, mc.LAST_READER]) < at:
        flow[mc.LIVE] -= size[t]
        flow[mc.AWAITING_OFFLOAD] -= size[t]


@inlined
def _start_offloads(m: MakespanState, at: int, cost_us: float, host: int, size: Ints) -> None:
    """Begin the queued offloads whose engine is free before an op of this cost (µs) ends."""
    while m.flow[mc.QUEUE_LENGTH] > 0 and m.clock[mc.OUT_FREE] <= m.clock[mc.NOW] + cost_us:
        _start_offload(m, at, host, size)


@inlined
def _start_offload(m: MakespanState, at: int, host: int, size: Ints) -> None:
    """Begin the first queued offload and remove it from the heap."""
    flow, clock = m.flow, m.clock
    # Pop the heap's root: the last entry sinks from there.
    flow[mc.QUEUE_LENGTH] -= 1
    t, last = m.queue[0, 1], flow[mc.QUEUE_LENGTH]
    key, tensor = m.queue[last, 0], m.queue[last, 1]
    slot, below = 0, 1
    while below < last:
        if below + 1 < last and m.queue[below + 1, 0] < m.queue[below, 0]:
            below += 1
        if m.queue[below, 0] >= key:
            break
        m.queue[slot, 0], m.queue[slot, 1] = m.queue[below, 0], m.queue[below, 1]
        slot, below = below, 2 * below + 1
    m.queue[slot, 0], m.queue[slot, 1] = key, tensor
    clock[mc.OUT_FREE] = max(clock[mc.NOW], clock[mc.OUT_FREE]) + m.offload_us[t]
    if m.host_us[t] > 0.0:
        clock[mc.HOST_END] = max(clock[mc.HOST_END], clock[mc.OUT_FREE]) + m.host_us[t]
    m.sent[flow[mc.SENT_COUNT]], m.sent_end_us[flow[mc.SENT_COUNT]] = t, clock[mc.OUT_FREE]
    flow[mc.SENT_COUNT] += 1
    _record(m, at, mc.OFFLOAD_START, t)
    flow[mc.HOST_LIVE] += m.host_size[t]
    if flow[mc.HOST_LIVE] > host:
        flow[mc.HOST_EXCESS] = max(flow[mc.HOST_EXCESS], flow[mc.HOST_LIVE] - host)
        clock[mc.HOST_EXCESS_SUM] += flow[mc.HOST_LIVE] - host


@inlined
def _enqueue(m: MakespanState, key: int, t: int) -> None:
    """Push a tensor on the heap of offloads; the smallest key comes first."""
    at = m.flow[mc.QUEUE_LENGTH]
    while at > 0 and m.queue[(at - 1) >> 1, 0] > key:
        above = (at - 1) >> 1
        m.queue[at, 0], m.queue[at, 1] = m.queue[above, 0], m.queue[above, 1]
        at = above
    m.queue[at, 0], m.queue[at, 1] = key, t
    m.flow[mc.QUEUE_LENGTH] += 1
