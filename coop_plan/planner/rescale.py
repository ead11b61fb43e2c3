"""A plan for a step at another size, from one that was searched for at a size near it.

What runs again, and when, is taken over; everything else follows from the sizes. That takes a tenth
of a search's time or less, and is worth it where the sizes keep their proportions: what the plan
makes of its budget must be about what the other one makes of its own.
"""

import time

from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import NoScheduleError, Schedule
from coop_plan.planner.keep_all import keep_all_schedule
from coop_plan.planner.placement.layout import WORK, lay_out
from coop_plan.planner.method import Solution
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.planning import written
from coop_plan.schemas import Compute, Graph, Offload, Op, Plan, Prefetch

IDLE = 0.1
"""Part of the arena's limit that may be idle and is used by the other plan."""

DEARER = 0.02
"""How much larger than the other plan's the overhead may be."""

REACH = 2.0
"""How many times larger or smaller all activations together may be."""


def resized(graph: Graph, like: Graph, plan: Plan, options: PlanOptions) -> Plan | None:
    """
    A verified plan of `graph` that runs what `plan` does, or None where it is to be searched.

    Args:
        graph: one profiled training step.
        like: the step that `plan` is for; of the same structure, or the answer is None.
        plan: made with the same options, but that its budget may be another.
        options: of the wanted plan; the smallest budget is none that other sizes know.
    """
    started = time.monotonic()
    if options.budget.kind == "min" or options.time_limit is not None or not _alike(graph, like):
        return None
    if any(isinstance(step, Offload | Prefetch) for step in plan.steps):
        return None
    problem = Problem.from_graph(
        options.apply_link(graph), options.alignment, options.outputs, options.host_budget
    )
    work = WORK if options.budget.kind == "share" else 0  # as for a plan that is searched
    everything, _ = lay_out(keep_all_schedule(problem), work=work)
    budget_bytes = options.budget.resolve(problem.fixed_bytes + everything.arena_bytes)
    assert budget_bytes is not None
    limit = budget_bytes - problem.fixed_bytes
    if limit <= 0 or everything.arena_bytes <= limit:
        return None
    position = {op.id: i for i, op in enumerate(graph.ops)}  # of a default variant too
    variants = [position[step.op] for step in plan.steps if isinstance(step, Compute)]
    try:
        schedule = Schedule.of(problem, variants)
    except NoScheduleError:
        return None
    placed, _ = lay_out(schedule, limit)
    used = plan.arena_bytes / max(1, plan.budget_bytes - plan.resident_bytes)
    if not used - IDLE <= placed.arena_bytes / limit <= 1:
        return None
    if placed.cost_us > (1 + plan.overhead + DEARER) * problem.base_cost_us:
        return None
    return written(graph, Solution(placed), options, budget_bytes, started)


def _alike(graph: Graph, like: Graph) -> bool:
    """Whether two graphs differ in sizes and costs alone, and not by much; variants are not met."""
    if len(graph.ops) != len(like.ops) or len(graph.tensors) != len(like.tensors):
        return False
    for tensor, other in zip(graph.tensors, like.tensors, strict=True):
        if tensor.kind != other.kind or tensor.id != other.id:
            return False
    for op, before in zip(graph.ops, like.ops, strict=True):
        if op.variants or before.variants or _form(op) != _form(before):
            return False
    size, other_size = _activations(graph), _activations(like)
    return size <= REACH * other_size and other_size <= REACH * size


def _form(op: Op) -> tuple[object, ...]:
    return (
        *(op.id, op.name, op.phase, op.inputs, op.outputs),
        *(op.recomputable, op.rng, op.mutates, op.inplace),
    )


def _activations(graph: Graph) -> int:
    """Bytes."""
    return sum(tensor.bytes for tensor in graph.tensors if not tensor.resident)
