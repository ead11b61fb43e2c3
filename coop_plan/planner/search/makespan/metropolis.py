"""Metropolis search among sequences of runs and prefetch markers.

Each step draws a move (`moves`), updates liveness from the changed tensors
(`planner.search.compute`), and simulates the copy engines over all events (`objective`). Metropolis
et al., Equation of State Calculations by Fast Computing Machines, J. Chem. Phys. 1953.
"""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inner, njit
from coop_plan.planner.search.compute.edits import accept, eliminate_dead, finish_step, load, store
from coop_plan.planner.search.compute.liveness import mark_stale, update_liveness
from coop_plan.planner.search.compute.moves import propose
from coop_plan.planner.search.compute.repair import REPAIR_CHANCE
from coop_plan.planner.search.makespan.objective import evaluate
from coop_plan.planner.search.makespan.repair import repair
from coop_plan.planner.search.makespan.sequence import MakespanState


@inner
def _load(a: Program, m: MakespanState) -> bool:
    """Load the stored sequence and eliminate its dead events; False if it is no schedule."""
    s = m.search
    if not load(a, s):
        return False
    for t in range(a.size.size):
        mark_stale(s, t)
    eliminate_dead(a, s)
    if not update_liveness(a, s):
        return False
    accept(s)
    return True


@njit
def evaluate_sequence(
    a: Program, m: MakespanState, capacity: int, host: int
) -> tuple[float, float]:
    """Makespan (µs) and memory excess of the stored sequence (share of the capacities, bytes).

    Dead runs and markers are removed from it.
    """
    if not _load(a, m):
        return np.inf, np.inf
    store(m.search)
    return evaluate(a, m, capacity, host, np.inf)


@njit
def metropolis(
    a: Program,
    m: MakespanState,
    steps: int,
    capacity: int,
    host: int,
    temperature: float,
    penalty: float,
    seed: int,
) -> tuple[float, float]:
    """Make `steps` Metropolis steps from the stored sequence and store where they end.

    Energy is makespan + `penalty` (µs) * memory excess; `temperature` is in µs. A negative `host`
    is no limit on host memory. Returns makespan and excess as `evaluate_sequence` does.
    """
    np.random.seed(seed)
    s = m.search
    if not _load(a, m):
        return np.inf, np.inf
    current_cost, current_excess = evaluate(a, m, capacity, host, np.inf)
    for _ in range(steps):
        # The threshold is drawn first: an evaluation stops early above it.
        limit = current_cost + penalty * current_excess + temperature * np.random.exponential()
        accepted = False
        if propose(a, s):
            repair_early = np.random.random() < REPAIR_CHANCE
            for repairs in range(s.params.max_repairs + 1):
                eliminate_dead(a, s)
                cost, excess = evaluate(a, m, capacity, host, limit)
                if cost == np.inf:
                    break
                last = excess == 0.0 or repairs == s.params.max_repairs
                if cost + penalty * excess <= limit and (last or not repair_early):
                    current_cost, current_excess, accepted = cost, excess, True
                    break
                # Too expensive only for its memory excess: repair the peak and try again.
                if last or not repair(a, m):
                    break
        finish_step(a, s, accepted)
    store(s)
    return current_cost, current_excess
