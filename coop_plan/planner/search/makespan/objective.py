"""Objective of the joint search: makespan and memory excess from a simulation of the copy engines.

The engines follow `planner.core.timeline`. Offloads: when the engine is free, the queued tensor
whose last reader before its prefetch comes first is copied; its bytes are free once the copy ends.
Prefetches begin as late as possible without a stall, in the order of their reads. If memory is
short, prefetches are delayed and compute waits for offloads; what still exceeds the capacity counts
as excess. With `look_ahead` a prefetch is also delayed if memory will be short before its read:
that costs time and saves memory.
"""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, inner
from coop_plan.planner.core.lifetimes import OFFLOAD, PREFETCH, WAIT
from coop_plan.planner.search.compute.event_list import position_of
from coop_plan.planner.search.compute.liveness import overwritable_copy
from coop_plan.planner.search.compute.objective import candidate_cost, excess_share
from coop_plan.planner.search.compute.sequence import NONE
from coop_plan.planner.search.makespan.sequence import MakespanState


@inner
def evaluate(a: Program, m: MakespanState, capacity: int, limit: float) -> tuple[float, float]:
    """Makespan (µs) of the candidate and its memory excess, as shares of the capacities (bytes).

    Infinite if the sequence is no schedule or its makespan exceeds `limit`.
    """
    if candidate_cost(a, m.search, limit) == np.inf or not _respects_homes(a, m):
        return np.inf, np.inf
    _list_events(a, m)
    _list_offloads(m)
    _find_latest_starts(m)
    return _simulate(a, m, capacity, limit)


@inlined
def _respects_homes(a: Program, m: MakespanState) -> bool:
    """True if the candidate keeps the rules of `planner.core.problem.Homes`."""
    s = m.search
    # The first access of a tensor is its first run's write, which begins a copy.
    for i in range(m.home_copies.size):
        x = s.tensor[m.home_copies[i]].head
        if s.access[x].end != s.access[x].event:
            return False
    for i in range(m.returned.size):
        x = s.tensor[m.returned[i].tensor].tail
        while s.event[s.access[x].event].code != m.returned[i].op:
            x = s.access[x].previous
        if s.event[s.access[s.access[x].write].event].code < a.ops:
            return False
    for i in range(m.versions.size):
        made = s.access[s.tensor[m.versions[i].made].head].event
        used = s.access[s.tensor[m.versions[i].used].tail].event
        if position_of(s, used) > position_of(s, made):
            return False
    return True


@inlined
def _list_events(a: Program, m: MakespanState) -> None:
    """List the candidate's events with their stall-free starts, and the markers with a read."""
    s = m.search
    start, launched, work, at, prefetches = 0.0, 0.0, 0.0, 0, 0
    for b in range(s.now.blocks):
        for i in range(s.block[b].events):
            e = s.members[b, i]
            m.order[at], m.start_us[at], m.work_us[at] = e, start, work
            at += 1
            code = s.event[e].code
            if code < a.ops:
                if a.cost[code] > 0.0:
                    launched += m.flow.launch_us
                    start = max(start, launched) + a.cost[code]
                    work += a.cost[code]
                continue
            # A marker without a read is dead. Insertion sort by first reader: nearly sorted
            # already.
            x = s.event[e].first_access
            read = s.access[x].next
            if read == NONE or not s.access[read].is_read:
                continue
            first, k = position_of(s, s.access[read].event), prefetches
            while k > 0 and m.prefetch[k - 1].first_reader > first:
                m.prefetch[k] = m.prefetch[k - 1]
                k -= 1
            m.prefetch[k].first_reader, m.prefetch[k].marker = first, x
            prefetches += 1
    m.start_us[at], m.work_us[at] = start, work
    m.flow.events, m.flow.prefetches = at, prefetches


