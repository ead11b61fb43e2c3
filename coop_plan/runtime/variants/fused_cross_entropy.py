"""Fusion of the two backward ops of a cross entropy.

The gradient of the log-probabilities between them is as large as the logits, and zero except at the
targets. Rows are independent: the fused op runs both kernels on a few rows at a time, with bitwise
equal results, and never holds the whole intermediate gradient.
"""

from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.op_replacements import CROSS_ENTROPY_BACKWARD
from coop_plan.runtime.torch_internals.ops import LOG_SOFTMAX_BACKWARD

_NLL_BACKWARD: Any = torch.ops.aten.nll_loss_backward.default


def fuse_cross_entropies(module: fx.GraphModule) -> None:
    """Fuse the backwards of each `nll_loss` and `log_softmax` into one op."""
    for node in module.graph.find_nodes(op="call_function", target=LOG_SOFTMAX_BACKWARD):
        nll_gradient, output, dim, dtype = node.args
        if not isinstance(nll_gradient, fx.Node) or nll_gradient.target is not _NLL_BACKWARD:
            continue
        value = output.meta["val"]
        same = _skip_detach(nll_gradient.args[1]) is _skip_detach(output) and set(
            nll_gradient.users
        ) == {node}
        if not same or value.dim() != 2 or dim not in (1, -1) or dtype != value.dtype:
            continue
        gradient, _, *rest_args = nll_gradient.args
        with module.graph.inserting_before(node):
            fused = module.graph.call_function(
                CROSS_ENTROPY_BACKWARD, (gradient, output, *rest_args)
            )
        fused.meta = dict(node.meta)
        node.replace_all_uses_with(fused)
        module.graph.erase_node(node)
        module.graph.erase_node(nll_gradient)


def _skip_detach(node: Any) -> Any:
    """The node below a chain of `detach`."""
    while node.target is torch.ops.aten.detach.default:
        node = node.args[0]
    return node
