"""
The joint walk: a random walk among sequences of runs and copies, by Metropolis' rule.

A step draws one of the moves (`planner.joint.moves`); what that does to the makespan and to memory
is seen by going through the sequence once (`planner.joint.measure`). After Metropolis et al.,
Equation of State Calculations by Fast Computing Machines, J. Chem. Phys. 1953.
"""

import numpy as np

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.compiled import inner, njit
from coop_plan.planner.joint.measure import excess, makespan
from coop_plan.planner.joint.moves import begin_trial, change, collect
from coop_plan.planner.joint.repair import repair
from coop_plan.planner.joint.sequence import (
    AT_LEAVE,
    AT_OFFLOAD,
    FIRST,
    LEAVE,
    LENGTH,
    OFFLOAD,
    TRIAL,
    JointState,
)


@njit
def measured(a: Arrays, j: JointState, capacity: int, host: int) -> tuple[float, float]:
    """Makespan (µs) of the sequence at hand, and how much more than the capacities it needs."""
    begin_trial(j)
    cost = makespan(a, j, np.inf)
    if cost == np.inf:
        return cost, cost
    return cost, excess(a, j, capacity, host)


@njit
def walk(
    a: Arrays,
    j: JointState,
    steps: int,
    capacity: int,
    host: int,
    heat: float,
    steep: float,
    seed: int,
) -> None:
    """
    So many steps.

    `heat` is by how much a step may make it worse on average (µs), `steep` what it costs (µs) to
    need e times the capacity (bytes), roughly. `host` below 0 is no limit.
    """
    np.random.seed(seed)
    begin_trial(j)
    for op in range(a.ops):
        j.op[1, op] = 0
    value = makespan(a, j, np.inf) + steep * excess(a, j, capacity, host)
    _accept(a, j)
    for _ in range(steps):
        limit = value + heat * np.random.exponential()
        if not change(a, j):
            continue
        eager = np.random.random() < j.numbers.mend_chance
        for mended in range(j.numbers.repairs + 1):
            collect(a, j)
            cost = makespan(a, j, limit)
            if cost == np.inf:
                break
            over = excess(a, j, capacity, host)
            good = cost + steep * over <= limit
            if good and not (eager and over > 0.0 and mended < j.numbers.repairs):
                value = cost + steep * over
                _accept(a, j)
                break
            if over == 0.0 or mended == j.numbers.repairs or not repair(a, j):
                break


@inner
def _accept(a: Arrays, j: JointState) -> None:
    """The trial becomes the sequence at hand."""
    size = j.counts[TRIAL]
    j.counts[LENGTH] = size
    for op in range(a.ops):
        j.op[FIRST, op] = -1
    for t in range(a.size.size):
        j.tensor[AT_OFFLOAD, t] = j.tensor[AT_LEAVE, t] = -1
    for e in range(size):
        code = j.trial[e]
        j.sequence[e] = code
        j.begins[e] = j.trial_begins[e]
        j.is_first[e] = 0
        if code < a.ops:
            if j.op[FIRST, code] < 0:
                j.op[FIRST, code] = e
                j.is_first[e] = 1
        elif (code - a.ops) % 3 == OFFLOAD:
            j.tensor[AT_OFFLOAD, (code - a.ops) // 3] = e
        elif (code - a.ops) % 3 == LEAVE:
            j.tensor[AT_LEAVE, (code - a.ops) // 3] = e
    j.begins[size] = j.trial_begins[size]
