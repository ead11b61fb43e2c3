"""Warm start: a plan of the same graph as the first incumbent, and as a limit on the answer's cost.

A method starts from the plan's sequence of runs. The plan itself is the answer if it fits the
request and costs less than what the method found.
"""

from typing import Any

import numpy as np

from coop_plan.planner.core.problem import Problem
from coop_plan.planner.options import PlanOptions
from coop_plan.schemas import Compute, Plan


def runs_of(problem: Problem, plan: Plan) -> tuple[int, ...] | None:
    """The ops of a plan in order, for methods to start from.

    None if the plan has transfers or homes, if ops have variants, or if it reruns an op that
    accesses an overwritten tensor: sequences of ops do not say all of such a schedule.
    """
    if len(problem.variants) > problem.op_count or plan.swapped_bytes or plan.homes:
        return None
    position = {op.id: place for place, op in enumerate(problem.graph.ops)}
    runs = tuple(position[step.op] for step in plan.steps if isinstance(step, Compute))
    counts = np.bincount(runs, minlength=problem.op_count)
    if any(problem.touches_overwritten(op) for op in np.flatnonzero(counts > 1).tolist()):
        return None
    return runs


def fits(plan: Plan, options: PlanOptions, budget_bytes: int) -> bool:
    """True if a valid plan is one for these options as well, within `budget_bytes`."""
    host = options.host_budget
    return (
        plan.peak_bytes <= budget_bytes
        and (plan.alignment, plan.outputs) == (options.alignment, options.outputs)
        and plan.link_bytes_per_s == options.link
        and (host is None or plan.host_arena_bytes <= host)
    )


def as_answer(
    plan: Plan, options: PlanOptions, budget_bytes: int, seconds: float, found: Plan | None = None
) -> Plan:
    """The plan as the answer to a request, with the proofs of `found`, the method's own plan."""
    proofs: dict[str, Any] = {"lower_bound_us": None, "lower_bound_model": None}
    if found is not None and (found.lower_bound_us or np.inf) <= plan.cost_us:
        proofs = {name: getattr(found, name) for name in proofs}
    least = None if found is None else found.budget_lower_bound_bytes
    return plan.model_copy(
        update={
            "budget_bytes": budget_bytes,
            "host_budget_bytes": options.host_budget,
            "status": "feasible",
            "budget_lower_bound_bytes": least,
            "solve_seconds": seconds,
            **proofs,
        }
    )