@inlined
def _list_offloads(m: MakespanState) -> None:
    """List the offloaded tensors, also by the event that produces each and by its last reader."""
    s, flow = m.search, m.flow
    for i in range(flow.offloaded):
        t = m.offloaded[i]
        m.event[m.tensor[t].producer].produced = NONE
        m.event[m.tensor[t].last_reader].last_reads = NONE
        m.tensor[t].is_offloaded = m.tensor[t].is_away = False
    flow.offloaded = 0
    for i in range(flow.prefetches):
        t = s.access[m.prefetch[i].marker].tensor
        tensor, made = m.tensor[t], s.access[s.tensor[t].head]
        tensor.last_prefetch = i
        if tensor.is_offloaded:
            continue
        producer, reader = m.event[made.event], m.event[made.end]
        tensor.is_offloaded, tensor.producer, tensor.last_reader = True, made.event, made.end
        tensor.next_produced, tensor.next_last_read = producer.produced, reader.last_reads
        producer.produced = reader.last_reads = t
        m.offloaded[flow.offloaded] = t
        flow.offloaded += 1


@inlined
def _find_latest_starts(m: MakespanState) -> None:
    """Latest positions at which the prefetches begin without a stall, computed backwards."""
    at, latest = m.flow.events - 1, np.inf
    # One engine: a prefetch must end before its read, and before the next one must begin.
    for i in range(m.flow.prefetches - 1, -1, -1):
        prefetch = m.prefetch[i]
        t = m.search.access[prefetch.marker].tensor
        latest = min(latest, m.start_us[prefetch.first_reader]) - m.tensor[t].prefetch_us
        while at > prefetch.first_reader or (at > 0 and m.start_us[at] > latest):
            at -= 1
        prefetch.latest_start = at


@inner
def _simulate(a: Program, m: MakespanState, capacity: int, limit: float) -> tuple[float, float]:
    """Simulate compute and both copy engines, event by event; see `evaluate`."""
    s, flow = m.search, m.flow
    s.now.peak_event, s.now.peak_excess = NONE, 0
    flow.now_us = flow.out_free_us = flow.in_free_us = flow.host_end_us = flow.launched_us = 0.0
    flow.live = flow.awaiting_offload = flow.host_live = flow.host_excess = 0
    flow.host_excess_sum, flow.queued, flow.sent, flow.left, flow.transfers = 0.0, 0, 0, 0, 0
    started = arrived = worst = 0
    last_overflow = NONE
    total, work = 0.0, m.work_us[flow.events]
    for at in range(flow.events):
        e = m.order[at]
        op = s.event[e].code
        if op >= a.ops:
            continue
        # Bytes that the event adds. An input that waits for its offload cannot be overwritten in
        # place.
        new_bytes = s.event[e].allocated + s.event[e].transient
        if s.event[e].inplace_saved > 0:
            none_waits = flow.offloaded == 0
            saved = s.event[e].inplace_saved
            new_bytes -= saved if none_waits else _inplace_saving(a, m, e, op)
        # Offloads that begin before this op ends, and those that have ended by now.
        _start_offloads(m, at, a.cost[op])
        while flow.left < flow.sent and m.sent[flow.left].end_us <= flow.now_us:
            _finish_offload(m, at)
        # Prefetches due now. One whose first read is still ahead is delayed as long as its bytes
        # are not free.
        while started < flow.prefetches and m.prefetch[started].latest_start <= at:
            x = m.prefetch[started].marker
            t = s.access[x].tensor
            if m.prefetch[started].first_reader > at:
                if at <= last_overflow or not m.tensor[t].is_away:
                    break
                if flow.live + new_bytes + a.size[t] > capacity:
                    break
                if position_of(s, s.access[s.access[x].previous].event) >= at:
                    break
                if flow.look_ahead:
                    until = m.prefetch[started].first_reader
                    last_overflow = _last_overflow(a, m, at, until, capacity - a.size[t])
                    if at <= last_overflow:
                        break
            # A tensor must have been offloaded before it is prefetched.
            while not m.tensor[t].is_away and _has_pending_offload(m):
                _finish_offload(m, at)
            _wait_for_room(m, at, a.size[t], capacity)
            begin_us = _launch_copy(m, m.tensor[t].prefetch_us)
            flow.in_free_us = max(begin_us, flow.in_free_us) + m.tensor[t].prefetch_us
            m.prefetch[started].arrival_us = flow.in_free_us
            _record(m, at, PREFETCH, t)
            flow.live += a.size[t]
            started += 1
        _wait_for_room(m, at, new_bytes, capacity)
        # Compute waits for the prefetches that this op reads.
        while arrived < started and m.prefetch[arrived].first_reader == at:
            t = s.access[m.prefetch[arrived].marker].tensor
            flow.now_us = max(flow.now_us, m.prefetch[arrived].arrival_us)
            _record(m, at, WAIT, t)
            flow.host_live -= m.tensor[t].host_bytes if m.tensor[t].last_prefetch == arrived else 0
            arrived += 1
        _start_offloads(m, at, a.cost[op])  # compute may have waited since
        if a.cost[op] > 0.0:
            flow.launched_us += flow.launch_us
            flow.now_us = max(flow.now_us, flow.launched_us) + a.cost[op]
        # Lower bound on the makespan: no stall from here on.
        if flow.now_us + (work - m.work_us[at + 1]) > limit:
            return np.inf, np.inf
        excess = flow.live + new_bytes - capacity
        if excess > 0:
            total += excess
            if excess > worst:
                worst = excess
                s.now.peak_event, s.now.peak_excess = at, excess
        flow.live += s.event[e].allocated - s.event[e].freed
        # After its last reader a tensor stays live until its offload has ended.
        t = m.event[e].last_reads
        while t != NONE:
            if not m.tensor[t].is_away:
                flow.live += a.size[t]
                flow.awaiting_offload += a.size[t]
            t = m.tensor[t].next_last_read
        # A tensor can be offloaded once it is produced.
        t = m.event[e].produced
        while t != NONE:
            _enqueue(m, position_of(s, m.tensor[t].last_reader), t)
            t = m.tensor[t].next_produced
    share = excess_share(worst, total, capacity)
    if flow.host_capacity >= 0:
        share += excess_share(flow.host_excess, flow.host_excess_sum, flow.host_capacity)
    return max(flow.now_us, flow.host_end_us), share


