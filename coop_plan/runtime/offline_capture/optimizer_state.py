"""What an optimizer keeps beside a step: resident bytes of a training run that no step reads.

Parameters are resident and gradients are outputs of the step already. The state is that of
PyTorch's optimizers: of `torch.optim.SGD` nothing, or with momentum one buffer, of
`torch.optim.AdamW` two, each of the parameter's type. With float32 masters (Micikevicius et al.,
ICLR 2018, section 3.1) a parameter of fewer bits has a copy in float32, and its state is in float32
too. What `optimizer.step()` takes while it runs is not in it: the activations are gone by then.
"""

import msgspec
from torch import fx

from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.schemas import Graph, Tensor

BUFFERS = {"sgd": 0, "momentum": 1, "adamw": 2}
"""Of each optimizer, how many numbers it keeps for one of a parameter."""

FLOAT32_BYTES = 4


def with_state(captured: Captured, optimizer: str, masters: bool) -> Graph:
    """The captured graph with the optimizer's state as one more buffer; see `BUFFERS`."""
    size = sum(_state_bytes(node, optimizer, masters) for node in _trained(captured))
    graph = captured.graph
    name = optimizer + (" and float32 masters" if masters else "")
    state = Tensor(id=len(graph.tensors), name=name, bytes=size, kind="buffer")
    return msgspec.structs.replace(graph, tensors=[*graph.tensors, state])


def _trained(captured: Captured) -> list[fx.Node]:
    """The placeholders of parameters that get gradients, one of each storage."""
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
    return int(value.numel()) * (each * BUFFERS[optimizer] + (FLOAT32_BYTES if copied else 0))
