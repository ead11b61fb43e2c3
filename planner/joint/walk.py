"""
The walk: a random walk among sequences of runs and copies, by Metropolis' rule.

A step draws one of the moves (`planner.joint.moves`); what that does to the makespan and to memory
is seen by going through the window once (`planner.joint.measure`). After Metropolis et al.,
Equation of State Calculations by Fast Computing Machines, J. Chem. Phys. 1953.
"""

import numpy as np

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.compiled import njit
from coop_plan.planner.joint.measure import excess, makespan
from coop_plan.planner.joint.moves import change, collect
from coop_plan.planner.joint.repair import repair
from coop_plan.planner.joint.sequence import LENGTH, WalkState
from coop_plan.planner.joint.window import accept, enter, leave


@njit
def measured(a: Arrays, s: WalkState, capacity: int, host: int) -> tuple[float, float]:
    """Makespan (µs) of the sequence at hand, and how much more than the capacities it needs."""
    enter(a, s, 0, s.counts[LENGTH])
    cost = makespan(a, s, np.inf)
    if cost == np.inf:
        return cost, cost
    return cost, excess(a, s, capacity, host)


@njit
def walk(
    a: Arrays,
    s: WalkState,
    low: int,
    high: int,
    steps: int,
    capacity: int,
    host: int,
    heat: float,
    steep: float,
    seed: int,
) -> None:
    """
    So many steps in the window of events `low` to `high` - 1.

    `heat` is by how much a step may make it worse on average (µs), `steep` what it costs (µs) to
    need e times the capacity (bytes), roughly. `host` below 0 is no limit.
    """
    np.random.seed(seed)
    enter(a, s, low, high)
    value = makespan(a, s, np.inf) + steep * excess(a, s, capacity, host)
    accept(a, s)
    for _ in range(steps):
        limit = value + heat * np.random.exponential()
        if not change(a, s):
            continue
        eager = np.random.random() < s.numbers.mend_chance
        for mended in range(s.numbers.repairs + 1):
            collect(a, s)
            cost = makespan(a, s, limit)
            if cost == np.inf:
                break
            over = excess(a, s, capacity, host)
            good = cost + steep * over <= limit
            if good and not (eager and over > 0.0 and mended < s.numbers.repairs):
                value = cost + steep * over
                accept(a, s)
                break
            if over == 0.0 or mended == s.numbers.repairs or not repair(a, s):
                break
    leave(s, low, high)
