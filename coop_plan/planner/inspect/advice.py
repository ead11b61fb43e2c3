"""What to change in a model whose largest op does not fit: one sentence, by the kind of op."""

from coop_plan.planner.core.problem import Problem

LOSS = ("log_softmax", "nll_loss", "cross_entropy")
ATTENTION = ("softmax", "bmm", "baddbmm")
CONVOLUTION = ("conv",)


def advice(problem: Problem, op: int) -> str:
    """What would make the working set of an op smaller."""
    name = problem.graph.ops[op].name
    variant = problem.variants[op]
    tensors = sum(problem.bytes[t] for t in dict.fromkeys((*variant.reads, *variant.makes)))
    if variant.workspace_bytes > tensors:
        return "most of it is the op's own scratch: another implementation of the op, or less batch"
    around = _around(problem, op)
    if any(word in near for word in LOSS for near in (name, *around)):
        return "the logits and their gradient are there at once: chunk the loss over the tokens"
    if any(word in name for word in ATTENTION):
        return (
            "the scores of all pairs are written out: use a fused attention"
            " (scaled_dot_product_attention)"
        )
    if any(word in name for word in CONVOLUTION):
        return "a smaller batch or resolution here, or split this layer over the batch"
    return "split this op over the batch (micro-batches), or make its tensors smaller"


def _around(problem: Problem, op: int) -> list[str]:
    """Names of the ops that made what the op reads, and of those that read what it makes."""
    variant = problem.variants[op]
    near = {problem.producer[t] for t in variant.reads}
    near |= {reader for t in variant.makes for reader in problem.consumers[t]}
    return [problem.graph.ops[i].name for i in sorted(near) if i >= 0]
