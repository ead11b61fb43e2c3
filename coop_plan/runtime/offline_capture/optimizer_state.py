"""Optimizer state as a resident tensor of a captured graph.

The graph contains parameters and gradients already. PyTorch's optimizers keep buffers of the
parameter's dtype: `torch.optim.SGD` none, or one with momentum; `torch.optim.AdamW` two. With
float32 masters (Micikevicius et al., ICLR 2018, section 3.1) a parameter of fewer bits has a
float32 copy, and its buffers are float32, too. Temporaries of `optimizer.step()` are not included:
the activations are dead by then.
"""

import msgspec
from torch import fx

from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.schemas import Graph, Tensor

BUFFERS_PER_OPTIMIZER = {"sgd": 0, "momentum": 1, "adamw": 2}
"""State elements per parameter element, by optimizer."""

FLOAT32_BYTES = 4


def with_optimizer_state(captured: Captured, optimizer: str, masters: bool) -> Graph:
    """The captured graph with the optimizer's state as one more buffer."""
    size = sum(_state_bytes(node, optimizer, masters) for node in _trained(captured))
    graph = captured.graph
    name = optimizer + (" and float32 masters" if masters else "")
    state = Tensor(id=len(graph.tensors), name=name, bytes=size, kind="buffer")
    return msgspec.structs.replace(graph, tensors=[*graph.tensors, state])


def _trained(captured: Captured) -> list[fx.Node]:
    """The placeholders of trained parameters, one per storage."""
    found: dict[int, fx.Node] = {}
    for node in captured.module.graph.find_nodes(op="placeholder"):
        for t in captured.storages.get(node, ()):
            if t is not None and captured.graph.tensors[t].kind == "parameter":
                found.setdefault(t, node)
    return list(found.values())


def _state_bytes(node: fx.Node, optimizer: str, masters: bool) -> int:
    value = node.meta["val"]
    width = value.element_size()
    copied = masters and width < FLOAT32_BYTES
    each = FLOAT32_BYTES if copied else width
    return int(value.numel()) * (
        each * BUFFERS_PER_OPTIMIZER[optimizer] + (FLOAT32_BYTES if copied else 0)
    )