@inlined
def _last_overflow(a: Program, m: MakespanState, at: int, until: int, capacity: int) -> int:
    """Last event from `at` to `until` - 1 at which the live bytes exceed `capacity`; NONE if none.

    Assumes that queued offloads end after event `at`.
    """
    s, found, live = m.search, NONE, m.flow.live
    for k in range(at, until):
        e = m.order[k]
        if s.event[e].code < a.ops:
            peak = live + s.event[e].allocated + s.event[e].transient
            if peak - s.event[e].inplace_saved > capacity:
                found = k
            live += s.event[e].allocated - s.event[e].freed
        if k == at:
            live -= m.flow.awaiting_offload
    return found


@inlined
def _inplace_saving(a: Program, m: MakespanState, e: int, code: int) -> int:
    """Bytes that an in-place output saves; none if the input waits for its offload."""
    s = m.search
    for k in range(a.pairs_ptr[code], a.pairs_ptr[code + 1]):
        t = a.pairs_in[k]
        x = overwritable_copy(s, e, t)
        is_offloaded = x == s.tensor[t].head and m.tensor[t].is_offloaded
        if x != NONE and not (is_offloaded and not m.tensor[t].is_away):
            return int(a.size[a.pairs_out[k]])
    return 0


@inlined
def _record(m: MakespanState, at: int, kind: int, t: int) -> None:
    transfer = m.transfer[m.flow.transfers]
    transfer.before, transfer.kind, transfer.tensor = at, kind, t
    m.flow.transfers += 1


@inlined
def _has_pending_offload(m: MakespanState) -> bool:
    """True if an offload is under way or queued."""
    return bool(m.flow.left < m.flow.sent or m.flow.queued > 0)


