"""AOTAutograd's joint graph, and the code that runs in its place."""

from collections.abc import Callable, Sequence
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
from torch.fx._lazy_graph_module import _use_lazy_graph_module

__all__ = ["InputMutationAOTOutput", "SavedForBackwardsAOTOutput", "aot_autograd"]


def code_on_demand() -> AbstractContextManager[None]:
    """Let graphs that are interpreted or taken apart, as AOTAutograd's are, have no code made.

    As Dynamo does around its backends; this is for graphs that are compiled after it.
    """
    return cast("AbstractContextManager[None]", _use_lazy_graph_module(True))


def is_primal(node: fx.Node) -> bool:
    """Whether an input of a joint graph is one of the forward; AOTAutograd says so by its name."""
    return node.op == "placeholder" and str(node.target).startswith("primals")


def is_tangent(node: fx.Node) -> bool:
    """Whether an input of a joint graph is the gradient of an output."""
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def plain_outputs(module: fx.GraphModule) -> list[Any]:
    """What AOTAutograd says of the outputs of a joint graph, to the first that is not one tensor.

    Assumed: the first are those of its autograd function, in order, which a subclass of tensors
    would have fewer of.
    """
    output = next(iter(reversed(module.graph.nodes)))
    plain = (InputMutationAOTOutput, IntermediateBaseAOTOutput, PlainAOTOutput)
    descs = output.meta.get("desc", [])
    end = next((i for i, desc in enumerate(descs) if not isinstance(desc, plain)), len(descs))
    return list(descs[:end])


def tangent_output(node: fx.Node) -> Any:
    """What `plain_outputs` has of the output that a tangent is the gradient of."""
    return getattr(node.meta.get("desc"), "output", None)


def compiled_node(outputs: Sequence[Any]) -> Any:
    """The node of autograd that runs the backward of a call with these outputs, if one shows.

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
    """`run`, which AOTAutograd then gives its arguments in one list, for it to empty.

    Otherwise they live as long as the call.
    """
    run._boxed_call = True  # type: ignore[attr-defined]
    return run
