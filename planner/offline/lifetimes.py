"""Lifetimes of the buffers of a run, each ending at its last touch."""

import numpy as np

from coop_plan.planner.core.arrays import Arrays, Ints
from coop_plan.planner.core.compiled import njit
from coop_plan.planner.offline.run import Run


def lifetimes(arrays: Arrays, run: Run) -> tuple[Ints, Ints, Ints, int]:
    """
    The placement instance of `run` as `planner.layout` would make it, and its live peak.

    Returns lower, upper (half-open, in events) and size (bytes) of every block, and the largest sum
    of sizes live at one event. A buffer ends with the last event that reads or writes it, not when
    the run evicted it. In-place chains are one block; workspaces follow the buffers.
    """
    lower, upper, size, blocks, peak = _blocks(
        arrays, run.ops, run.dropped, run.drop_event, run.inplace
    )
    return lower[:blocks], upper[:blocks], size[:blocks], peak


@njit
def _blocks(
    a: Arrays, ops: Ints, dropped: Ints, drop_event: Ints, inplace: Ints
) -> tuple[Ints, Ints, Ints, int, int]:
    events = ops.size
    count = a.size.size
    total = events
    for e in range(events):
        total += a.makes_ptr[ops[e] + 1] - a.makes_ptr[ops[e]]
    lower = np.zeros(total, dtype=np.int64)
    upper = np.zeros(total, dtype=np.int64)
    size = np.zeros(total, dtype=np.int64)
    root = np.zeros(total, dtype=np.int64)
    current = np.full(count, -1, dtype=np.int64)
    left = np.zeros(count, dtype=np.uint8)
    n = 0
    d = w = 0
    for e in range(events):
        op = ops[e]
        for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
            t = a.reads[k]
            upper[root[current[t]]] = e + 1
        first_w = w
        while w < inplace.shape[0] and inplace[w, 0] == e:
            w += 1
        for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
            t = a.makes[k]
            if a.outside[t] == 1 and left[t] == 0:
                left[t] = 1
                continue
            lower[n] = e
            upper[n] = e + 1
            root[n] = n
            size[n] = a.size[t]
            for j in range(first_w, w):
                if inplace[j, 1] == t:
                    source = inplace[j, 2]
                    root[n] = root[current[source]]
                    upper[root[n]] = e + 1
                    current[source] = -1
                    size[n] = 0
            if current[t] < 0 and left[t] == 0:
                current[t] = n
            n += 1
        while d < dropped.size and drop_event[d] == e:
            current[dropped[d]] = -1
            d += 1
    for t in range(count):
        if current[t] >= 0 and a.is_output[t] == 1:
            upper[root[current[t]]] = events
    for e in range(events):
        if a.workspace[ops[e]] > 0:
            lower[n] = e
            upper[n] = e + 1
            size[n] = a.workspace[ops[e]]
            n += 1
    change = np.zeros(events + 1, dtype=np.int64)
    for b in range(n):
        change[lower[b]] += size[b]
        change[upper[b]] -= size[b]
    live = peak = 0
    for e in range(events):
        live += change[e]
        peak = max(peak, live)
    return lower, upper, size, n, peak
