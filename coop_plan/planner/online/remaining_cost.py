"""Lower bound on the cost of an unfinished run."""

import numpy as np

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.jit import inlined, njit
from coop_plan.planner.online.state import CLOCK, LIVE, WRITTEN, ArenaState


@njit
def least_cost(a: Arrays, s: ArenaState, position: int) -> float:
    """
    Lower bound (µs) on the cost of a run without transfers that has reached op `position`.

    The bound is the cost so far, plus the remaining ops, plus one recompute of each op in the
    closure of an evicted tensor that is read later.
    """
    total = float(s.total[CLOCK])
    for op in range(position, a.ops):
        total += a.cost[op]
    again = np.zeros(a.ops, np.bool_)
    for t in range(a.size.size):
        if a.last_use[t] >= position and _is_evicted(a, s, t):
            again[a.producer[t]] = True
    for op in range(position - 1, -1, -1):  # whatever an op reads was made before it
        if again[op]:
            total += a.cost[op]
            for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
                if _is_evicted(a, s, a.reads[k]):
                    again[a.producer[a.reads[k]]] = True
    return total


@inlined
def _is_evicted(a: Arrays, s: ArenaState, t: int) -> bool:
    """True if `t` was produced in the arena and is evicted now."""
    return bool(a.outside[t] == 0 and s.tensor[WRITTEN, t] == 1 and s.tensor[LIVE, t] == 0)
