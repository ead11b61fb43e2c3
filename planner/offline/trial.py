"""What a trial of the Metropolis walk costs, and how much more memory it needs than there is."""

import numpy as np

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.compiled import inlined, inner
from coop_plan.planner.offline.sequence import (
    BEGIN,
    COPIES,
    CURRENT,
    END,
    GONE,
    LEFT,
    MARGINS,
    NEEDED_COUNT,
    NEEDED_LIST,
    OVER,
    POSITION,
    RAN,
    READY_COUNT,
    READY_LIST,
    SEEN,
    TENSOR,
    TRIAL,
    WORST,
    MetropolisState,
)


@inner
def trial_cost(a: Arrays, m: MetropolisState) -> float:
    total = 0.0
    for e in range(m.counts[TRIAL]):
        total += a.cost[m.trial[e]]
    return total


@inner
def trial_excess(a: Arrays, m: MetropolisState, capacity: int) -> float:
    """
    How much more than the capacity the trial needs, as a share of it; infinite if a read fails.

    Leaves its copies, the bytes live at each event, and the fullest one.
    """
    size = m.counts[TRIAL]
    m.counts[COPIES] = 0
    for i in range(m.counts[READY_COUNT]):
        _copy(m, m.tensor[READY_LIST, i], -1)
    complete = _trace(a, m)
    over = np.inf
    if complete:
        for c in range(m.counts[COPIES]):
            if m.copy[END, c] >= 0:
                m.live[max(0, m.copy[BEGIN, c])] += a.size[m.copy[TENSOR, c]]
                m.live[m.copy[END, c] + 1] -= a.size[m.copy[TENSOR, c]]
        over = _sum_up(a, m, capacity)
    for e in range(size):
        op = m.trial[e]
        m.op[SEEN, op] = m.op[RAN, op]
        for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
            m.tensor[LEFT, a.makes[k]] = m.tensor[GONE, a.makes[k]]
    for c in range(m.counts[COPIES]):
        m.tensor[CURRENT, m.copy[TENSOR, c]] = -1
    return over


@inner
def _trace(a: Arrays, m: MetropolisState) -> bool:
    """Find the copies, and what is live for one event only; false if something is not there."""
    size = m.counts[TRIAL]
    for e in range(size + 2):
        m.live[e] = 0
    for e in range(size):
        op = m.trial[e]
        once = a.workspace[op]
        for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
            if m.tensor[CURRENT, a.reads[k]] < 0:
                return False
            m.copy[END, m.tensor[CURRENT, a.reads[k]]] = e
        for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
            t = a.makes[k]
            if a.outside[t] == 1 and m.tensor[LEFT, t] == 0:
                m.tensor[LEFT, t] = 1
            elif a.outside[t] == 1:
                once += a.size[t]
            else:
                _copy(m, t, e)
        m.live[e] += once
        m.live[e + 1] -= once
    for i in range(m.counts[NEEDED_COUNT]):
        c = m.tensor[CURRENT, m.tensor[NEEDED_LIST, i]]
        if c < 0:
            return False
        m.copy[END, c] = size
    return True


@inlined
def _margin(m: MetropolisState, position: int, op: int) -> int:
    """Bytes to leave free while the op runs for this position."""
    margin = 0
    for i in range(m.counts[MARGINS]):
        if m.margin[0, i] == position and m.margin[1, i] == op:
            margin = m.margin[2, i]
    return margin


@inlined
def _copy(m: MetropolisState, t: int, event: int) -> None:
    copy = m.counts[COPIES]
    m.counts[COPIES] += 1
    m.tensor[CURRENT, t] = copy
    m.copy[TENSOR, copy] = t
    m.copy[BEGIN, copy] = m.copy[END, copy] = event


@inner
def _sum_up(a: Arrays, m: MetropolisState, capacity: int) -> float:
    """Changes of what is live become what is live, in-place pairs sharing; the excess."""
    ready = m.counts[READY_COUNT]
    for c in range(m.counts[COPIES]):
        m.tensor[CURRENT, m.copy[TENSOR, c]] = -1
    for c in range(ready):
        m.tensor[CURRENT, m.copy[TENSOR, c]] = c
    position = m.counts[POSITION]
    live = 0
    most = -1
    total = 0.0
    c = ready
    for e in range(m.counts[TRIAL]):
        op = m.trial[e]
        live += m.live[e]
        here = live
        for k in range(a.pairs_ptr[op], a.pairs_ptr[op + 1]):
            source = m.tensor[CURRENT, a.pairs_in[k]]
            if source >= 0 and m.copy[END, source] == e:
                here -= a.size[a.pairs_out[k]]
                break
        while c < m.counts[COPIES] and m.copy[BEGIN, c] == e:
            m.tensor[CURRENT, m.copy[TENSOR, c]] = c
            c += 1
        m.live[e] = here
        over = here - capacity
        if m.tight[position] == 1:
            over += _margin(m, position, op)
        if m.op[SEEN, op] == 0:
            m.op[SEEN, op] = 1
            position += 1
        if over > 0:
            total += over
            if over > most:
                most = over
                m.counts[WORST] = e
                m.counts[OVER] = over
    if most < 0:
        return 0.0
    return m.numbers.least_excess + (most + m.numbers.spread * total) / max(1, capacity)
