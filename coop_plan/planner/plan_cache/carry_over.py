"""Carrying a plan from one graph to another of the same structure.

Two graphs with one fingerprint have the same ops in the same order and the same tensors by first
appearance, under other ids and with other costs. A cached plan is for the ids it was made with.
"""

from collections.abc import Sequence
from math import fsum

from coop_plan.planner.core.timeline import plan_timeline
from coop_plan.schemas import Compute, Graph, Plan, Prefetch, Step, TensorRead, Write
from coop_plan.schemas.fingerprint import tensor_order


def carry_over(
    plan: Plan, ops: Sequence[int], tensors: Sequence[int], graph: Graph, *, same_costs: bool
) -> Plan:
    """`plan`, made with these op ids and tensor ids in order, as a plan for `graph`.

    Cost figures are those of `graph`. Where its costs are not the ones the plan was made with
    (`same_costs`), a proved bound no longer holds and is left out.

    Raises:
        KeyError, ValueError: the graph has not what the plan names.
    """
    own_ops, own_tensors = [op.id for op in graph.ops], tensor_order(graph)
    carried = plan
    if (own_ops, own_tensors) != (ops, tensors):
        op_ids = dict(zip(ops, own_ops, strict=True))
        tensor_ids = dict(zip(tensors, own_tensors, strict=True))
        steps = [_step(step, op_ids, tensor_ids) for step in plan.steps]
        carried = plan.model_copy(update={"steps": steps})
    if same_costs:
        return carried
    base = fsum(op.cost_us for op in graph.ops)
    timeline = plan_timeline(graph, carried)
    cost = timeline.end_us
    least = fsum(min([op.cost_us, *(v.cost_us for v in op.variants)]) for op in graph.ops)
    return carried.model_copy(
        update={
            "base_cost_us": base,
            "cost_us": cost,
            "overhead": cost / base - 1 if base else 0.0,
            "prefetch_stall_us": timeline.prefetch_stall_us,
            "offload_stall_us": timeline.offload_stall_us,
            "status": "optimal" if cost <= least else "feasible",
            "lower_bound_us": cost if cost <= least else None,
            "lower_bound_model": "any" if cost <= least else None,
        }
    )


def _step(step: Step, op_ids: dict[int, int], tensor_ids: dict[int, int]) -> Step:
    if isinstance(step, Compute):
        reads = [
            TensorRead(tensor=tensor_ids[read.tensor]) if isinstance(read, TensorRead) else read
            for read in step.reads
        ]
        writes = [
            Write(
                buffer=write.buffer,
                tensor=tensor_ids[write.tensor],
                offset=write.offset,
                bytes=write.bytes,
            )
            for write in step.writes
        ]
        return Compute(
            op=op_ids[step.op],
            variant=step.variant,
            reads=reads,
            writes=writes,
            workspace=step.workspace,
        )
    if isinstance(step, Prefetch):
        return step.model_copy(update={"tensor": tensor_ids[step.tensor]})
    return step
