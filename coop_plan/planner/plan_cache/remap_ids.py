"""Remapping of a plan's ids and costs to another graph of the same structure.

Graphs with equal fingerprints have equal ops in order, and equal tensors by first appearance; ids
and costs may differ. A cached plan has the ids of the graph that it was made for.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from coop_plan.planner.core.timeline import base_cost_us, plan_timeline
from coop_plan.planner.plan_cache.cost_rule import carried_bound, least_cost
from coop_plan.schemas import Compute, Graph, Plan, Prefetch, Step, TensorRead
from coop_plan.schemas.fingerprint import tensor_order


def remap_ids(
    plan: Plan,
    ops: Sequence[int],
    tensors: Sequence[int],
    graph: Graph,
    made_with: Sequence[float] | None,
) -> Plan:
    """`plan`, whose graph has these op and tensor ids in order, as a plan for `graph`.

    Cost figures are those of `graph`. If the plan was `made_with` other costs, its lower bound is
    the one that holds for the costs of `graph`.

    Raises:
        KeyError, ValueError: the plan names an op, tensor or variant that `graph` does not have.
    """
    own_ops, own_tensors = [op.id for op in graph.ops], tensor_order(graph)
    remapped = plan
    if (own_ops, own_tensors) != (ops, tensors):
        op_ids = dict(zip(ops, own_ops, strict=True))
        tensor_ids = dict(zip(tensors, own_tensors, strict=True))
        steps = [_step(step, op_ids, tensor_ids) for step in plan.steps]
        homes = [replace(home, tensor=tensor_ids[home.tensor]) for home in plan.homes]
        remapped = plan.model_copy(update={"steps": steps, "homes": homes})
    if made_with is None:
        return remapped
    base = base_cost_us(graph)
    timeline = plan_timeline(graph, remapped)
    cost = timeline.end_us
    bound, model = least_cost(graph), "any"
    if plan.lower_bound_us is not None and plan.lower_bound_model is not None:
        linked = graph.device.linked or plan.link_bytes_per_s is not None
        carried = carried_bound(graph, made_with, plan.lower_bound_us, link=linked)
        if carried > bound:
            bound, model = carried, plan.lower_bound_model
    optimal = cost <= bound
    return remapped.model_copy(
        update={
            "base_cost_us": base,
            "cost_us": cost,
            "overhead": cost / base - 1 if base else 0.0,
            "prefetch_stall_us": timeline.prefetch_stall_us,
            "offload_stall_us": timeline.offload_stall_us,
            "status": "optimal" if optimal else "feasible",
            "lower_bound_us": min(bound, cost),
            "lower_bound_model": model,
        }
    )


def _step(step: Step, op_ids: dict[int, int], tensor_ids: dict[int, int]) -> Step:
    if isinstance(step, Compute):
        reads = [
            TensorRead(tensor=tensor_ids[read.tensor]) if isinstance(read, TensorRead) else read
            for read in step.reads
        ]
        writes = [replace(write, tensor=tensor_ids[write.tensor]) for write in step.writes]
        return replace(step, op=op_ids[step.op], reads=reads, writes=writes)
    if isinstance(step, Prefetch):
        return replace(step, tensor=tensor_ids[step.tensor])
    return step
