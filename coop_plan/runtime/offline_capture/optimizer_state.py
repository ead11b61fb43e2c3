"""Optimizer state as a resident tensor of a captured graph.

The graph contains parameters and gradients already. The state is that of `optimizers.py`. With
float32 masters (Micikevicius et al., ICLR 2018, section 3.1) a parameter of fewer bits has a
float32 copy, and its buffers are float32, too. Temporaries of `optimizer.step()` are not included;
`eager_memory.py` counts them.
"""

import msgspec
import torch
from torch import fx

from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.runtime.offline_capture.optimizer_spec import OptimizerSpec
from coop_plan.runtime.offline_capture.optimizers import Update
from coop_plan.schemas import Graph, Tensor


def with_optimizer_state(captured: Captured, optimizer: OptimizerSpec) -> Graph:
    """The captured graph with the optimizer's state as one more buffer; counters are left out."""
    graph = captured.graph
    kept: list[torch.Tensor] = []
    if trained := [node.meta["val"] for node in _trained(captured)]:
        with trained[0].fake_mode:
            parameters = [torch.empty_like(value) for value in trained]
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            update = Update(optimizer, parameters)
            update.step()
            kept = [tensor for tensor in update.states if tensor.ndim] + update.masters
    size = sum(tensor.numel() * tensor.element_size() for tensor in kept)
    parts = [optimizer.name, *["float32 masters"] * optimizer.masters, *["ema"] * optimizer.ema]
    name = " and ".join(parts)
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
