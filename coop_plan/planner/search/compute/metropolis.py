"""Metropolis search among sequences, for any objective, and the one of compute costs.

Each step draws a move (`moves`), eliminates dead events, and evaluates the candidate from the
tensors that changed (`liveness`, `objective`). Metropolis et al., Equation of State Calculations by
Fast Computing Machines, J. Chem. Phys. 1953.
"""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from coop_plan.planner.core.arrays import Program
from coop_plan.planner.core.jit import inlined, njit
from coop_plan.planner.search.compute.edits import eliminate_dead, finish_step, load, store
from coop_plan.planner.search.compute.moves import move_first_run, propose
from coop_plan.planner.search.compute.objective import evaluate
from coop_plan.planner.search.compute.repair import repair
from coop_plan.planner.search.compute.sequence import SearchState

State = TypeVar("State")


@njit
def evaluate_sequence(a: Program, s: SearchState, capacity: int) -> tuple[float, float]:
    """Cost (µs) and memory excess (share of `capacity`, bytes) of the stored sequence."""
    if not load(a, s):
        return np.inf, np.inf
    return evaluate(a, s, capacity, np.inf)


@njit
def metropolis(
    a: Program,
    s: SearchState,
    steps: int,
    capacity: int,
    temperature: float,
    penalty: float,
    seed: int,
) -> tuple[float, float]:
    """Make `steps` Metropolis steps from the stored sequence and store where they end.

    Returns cost and excess as `evaluate_sequence` does; see `take_steps`.
    """
    np.random.seed(seed)
    if not load(a, s):
        return np.inf, np.inf
    return take_steps(a, s, s, evaluate, True, steps, capacity, temperature, penalty)


@inlined
def take_steps(
    a: Program,
    s: SearchState,
    state: State,
    evaluate: Callable[[Program, State, int, float], tuple[float, float]],
    reorders: bool,
    steps: int,
    capacity: int,
    temperature: float,
    penalty: float,
) -> tuple[float, float]:
    """Make `steps` steps from the loaded sequence of `s` and store where they end.

    `evaluate` returns cost (µs) and memory excess of the candidate of `state`, whose sequence is
    `s`; one that exceeds `capacity` (bytes) is repaired. With `reorders` first runs move, too. A
    candidate has energy cost + `penalty` (µs) * excess, and is accepted with probability
    exp(-increase / `temperature`), µs. Returns cost and excess of the last accepted one.
    """
    current_cost, current_excess = evaluate(a, state, capacity, np.inf)
    current_area = s.now.area
    for _ in range(steps):
        # Drawing the acceptance threshold first lets an evaluation stop early above it:
        # u < exp(-d / T) is d < T * Exp(1).
        energy = current_cost + penalty * current_excess
        limit = energy + temperature * np.random.exponential()
        accepted = False
        moves_first_run = reorders and np.random.random() < s.params.first_run_chance
        if move_first_run(a, s) if moves_first_run else propose(a, s):
            repair_early = np.random.random() < 0.3  # though it would be accepted as it is
            for repairs in range(s.params.max_repairs + 1):
                eliminate_dead(a, s)
                cost, excess = evaluate(a, state, capacity, limit)
                if cost == np.inf:
                    break
                found = cost + penalty * excess
                acceptable = found <= limit
                drifts = acceptable and moves_first_run and found >= energy
                if drifts and _is_rejected_drift(s, current_area):
                    break
                last = excess == 0.0 or repairs == s.params.max_repairs
                if acceptable and (last or not repair_early):
                    current_cost, current_excess = cost, excess
                    current_area, accepted = s.now.area, True
                    break
                # Too expensive only for its memory excess: repair the peak and try again.
                if last or not repair(a, s):
                    break
        finish_step(a, s, accepted)
    store(s)
    return current_cost, current_excess


@inlined
def _is_rejected_drift(s: SearchState, current_area: float) -> bool:
    """True if a first-run move that saves nothing lengthens lifetimes and is rejected at random.

    Without it the order drifts to long lifetimes, for which layouts are harder to find.
    """
    return s.now.area > current_area and np.random.random() >= s.params.drift_chance
