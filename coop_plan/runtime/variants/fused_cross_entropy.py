"""Ops of a joint graph run as one where what lies between them is large and nobody else reads it.

The gradient of a cross entropy goes through one of its log-probabilities that is zero but for the
targets, and as large as the logits. Rows are independent, so both ops run for a few rows at a time,
with the same kernels and the same numbers, and the whole is never there.
"""

from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.op_replacements import CROSS_ENTROPY_BACKWARD
from coop_plan.runtime.torch_internals.ops import LOG_SOFTMAX_BACKWARD

_NLL: Any = torch.ops.aten.nll_loss_backward.default


def fuse_cross_entropies(module: fx.GraphModule) -> None:
    """Let the backward of each `log_softmax` and `nll_loss` be one op that takes rows in parts."""
    for node in module.graph.find_nodes(op="call_function", target=LOG_SOFTMAX_BACKWARD):
        between, output, dim, dtype = node.args
        if not isinstance(between, fx.Node) or between.target is not _NLL:
            continue
        value = output.meta["val"]
        same = _detached(between.args[1]) is _detached(output) and set(between.users) == {node}
        if not same or value.dim() != 2 or dim not in (1, -1) or dtype != value.dtype:
            continue
        gradient, _, *others = between.args
        with module.graph.inserting_before(node):
            fused = module.graph.call_function(CROSS_ENTROPY_BACKWARD, (gradient, output, *others))
        fused.meta = dict(node.meta)
        node.replace_all_uses_with(fused)
        module.graph.erase_node(node)
        module.graph.erase_node(between)


def _detached(node: Any) -> Any:
    """The node whose values another is, for autograd alone a tensor of its own."""
    while node.target is torch.ops.aten.detach.default:
        node = node.args[0]
    return node
