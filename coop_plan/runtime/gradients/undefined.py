"""Gradients that eager does not have, as nothing was made of the outputs that they belong to.

Where an output of a step leads to no loss, autograd has no gradient of it, and eager has none of
the parameters that matter to it alone: `.grad` stays None, and optimizers pass over them.
AOTAutograd makes zeros of such a gradient first. So a hook notes which there are before a backward.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.runtime.torch_internals.joint_graphs import (
    compiled_node,
    is_tangent,
    plain_outputs,
    tangent_output,
)


class _Here(threading.local):
    without: frozenset[int] = frozenset()


_here = _Here()


class Undefined:
    """Which gradients of a step are none, by the outputs of the forward that have none."""

    def __init__(self, captured: Captured) -> None:
        self._outputs: list[frozenset[int]] = []
        """Of each gradient: the outputs whose gradients it is made of."""
        outputs = plain_outputs(captured.module)[: captured.num_fwd_outputs]
        behind: dict[fx.Node, frozenset[int]] = {}
        if len(outputs) == captured.num_fwd_outputs:
            for node in captured.module.graph.nodes:
                behind[node] = frozenset().union(*(behind[arg] for arg in node.all_input_nodes))
                if is_tangent(node):
                    output = tangent_output(node)
                    behind[node] = frozenset({outputs.index(output)} if output in outputs else ())
        gradients = captured.output_args[captured.num_fwd_outputs :]
        self._outputs = [behind.get(value, frozenset()) for value in gradients]
        some = {outputs for outputs in self._outputs if outputs}
        self.possible = len(some) > 1 or some != {frozenset().union(*some)}

    def watch(self, outputs: Any) -> None:
        """Have the backward of a call noted, of which these are the outputs."""
        if self.possible:
            node = compiled_node(outputs if isinstance(outputs, (tuple, list)) else (outputs,))
            if node is not None:
                node.register_prehook(_note)

    def left_out(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """The gradients of the backward that runs now, without those that eager does not have."""
        without, _here.without = _here.without, frozenset()
        if not without:
            return gradients
        return [
            None if outputs and outputs <= without else gradient
            for gradient, outputs in zip(gradients, self._outputs, strict=True)
        ]


def _note(gradients: Sequence[torch.Tensor | None]) -> None:
    """A backward is next on this thread; autograd has these gradients for it."""
    _here.without = frozenset(i for i, gradient in enumerate(gradients) if gradient is None)
