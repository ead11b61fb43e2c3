"""Rescaling of a plan to a step of the same structure with other sizes.

The sequence of runs is taken over; liveness and placement are computed from the new sizes. That
takes a tenth of a search's time or less. The result is accepted if it uses its budget about as well
as the given plan uses its own.
"""

import time

from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import NoScheduleError, Schedule
from coop_plan.planner.keep_all import reference_layout
from coop_plan.planner.kernels import LAYOUT, compile_modules
from coop_plan.planner.method import Solution
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.placement.layout import lay_out
from coop_plan.planner.planning import verified_plan
from coop_plan.schemas import Compute, Graph, Offload, Op, Plan, Prefetch


def rescaled(graph: Graph, like: Graph, plan: Plan, options: PlanOptions) -> Plan | None:
    """A verified plan of `graph` with the runs of `plan`, or None if a search is needed.

    Args:
        graph: one profiled training step.
        like: the step of `plan`; the result is None if its structure differs.
        plan: a plan with the same options, except for the budget.
        options: those of the new plan; the result is None for the budget `min`.
    """
    compile_modules(LAYOUT)
    started = time.monotonic()
    if options.budget.kind == "min" or options.time_limit is not None:
        return None
    if not _same_but_sizes(graph, like):
        return None
    if any(isinstance(step, Offload | Prefetch) for step in plan.steps):
        return None
    problem = Problem.from_graph(
        options.apply_link(graph), options.alignment, options.outputs, options.host_budget
    )
    everything, _ = reference_layout(problem, options.budget)
    budget_bytes = options.budget.resolve(problem.fixed_bytes + everything.arena_bytes)
    assert budget_bytes is not None
    limit = budget_bytes - problem.fixed_bytes
    if limit <= 0 or everything.arena_bytes <= limit:
        return None
    position = {op.id: i for i, op in enumerate(graph.ops)}  # also of its default variant
    variants = [position[step.op] for step in plan.steps if isinstance(step, Compute)]
    try:
        schedule = Schedule.of(problem, variants)
    except NoScheduleError:
        return None
    placed, _ = lay_out(schedule, limit)
    used = plan.arena_bytes / max(1, plan.budget_bytes - plan.resident_bytes)
    if not used - 0.1 <= placed.arena_bytes / limit <= 1:
        return None
    if placed.cost_us > (1 + plan.overhead + 0.02) * problem.base_cost_us:
        return None
    return verified_plan(graph, Solution(placed), options, budget_bytes, started)


def _same_but_sizes(graph: Graph, like: Graph) -> bool:
    """True if two graphs without variants differ in costs and sizes only, up to a factor 2."""
    if len(graph.ops) != len(like.ops) or len(graph.tensors) != len(like.tensors):
        return False
    for tensor, other in zip(graph.tensors, like.tensors, strict=True):
        if tensor.kind != other.kind or tensor.id != other.id:
            return False
    for op, like_op in zip(graph.ops, like.ops, strict=True):
        if op.variants or like_op.variants or _structure(op) != _structure(like_op):
            return False
    size, other_size = _activations(graph), _activations(like)
    return size <= 2 * other_size and other_size <= 2 * size


def _structure(op: Op) -> tuple[object, ...]:
    return (
        *(op.id, op.name, op.phase, op.inputs, op.outputs),
        *(op.recomputable, op.rng, op.mutates, op.inplace),
    )


def _activations(graph: Graph) -> int:
    """Bytes of all tensors that are not resident."""
    return sum(tensor.bytes for tensor in graph.tensors if not tensor.resident)
