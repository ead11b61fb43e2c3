"""Advice for a model whose largest working set does not fit: one sentence per kind of op."""

from coop_plan.planner.core.problem import Problem


def advice(problem: Problem, op: int) -> str:
    """A change to the model that reduces the working set of an op."""
    name = problem.graph.ops[op].name
    variant = problem.variants[op]
    tensors = sum(problem.bytes[t] for t in dict.fromkeys((*variant.reads, *variant.makes)))
    if variant.workspace_bytes > tensors:
        return "most of it is the op's workspace: use another implementation, or a smaller batch"
    neighbours = _neighbours(problem, op)
    losses = ("log_softmax", "nll_loss", "cross_entropy")
    if any(word in near for word in losses for near in (name, *neighbours)):
        return "the logits and their gradient are live at once: chunk the loss over the tokens"
    if "softmax" in name or "bmm" in name:
        return (
            "the attention scores of all pairs are materialized: use a fused attention"
            " (scaled_dot_product_attention)"
        )
    if "conv" in name:
        return "use a smaller batch or resolution here, or split this layer over the batch"
    return "split this op over the batch (micro-batches), or make its tensors smaller"


def _neighbours(problem: Problem, op: int) -> list[str]:
    """Names of the producers of the op's inputs and of the consumers of its outputs."""
    variant = problem.variants[op]
    near = {problem.producer[t] for t in variant.reads}
    near |= {reader for t in variant.makes for reader in problem.consumers[t]}
    return [problem.graph.ops[i].name for i in sorted(near) if i >= 0]
