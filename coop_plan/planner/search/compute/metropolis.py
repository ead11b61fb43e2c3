"""
The walk: a random walk among orders of runs, by Metropolis' rule.

A step draws one of the moves (`planner.search.compute.moves`); what that does to memory is seen from the
tensors that it touches (`planner.search.compute.liveness`, `measure`). After Metropolis et
al., Equation of State Calculations by Fast Computing Machines, J. Chem. Phys. 1953.
"""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, njit
from coop_plan.planner.search.compute.edits import accept, collect, end_step, enter, leave
from coop_plan.planner.search.compute.objective import cost_of, excess
from coop_plan.planner.search.compute.moves import change, move_first
from coop_plan.planner.search.compute.repair import repair
from coop_plan.planner.search.compute.sequence import AREA, WalkState


@njit
def measured(a: Program, s: WalkState, capacity: int) -> tuple[float, float]:
    """Cost (µs) of the sequence at hand, and how much more than the capacity (bytes) it needs."""
    if not enter(a, s):
        return np.inf, np.inf
    return cost_of(a, s, np.inf), excess(s, capacity)


@inlined
def _strays(s: WalkState, area: float) -> bool:
    """
    Whether a first run was moved to no end.

    An order that drifts freely ends where lives are long, and layouts are harder to find.
    """
    return bool(s.sums[AREA] > area and np.random.random() >= s.numbers.stray_chance)


@njit
def walk(
    a: Program,
    s: WalkState,
    steps: int,
    capacity: int,
    heat: float,
    steep: float,
    seed: int,
) -> tuple[float, float]:
    """
    So many steps from the sequence at hand on; what `measured` says of where they end.

    `heat` is by how much a step may make it worse on average (µs), `steep` what it costs (µs) to
    need e times the capacity (bytes), roughly.
    """
    np.random.seed(seed)
    if not enter(a, s):
        return np.inf, np.inf
    kept, needs = cost_of(a, s, np.inf), excess(s, capacity)
    accept(s)
    area = s.sums[AREA]
    for _ in range(steps):
        limit = kept + steep * needs + heat * np.random.exponential()
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
                worth = cost + steep * over
                good = worth <= limit
                if good and moved and worth >= kept + steep * needs and _strays(s, area):
                    break
                if good and not (eager and over > 0.0 and mended < s.numbers.repairs):
                    kept, needs, area, taken = cost, over, s.sums[AREA], True
                    break
                if over == 0.0 or mended == s.numbers.repairs or not repair(a, s):
                    break
        end_step(a, s, taken)
    leave(s)
    return kept, needs
