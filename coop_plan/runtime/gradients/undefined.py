"""Undefined gradients: those of outputs that lead to no loss.

Autograd has no gradient of such an output, and in eager the parameters that only it depends on keep
`.grad` None, so that optimizers skip them. AOTAutograd replaces the missing gradient by zeros. So a
hook records before each backward which gradients are undefined.
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
    """Undefined gradients of a step, from the outputs without a gradient."""

    def __init__(self, captured: Captured) -> None:
        self._outputs: list[frozenset[int]] = []
        """Outputs that each gradient depends on."""
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
        """Record undefined gradients before the backward of a call with these outputs."""
        if self.possible:
            node = compiled_node(outputs if isinstance(outputs, (tuple, list)) else (outputs,))
            if node is not None:
                node.register_prehook(_note)

    def left_out(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Gradients of the running backward, with None where eager has none."""
        without, _here.without = _here.without, frozenset()
        if not without:
            return gradients
        return [
            None if outputs and outputs <= without else gradient
            for gradient, outputs in zip(gradients, self._outputs, strict=True)
        ]


def outputs_used_within(captured: Captured) -> list[int]:
    """Positions of outputs from which another output is computed."""
    outputs = captured.output_args[: captured.num_fwd_outputs]
    own: dict[object, set[int]] = {}
    for position, node in enumerate(outputs):
        own.setdefault(node, set()).add(position)
    behind: dict[object, set[int]] = {}
    for node in captured.module.graph.nodes:
        inputs = node.all_input_nodes
        behind[node] = set().union(*(behind[arg] | own.get(arg, set()) for arg in inputs))
    return sorted(set().union(*(behind.get(node, set()) for node in outputs)))


def _note(gradients: Sequence[torch.Tensor | None]) -> None:
    """Prehook: record the outputs without a gradient for this thread's next backward."""
    _here.without = frozenset(i for i, gradient in enumerate(gradients) if gradient is None)
