"""
The Metropolis walk: a random walk among sequences of ops, by Metropolis' rule.

A step draws one of the moves (`planner.offline.moves`); what that does to memory is seen by going
through the sequence once (`planner.offline.trial`). After Metropolis et al., Equation of State
Calculations by Fast Computing Machines, J. Chem. Phys. 1953.

The walk takes place in a window of the sequence; all else stays as it is. What is live when the
window begins may be read in it, and what is read after its end must be there by then.
"""

import numpy as np

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.compiled import inner, njit
from coop_plan.planner.offline.moves import change, collect, look_back, repair
from coop_plan.planner.offline.sequence import (
    ALIVE,
    CURRENT,
    FIRST,
    GONE,
    LEFT,
    LENGTH,
    NEEDED,
    NEEDED_COUNT,
    NEEDED_LIST,
    NEVER,
    POSITION,
    RAN,
    READY,
    READY_COUNT,
    READY_LIST,
    ROOM,
    SEEN,
    TRIAL,
    WINDOW,
    MetropolisState,
)
from coop_plan.planner.offline.trial import trial_cost, trial_excess


@njit
def cost_and_excess(a: Arrays, m: MetropolisState, capacity: int) -> tuple[float, float]:
    """Cost (µs) of the whole sequence, and how much more than the capacity (bytes) it needs."""
    _enter(a, m, 0, m.counts[LENGTH])
    over = trial_excess(a, m, capacity)
    return trial_cost(a, m), over


@njit
def metropolis(
    a: Arrays,
    m: MetropolisState,
    low: int,
    high: int,
    steps: int,
    capacity: int,
    heat: float,
    steep: float,
    seed: int,
) -> None:
    """
    So many steps in the window of events `low` to `high` - 1.

    `heat` is by how much a step may make it worse on average (µs), `steep` what it costs (µs) to
    need e times the capacity (bytes), roughly.
    """
    np.random.seed(seed)
    _enter(a, m, low, high)
    value = trial_cost(a, m) + steep * trial_excess(a, m, capacity)
    _accept(a, m)
    for _ in range(steps):
        limit = value + heat * np.random.exponential()
        if not change(a, m):
            continue
        eager = np.random.random() < m.numbers.mend_chance
        for mended in range(m.numbers.repairs + 1):
            collect(a, m)
            cost = trial_cost(a, m)
            if cost > limit:
                break
            over = trial_excess(a, m, capacity)
            good = cost + steep * over <= limit
            if good and not (eager and over > 0.0 and mended < m.numbers.repairs):
                value = cost + steep * over
                _accept(a, m)
                break
            if not 0.0 < over < np.inf or mended == m.numbers.repairs or not repair(a, m):
                break
    _leave(m, low, high)


@inner
def _enter(a: Arrays, m: MetropolisState, low: int, high: int) -> None:
    """Make the window's events the trial, and find out what there is before and after it."""
    length = m.counts[LENGTH]
    for t in range(a.size.size):
        m.tensor[READY, t] = m.tensor[GONE, t] = 0
        m.tensor[ALIVE, t] = a.is_output[t] - a.outside[t]
    for op in range(a.ops):
        m.op[RAN, op] = 0
    for e in range(low):
        op = m.ops[e]
        m.op[RAN, op] = 1
        for k in range(a.makes_ptr[op], a.makes_ptr[op + 1]):
            m.tensor[GONE if a.outside[a.makes[k]] == 1 else READY, a.makes[k]] = 1
    for e in range(length - 1, low - 1, -1):
        if e == high - 1:
            for t in range(a.size.size):
                m.tensor[NEEDED, t] = m.tensor[ALIVE, t]
        look_back(a, m, m.ops[e])
    for op in range(a.ops):
        m.op[SEEN, op] = m.op[RAN, op]
    for e in range(low, high):
        m.op[SEEN, m.ops[e]] = 1
    m.counts[READY_COUNT] = m.counts[NEEDED_COUNT] = 0
    for t in range(a.size.size):
        if m.tensor[READY, t] == 1 and m.tensor[ALIVE, t] == 1:
            m.tensor[READY_LIST, m.counts[READY_COUNT]] = t
            m.counts[READY_COUNT] += 1
        if a.producer[t] < 0 or m.op[SEEN, a.producer[t]] == 0:
            m.tensor[NEEDED, t] = 0
        if m.tensor[NEEDED, t] == 1:
            m.tensor[NEEDED_LIST, m.counts[NEEDED_COUNT]] = t
            m.counts[NEEDED_COUNT] += 1
        # Whoever changes one of these puts it back.
        m.tensor[ALIVE, t] = m.tensor[NEEDED, t]
        m.tensor[LEFT, t] = m.tensor[GONE, t]
        m.tensor[CURRENT, t] = -1
    for op in range(a.ops):
        m.op[SEEN, op] = m.op[RAN, op]
        m.op[FIRST, op] = -1 if m.op[RAN, op] == 1 else NEVER
    m.counts[TRIAL] = high - low
    m.counts[POSITION] = m.op[RAN].sum()
    m.counts[ROOM] = m.ops.size - length + high - low
    for e in range(low, high):
        m.trial[e - low] = m.ops[e]


@inner
def _leave(m: MetropolisState, low: int, high: int) -> None:
    """Put the window back in its place."""
    length, size = m.counts[LENGTH], m.counts[WINDOW]
    more = size - (high - low)
    if more > 0:
        for e in range(length - 1, high - 1, -1):
            m.ops[e + more] = m.ops[e]
    else:
        for e in range(high, length):
            m.ops[e + more] = m.ops[e]
    for e in range(size):
        m.ops[low + e] = m.window[e]
    m.counts[LENGTH] = length + more


@inner
def _accept(a: Arrays, m: MetropolisState) -> None:
    """The trial becomes the window."""
    size = m.counts[TRIAL]
    m.counts[WINDOW] = size
    for e in range(size):
        if m.op[RAN, m.trial[e]] == 0:
            m.op[FIRST, m.trial[e]] = NEVER
    for e in range(size):
        op = m.trial[e]
        m.window[e] = op
        m.is_first[e] = 1 if m.op[FIRST, op] == NEVER else 0
        if m.is_first[e] == 1:
            m.op[FIRST, op] = e
