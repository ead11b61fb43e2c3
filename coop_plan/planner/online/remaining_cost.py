"""Lower bound on the cost of a run in progress."""

import numpy as np

from coop_plan.planner.core.arrays import Arrays
from coop_plan.planner.core.jit import inlined, njit
from coop_plan.planner.online.columns import CLOCK, LIVE, WRITTEN
from coop_plan.planner.online.state import ArenaState


@njit
def run_cost_bound(a: Arrays, s: ArenaState, position: int) -> float:
    """Lower bound (µs) on the cost of a run without transfers that has reached op `position`.

    Costs so far, all later ops once, and each op once whose evicted outputs are read later or are
    needed to recompute those.
    """
    total = float(s.total[CLOCK])
    for op in range(position, a.ops):
        total += a.cost[op]
    reruns = np.zeros(a.ops, np.bool_)
    for t in range(a.size.size):
        if a.last_use[t] >= position and _is_evicted(a, s, t):
            reruns[a.producer[t]] = True
    for op in range(position - 1, -1, -1):  # an op's inputs have earlier producers
        if reruns[op]:
            total += a.cost[op]
            for k in range(a.reads_ptr[op], a.reads_ptr[op + 1]):
                if _is_evicted(a, s, a.reads[k]):
                    reruns[a.producer[a.reads[k]]] = True
    return total


@inlined
def _is_evicted(a: Arrays, s: ArenaState, t: int) -> bool:
    """True if `t` was produced, is not live, and a rerun would write it to the arena."""
    return bool(a.outside[t] == 0 and s.tensor[WRITTEN, t] == 1 and s.tensor[LIVE, t] == 0)
