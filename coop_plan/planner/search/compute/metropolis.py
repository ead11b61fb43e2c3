"""
Metropolis search over orders of runs.

A step draws one move (`planner.search.compute.moves`). Memory and cost are updated for the tensors
that it accesses (`liveness`, `objective` of this folder). After Metropolis et al., Equation of
State Calculations by Fast Computing Machines, J. Chem. Phys. 1953.
"""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, njit
from coop_plan.planner.search.compute.edits import accept, collect, end_step, enter, leave
from coop_plan.planner.search.compute.moves import change, move_first
from coop_plan.planner.search.compute.objective import cost_of, excess
from coop_plan.planner.search.compute.repair import repair
from coop_plan.planner.search.compute.sequence import AREA, SearchState


@njit
def measured(a: Program, s: SearchState, capacity: int) -> tuple[float, float]:
    """Cost (µs) of the current sequence, and its excess over the capacity (bytes) as a share."""
    if not enter(a, s):
        return np.inf, np.inf
    return cost_of(a, s, np.inf), excess(s, capacity)


@inlined
def _strays(s: SearchState, area: float) -> bool:
    """
    True if a moved first run saved nothing and is not kept by chance.

    Orders that drift freely get longer lifetimes, for which layouts are harder to find.
    """
    return bool(s.sums[AREA] > area and np.random.random() >= s.numbers.stray_chance)


@njit
def metropolis_search(
    a: Program,
    s: SearchState,
    steps: int,
    capacity: int,
    temperature: float,
    penalty: float,
    seed: int,
) -> tuple[float, float]:
    """
    Run `steps` Metropolis steps from the current sequence; returns `measured` of the last one.

    `temperature` is the mean increase (µs) that a step accepts. `penalty` is about the cost (µs) of
    live bytes of e times the capacity (bytes).
    """
    np.random.seed(seed)
    if not enter(a, s):
        return np.inf, np.inf
    kept, needs = cost_of(a, s, np.inf), excess(s, capacity)
    accept(s)
    area = s.sums[AREA]
    for _ in range(steps):
        limit = kept + penalty * needs + temperature * np.random.exponential()
        taken = False
        moved = np.random.random() < s.numbers.first_chance
        if move_first(a, s) if moved else change(a, s):
            eager = np.random.random() < s.numbers.mend_chance
            for mended in range(s.numbers.repairs + 1):
                collect(a, s)
                cost = cost_of(a, s, limit)
                if cost == np.inf:
                    break
                over = excess(s, capacity)
                worth = cost + penalty * over
                good = worth <= limit
                if good and moved and worth >= kept + penalty * needs and _strays(s, area):
                    break
                if good and not (eager and over > 0.0 and mended < s.numbers.repairs):
                    kept, needs, area, taken = cost, over, s.sums[AREA], True
                    break
                if over == 0.0 or mended == s.numbers.repairs or not repair(a, s):
                    break
        end_step(a, s, taken)
    leave(s)
    return kept, needs
