"""What a run that is under way costs at least."""

import numpy as np

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.jit import inlined, njit
from coop_plan.planner.online.state import CLOCK, LIVE, WRITTEN, ArenaState


@njit
def least_cost(a: Arrays, s: ArenaState, position: int) -> float:
    """
    µs that a run without transfers costs at least which has come to op `position`.

    All so far, the ops to come, and each op once that makes what is gone and will be read, or what
    is gone and that is made of.
    """
    total = float(s.total[CLOCK])
    for op in range(position, a.ops):
        total += a.cost[op]
    again = np.zeros(a.ops, np.bool_)
    for t in range(a.size.size):
        if a.last_use[t] >= position and _gone(a, s, t):
            again[a.producer[t]] = True
    for op in range(position - 1, -1, -1):  # whatever an op reads was made before it
        if again[op]:
            total += a.cost[op]
            for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
                if _gone(a, s, a.reads[k]):
                    again[a.producer[a.reads[k]]] = True
    return total


@inlined
def _gone(a: Arrays, s: ArenaState, t: int) -> bool:
    """Whether it was made, is no more, and would be made anew in the arena."""
    return bool(a.outside[t] == 0 and s.tensor[WRITTEN, t] == 1 and s.tensor[LIVE, t] == 0)
