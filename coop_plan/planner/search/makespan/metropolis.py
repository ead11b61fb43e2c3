"""Metropolis search among sequences of runs and prefetch markers.

The steps are those of `planner.search.compute.metropolis`, and `objective` simulates the copy
engines over all events.
"""

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inner, njit
from coop_plan.planner.search.compute.edits import accept, eliminate_dead, load, store
from coop_plan.planner.search.compute.liveness import mark_stale, update_liveness
from coop_plan.planner.search.compute.metropolis import take_steps
from coop_plan.planner.search.makespan.objective import evaluate
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
def evaluate_sequence(a: Program, m: MakespanState, capacity: int) -> tuple[float, float]:
    """Makespan (µs) and memory excess of the stored sequence (share of the capacities, bytes).

    Dead runs and markers are removed from it.
    """
    if not _load(a, m):
        return np.inf, np.inf
    store(m.search)
    return evaluate(a, m, capacity, np.inf)


@njit
def metropolis(
    a: Program,
    m: MakespanState,
    steps: int,
    capacity: int,
    temperature: float,
    penalty: float,
    seed: int,
) -> tuple[float, float]:
    """Make `steps` Metropolis steps from the stored sequence and store where they end.

    Returns makespan and excess as `evaluate_sequence` does; see `take_steps`.
    """
    np.random.seed(seed)
    if not _load(a, m):
        return np.inf, np.inf
    return take_steps(a, m.search, m, evaluate, False, steps, capacity, temperature, penalty)
