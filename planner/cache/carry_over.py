"""Carrying a plan from one graph to another of the same structure.

Two graphs with one fingerprint have the same ops in the same order and the same tensors by first
appearance, under other ids and with other costs. A cached plan is for the ids it was made with.
"""

from collections.abc import Sequence

from coop_plan.schemas import Compute, Graph, Plan, Prefetch, Step, TensorRead, Write
from coop_plan.schemas.fingerprint import tensor_order


def carry_over(plan: Plan, ops: Sequence[int], tensors: Sequence[int], graph: Graph) -> Plan:
    """`plan`, made with these op ids and tensor ids in order, as a plan for `graph`.

    Cost figures are those of `graph`. Where its costs are not the ones the plan was made with, a
    proved bound no longer holds and is left out.
    """
    op_ids = dict(zip(ops, (op.id for op in graph.ops), strict=True))
    tensor_ids = dict(zip(tensors, tensor_order(graph), strict=True))
    steps = [_step(step, op_ids, tensor_ids) for step in plan.steps]
    cost_of = {op.id: op.cost_us for op in graph.ops}
    variants = {(op.id, v.name): v.cost_us for op in graph.ops for v in op.variants}
    base = sum(cost_of.values())
    cost = sum(
        cost_of[step.op] if step.variant is None else variants[step.op, step.variant]
        for step in steps
        if isinstance(step, Compute)
    )
    update: dict[str, object] = {"steps": steps}
    if (base, cost) != (plan.base_cost_us, plan.cost_us):
        untouched = plan.recomputed_ops == 0 and plan.swapped_bytes == 0 and cost == base
        update |= {
            "base_cost_us": base,
            "cost_us": cost,
            "overhead": cost / base - 1 if base else 0.0,
            "status": "optimal" if untouched else "feasible",
            "lower_bound_us": base if untouched else None,
        }
    return plan.model_copy(update=update)


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
        return step.model_copy(update={"op": op_ids[step.op], "reads": reads, "writes": writes})
    if isinstance(step, Prefetch):
        return step.model_copy(update={"tensor": tensor_ids[step.tensor]})
    return step
