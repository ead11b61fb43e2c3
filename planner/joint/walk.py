"""
The walk: a random walk among sequences of runs and copies, by Metropolis' rule.

A step draws one of the moves (`planner.joint.moves`); what that does to the makespan and to memory
is seen from the tensors that it touches (`planner.joint.lives`, `measure`). After Metropolis et
al., Equation of State Calculations by Fast Computing Machines, J. Chem. Phys. 1953.
"""

import numpy as np

from coop_plan.planner.core.compiled import njit
from coop_plan.planner.joint.edit import accept, changed, collect, enter, leave, undo
from coop_plan.planner.joint.measure import excess, makespan
from coop_plan.planner.joint.moves import change
from coop_plan.planner.joint.repair import repair
from coop_plan.planner.joint.sequence import Program, WalkState


@njit
def measured(a: Program, s: WalkState, capacity: int, host: int) -> tuple[float, float]:
    """Makespan (µs) of the sequence at hand, and how much more than the capacities it needs."""
    if not enter(a, s):
        return np.inf, np.inf
    return makespan(a, s, np.inf), excess(s, capacity, host)


@njit
def walk(
    a: Program,
    s: WalkState,
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
    if not enter(a, s):
        return np.inf, np.inf
    kept, needs = makespan(a, s, np.inf), excess(s, capacity, host)
    accept(s)
    for _ in range(steps):
        limit = kept + steep * needs + heat * np.random.exponential()
        taken = False
        if change(a, s):
            eager = np.random.random() < s.numbers.mend_chance
            for mended in range(s.numbers.repairs + 1):
                collect(a, s)
                cost = makespan(a, s, limit)
                if cost == np.inf:
                    break
                over = excess(s, capacity, host)
                good = cost + steep * over <= limit
                if good and not (eager and over > 0.0 and mended < s.numbers.repairs):
                    kept, needs, taken = cost, over, True
                    break
                if over == 0.0 or mended == s.numbers.repairs or not repair(a, s):
                    break
        if taken:
            accept(s)
        elif changed(s):
            undo(a, s)
    leave(s)
    return kept, needs
