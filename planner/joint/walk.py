"""
The walk: a random walk among sequences with marks, by Metropolis' rule.

A step draws one of the moves (`planner.joint.moves`) and evaluates what comes of it as a whole
(`planner.joint.timing`). After Metropolis et al., Equation of State Calculations by Fast Computing
Machines, J. Chem. Phys. 1953.
"""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.compiled import njit
from coop_plan.planner.joint.marks import EVENTS, MarkState, collect
from coop_plan.planner.joint.moves import change
from coop_plan.planner.joint.repair import repair
from coop_plan.planner.joint.timing import evaluate


@njit
def measured(a: Program, s: MarkState, capacity: int, host: int) -> tuple[float, float]:
    """Makespan (µs) of the sequence at hand, and how much more than the capacities it needs."""
    collect(a, s, 0)
    return evaluate(a, s, 0, capacity, host, np.inf)


@njit
def walk(
    a: Program,
    s: MarkState,
    steps: int,
    capacity: int,
    host: int,
    heat: float,
    steep: float,
    seed: int,
) -> tuple[float, float]:
    """
    So many steps from the sequence at hand on; what `measured` says of where they end.

    `heat` is by how much a step may make it worse on average (µs), `steep` what it costs (µs) to
    need e times the capacity (bytes), roughly. `host` below 0 is no limit.
    """
    np.random.seed(seed)
    current, trial = 0, 1
    collect(a, s, current)
    kept, needs = evaluate(a, s, current, capacity, host, np.inf)
    if kept == np.inf:
        return kept, needs
    for _ in range(steps):
        limit = kept + steep * needs + heat * np.random.exponential()
        if not change(a, s, current, trial):
            continue
        eager = np.random.random() < s.numbers.mend_chance
        for mended in range(s.numbers.repairs + 1):
            collect(a, s, trial)
            cost, over = evaluate(a, s, trial, capacity, host, limit)
            if cost == np.inf:
                break
            good = cost + steep * over <= limit
            if good and not (eager and over > 0.0 and mended < s.numbers.repairs):
                kept, needs = cost, over
                current, trial = trial, current
                break
            if over == 0.0 or mended == s.numbers.repairs or not repair(a, s, trial):
                break
    if current == 1:
        for e in range(s.counts[1, EVENTS]):
            s.code[0, e] = s.code[1, e]
        s.counts[0, EVENTS] = s.counts[1, EVENTS]
    return kept, needs
