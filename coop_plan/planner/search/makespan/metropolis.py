"""
The search: a random search among sequences with marks, by Metropolis' rule.

A step draws one of the moves (`planner.search.makespan.moves`). What that does to the lives of
tensors is seen from what it accesses (`planner.search.compute`); what the engines do then, by going
through all events (`planner.search.makespan.objective`). After Metropolis et al., Equation of State
Calculations by Fast Computing Machines, J. Chem. Phys. 1953.
"""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inner, njit
from coop_plan.planner.search.compute.edits import accept, collect, end_step, enter, leave
from coop_plan.planner.search.compute.liveness import run_fixed_length, undo_access
from coop_plan.planner.search.makespan.moves import change
from coop_plan.planner.search.makespan.objective import evaluate
from coop_plan.planner.search.makespan.repair import repair
from coop_plan.planner.search.makespan.sequence import MarkerSearchState


@inner
def _enter(a: Program, m: MarkerSearchState) -> bool:
    """Make the sequence, without what serves nothing, the current one; false where it is none."""
    s = m.orders
    if not enter(a, s):
        return False
    for t in range(a.size.size):
        undo_access(s, t)
    collect(a, s)
    if not run_fixed_length(a, s):
        return False
    accept(s)
    return True


@njit
def measured(a: Program, m: MarkerSearchState, capacity: int, host: int) -> tuple[float, float]:
    """
    Makespan (µs) of the sequence at hand, and how much more than the capacities it needs.

    Runs and marks that serve nothing are taken out of it.
    """
    if not _enter(a, m):
        return np.inf, np.inf
    leave(m.orders)
    return evaluate(a, m, capacity, host, np.inf)


@njit
def metropolis_search(
    a: Program,
    m: MarkerSearchState,
    steps: int,
    capacity: int,
    host: int,
    temperature: float,
    penalty: float,
    seed: int,
) -> tuple[float, float]:
    """
    So many steps from the sequence at hand on; what `measured` says of where they end.

    `temperature` is by how much a step may make it worse on average (µs), `penalty` what it costs
    (µs) to need e times the capacity (bytes), roughly. `host` below 0 is no limit.
    """
    np.random.seed(seed)
    s = m.orders
    if not _enter(a, m):
        return np.inf, np.inf
    kept, needs = evaluate(a, m, capacity, host, np.inf)
    for _ in range(steps):
        limit = kept + penalty * needs + temperature * np.random.exponential()
        taken = False
        if change(a, m):
            eager = np.random.random() < m.numbers.mend_chance
            for mended in range(m.numbers.repairs + 1):
                collect(a, s)
                cost, over = evaluate(a, m, capacity, host, limit)
                if cost == np.inf:
                    break
                good = cost + penalty * over <= limit
                if good and not (eager and over > 0.0 and mended < m.numbers.repairs):
                    kept, needs, taken = cost, over, True
                    break
                if over == 0.0 or mended == m.numbers.repairs or not repair(a, m):
                    break
        end_step(a, s, taken)
    leave(s)
    return kept, needs