@inlined
def _wait_for_room(m: MakespanState, at: int, bytes_: int, capacity: int) -> None:
    """Wait for offloads to end until `bytes_` more fit, if they ever suffice."""
    flow = m.flow
    while _has_pending_offload(m):
        missing = flow.live + bytes_ - capacity
        if missing <= 0 or missing > flow.awaiting_offload:
            break
        _finish_offload(m, at)


@inlined
def _finish_offload(m: MakespanState, at: int) -> None:
    """Wait for the next offload to end; its bytes are free unless the tensor is still read."""
    flow = m.flow
    if flow.left == flow.sent:
        _start_offload(m, at)
    t = m.sent[flow.left].tensor
    m.flow.now_us = max(m.flow.now_us, m.sent[flow.left].end_us)
    flow.left += 1
    m.tensor[t].is_away = True
    _record(m, at, WAIT, t)
    if position_of(m.search, m.tensor[t].last_reader) < at:
        flow.live -= m.tensor[t].bytes
        flow.awaiting_offload -= m.tensor[t].bytes


@inlined
def _start_offloads(m: MakespanState, at: int, cost_us: float) -> None:
    """Begin the queued offloads whose engine is free before an op of this cost (µs) ends."""
    flow = m.flow
    while flow.queued > 0 and flow.out_free_us <= max(flow.now_us, flow.launched_us) + cost_us:
        _start_offload(m, at)


@inlined
def _start_offload(m: MakespanState, at: int) -> None:
    """Begin the first queued offload and remove it from the heap."""
    flow = m.flow
    # Pop the heap's root: the last entry sinks from there.
    flow.queued -= 1
    t, last = m.queue[0].tensor, flow.queued
    slot, below = 0, 1
    while below < last:
        if below + 1 < last and m.queue[below + 1].last_reader < m.queue[below].last_reader:
            below += 1
        if m.queue[below].last_reader >= m.queue[last].last_reader:
            break
        m.queue[slot] = m.queue[below]
        slot, below = below, 2 * below + 1
    m.queue[slot] = m.queue[last]
    begin_us = _launch_copy(m, m.tensor[t].offload_us)
    flow.out_free_us = max(begin_us, flow.out_free_us) + m.tensor[t].offload_us
    if m.tensor[t].host_us > 0.0:
        launched_us = _launch_copy(m, m.tensor[t].host_us)
        begin_us = max(launched_us, flow.host_end_us, flow.out_free_us)
        flow.host_end_us = begin_us + m.tensor[t].host_us
    m.sent[flow.sent].tensor, m.sent[flow.sent].end_us = t, flow.out_free_us
    flow.sent += 1
    _record(m, at, OFFLOAD, t)
    flow.host_live += m.tensor[t].host_bytes
    excess = flow.host_live - flow.host_capacity
    if excess > 0:
        flow.host_excess = max(flow.host_excess, excess)
        flow.host_excess_sum += excess


@inlined
def _launch_copy(m: MakespanState, us: float) -> float:
    """Launch a copy, or an update on the host, unless it takes no time (µs).

    Returns when it can begin, µs.
    """
    flow = m.flow
    if us == 0.0:
        return flow.now_us
    if not flow.runs_ahead:
        flow.now_us += flow.copy_launch_us
    else:
        flow.launched_us += flow.copy_launch_us
    return max(flow.now_us, flow.launched_us)


@inlined
def _enqueue(m: MakespanState, last_reader: int, t: int) -> None:
    """Push a tensor on the heap of offloads; the smallest position comes first."""
    at = m.flow.queued
    while at > 0 and m.queue[(at - 1) >> 1].last_reader > last_reader:
        above = (at - 1) >> 1
        m.queue[at] = m.queue[above]
        at = above
    m.queue[at].last_reader, m.queue[at].tensor = last_reader, t
    m.flow.queued += 1
