"""Checkpoints in the user's function (`torch.utils.checkpoint`): the order of their ops in eager.

A joint graph has each op of a checkpoint once. Eager autograd runs the checkpoint's forward again
when its backward first needs a tensor in it.
"""

from collections.abc import Hashable, Sequence

from coop_plan.schemas import Graph, Op


def eager_order(graph: Graph, checkpoints: Sequence[Hashable | None]) -> list[int]:
    """Ops in the order in which eager autograd runs them; `checkpoints` has that of each op.

    A tensor is kept if the forward reads it outside its checkpoint, or if it leaves the step.
    """
    inside: dict[int, Hashable] = {}  # tensors of checkpoints
    for op, checkpoint in zip(graph.ops, checkpoints, strict=True):
        if checkpoint is not None and op.recomputable:
            inside |= {t: checkpoint for t in op.outputs if graph.tensors[t].kind == "activation"}
    for op, checkpoint in zip(graph.ops, checkpoints, strict=True):
        for t in op.inputs if op.phase == "forward" else ():
            if inside.get(t, checkpoint) != checkpoint:
                del inside[t]
    missing: dict[Hashable, set[int]] = {}
    for op in graph.ops:
        for t in op.inputs if op.phase != "forward" else ():
            if t in inside:
                missing.setdefault(inside[t], set()).add(t)
    order: list[int] = []
    for op in graph.ops:
        for t in op.inputs if op.phase != "forward" else ():
            if t in inside and inside[t] in missing:
                order += _producers(graph.ops, missing.pop(inside[t]), inside)
        order.append(op.id)
    return order


def _producers(ops: Sequence[Op], wanted: set[int], inside: dict[int, Hashable]) -> list[int]:
    """Ops that make the wanted tensors from those that are kept, in program order."""
    found: list[int] = []
    for op in reversed(ops):
        if not wanted.isdisjoint(op.outputs):
            found.append(op.id)
            wanted.update(t for t in op.inputs if t in inside)
    return found[::-1]
