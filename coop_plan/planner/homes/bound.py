"""Lower bound on the cost of plans with homes, proved by a process while they are searched."""

import time
from math import inf

from coop_plan.planner.exact.dual.background import BoundingProcess
from coop_plan.planner.exact.incumbent import OPTIMALITY_TOLERANCE
from coop_plan.schemas import Plan


def with_bound(plan: Plan, process: BoundingProcess, until: float) -> Plan:
    """The plan with the bound that is proved by then (a `time.monotonic` value, s), if any is.

    Returns earlier if the plan is proved or the process has ended.
    """
    bound = process.proved()
    while process.running and not _proves(bound, plan) and time.monotonic() < until:
        bound = max(bound, process.proved(until))
    if bound == -inf:
        return plan
    return plan.model_copy(
        {
            "status": "optimal" if _proves(bound, plan) else "feasible",
            "lower_bound_us": min(bound, plan.cost_us),
            "lower_bound_model": "any",
        }
    )


def _proves(bound_us: float, plan: Plan) -> bool:
    return plan.cost_us <= bound_us * (1 + OPTIMALITY_TOLERANCE)
