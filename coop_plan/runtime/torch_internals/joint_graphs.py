"""AOTAutograd's joint graph, and the compiled code that replaces it."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    PlainAOTOutput,
    SavedForBackwardsAOTOutput,
)
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.utils.checkpoint import CheckpointPolicy

__all__ = ["InputMutationAOTOutput", "SavedForBackwardsAOTOutput", "aot_autograd"]

CHECKPOINT_KEYS = ("recompute", "ac_graph_id")
"""Keys in `node.meta` with the policy of a checkpoint for an op, and the checkpoint's number."""


def lazy_graph_code() -> AbstractContextManager[None]:
    """Do not generate Python code for graphs that are only interpreted, as AOTAutograd's.

    Dynamo does so around its backends; this is for graphs that are compiled later.
    """
    return cast("AbstractContextManager[None]", _use_lazy_graph_module(True))


def interpreted_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """`graph` as a module without Python code, with the constants of `root`."""
    with lazy_graph_code():
        return _make_graph_module(root, graph)


def is_primal(node: fx.Node) -> bool:
    """True if an input of a joint graph is an input of the forward, by AOTAutograd's naming."""
    return node.op == "placeholder" and str(node.target).startswith("primals")


def is_tangent(node: fx.Node) -> bool:
    """True if an input of a joint graph is the gradient of an output."""
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def checkpoint_of(node: fx.Node) -> Hashable | None:
    """The checkpoint (`torch.utils.checkpoint`) that recomputes an op; None if there is none."""
    policy, number = map(node.meta.get, CHECKPOINT_KEYS)
    recomputed = (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)
    return number if policy in recomputed else None


def plain_outputs(module: fx.GraphModule) -> list[Any]:
    """AOTAutograd's descriptors of a joint graph's outputs, up to the first that is not plain.

    Assumed: these are the first outputs of its autograd function, in order. With a tensor subclass
    the function has fewer outputs than the graph.
    """
    output = next(iter(reversed(module.graph.nodes)))
    plain = (InputMutationAOTOutput, IntermediateBaseAOTOutput, PlainAOTOutput)
    descs = output.meta.get("desc", [])
    end = next((i for i, desc in enumerate(descs) if not isinstance(desc, plain)), len(descs))
    return list(descs[:end])


def tangent_output(node: fx.Node) -> Any:
    """The descriptor (as in `plain_outputs`) of the output whose gradient a tangent is."""
    return getattr(node.meta.get("desc"), "output", None)


def compiled_node(outputs: Sequence[Any]) -> Any:
    """The autograd node that runs the backward of a call with these outputs, or None.

    An output may be a view of one of AOTAutograd's. Assumed: the node is a `CompiledFunction`'s.
    """
    made = (value.grad_fn for value in outputs if isinstance(value, torch.Tensor))
    nodes: list[Any] = [node for node in made if node is not None]
    behind = [following for node in nodes for following, _ in node.next_functions]
    for node in (*nodes, *behind):
        if type(node).__name__ == "CompiledFunctionBackward":
            return node
    return None


def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark `run` as boxed: AOTAutograd passes its arguments in one list, which `run` clears.

    Otherwise the arguments live as long as the call.
    """
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """A joint graph with the same nodes, values and constants, which can be rewritten alone."""
    graph, placed = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        placed[node] = graph.node_copy(node, placed.__getitem__)
    return interpreted_module(module, graph)
