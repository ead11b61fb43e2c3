"""Collectives inside a step: run once, in program order, each complete before the next op begins.

A collective is never run to be profiled: the other ranks would pair it with one of theirs. What it
takes is modelled: its outputs by their shapes, its time by the bytes, and the buffers of the
process group by what gloo and NCCL do (PyTorch 2.13, torch/csrc/distributed/c10d). Each rank comes
to the same facts by itself.

A traced graph waits for each collective where it is issued, so that nothing is lost by one op that
does both; and a buffer that another thread still reads never counts as free.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.op_profile import Allocation, OpProfile, Output
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.torch_internals.ops import OpOverload, argument_names, tree_flatten, tree_map
from coop_plan.runtime.torch_internals.ranks import group_name, wait_for_collective

NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor")
"""Of ops that every rank must run equally often, in one order."""

LATENCY_US = 30.0
BYTES_PER_US = {"cpu": 1e3, "cuda": 1e5}
"""A rough model: a collective runs once whatever its cost, and all ranks take the same."""

SCRATCH: dict[str, tuple[int, int]] = {
    "all_reduce": (0, 0),
    "all_reduce_coalesced": (1, 0),
    "all_gather_into_tensor": (1, 1),
    "all_gather_into_tensor_coalesced": (1, 1),
    "reduce_scatter_tensor": (1, 0),
    "reduce_scatter_tensor_coalesced": (1, 0),
    "all_to_all_single": (0, 0),
    "broadcast": (0, 0),
    "shard_dim_alltoall": (2, 0),
}
"""How often gloo holds the inputs and the outputs of a collective besides themselves, measured by
`tests/runtime/test_collectives.py`. NCCL works in the tensors and in memory of its own."""

GROUP_THREADS = 2
"""Of gloo. Each gives back what a collective took only some time after it is complete."""

GROUP = "group_name"
"""The argument of a collective that says between whom it is."""

OPERATION = "coop_collective"
"""Attribute of a function in a graph: the collective that it runs and waits for."""


def complete_collectives(module: fx.GraphModule) -> None:
    """Let each collective of a joint graph end before the next op begins, and drop its waits.

    Raises:
        CaptureError: point-to-point messages, or a wait for what began outside the graph.
    """
    for node in list(module.graph.nodes):
        target = node.target
        if not isinstance(target, OpOverload) or target.namespace not in NAMESPACES:
            continue
        name = _name(target)
        if name == "wait_tensor":
            made = node.args[0]
            made = made.args[0] if made.target is operator.getitem else made
            if not hasattr(made.target, OPERATION):
                raise CaptureError(
                    f"the graph waits for a collective that began outside it ({node.args[0].name}):"
                    " wait for it before the compiled function is called"
                )
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        elif name in SCRATCH:
            _name_group(node, target)
            node.target = _completed(target)
        else:
            raise CaptureError(
                f"{target} inside the graph cannot be planned: send and receive outside the"
                " compiled function, or use a collective"
            )


def collective_of(target: object) -> OpOverload | None:
    """The collective that a node's target runs, if it is one of `complete_collectives`."""
    return getattr(target, OPERATION, None)


def group_of(node: fx.Node) -> str | None:
    """The name of the process group of the collective that a node runs; None if it runs none."""
    op = collective_of(node.target)
    return None if op is None else str(node.kwargs[GROUP])


def _name_group(node: fx.Node, op: OpOverload) -> None:
    """Let a collective name its group, last of all, where DTensor passes it as an input."""
    given = dict(zip(argument_names(op), node.args, strict=False)) | node.kwargs
    group = given.pop(GROUP)
    named = group.meta["val"] if isinstance(group, fx.Node) else group
    node.args, node.kwargs = (), {**given, GROUP: group_name(named)}


def modelled(op: OpOverload, args: Any, kwargs: Any, made: Any) -> OpProfile:
    """The profile of a collective that returns `made`; tensors are fake ones."""
    inputs = _tensors((args, kwargs))
    outputs = _tensors(made)
    device = inputs[0].device.type
    sizes = [tensor.numel() * tensor.element_size() for tensor in outputs]
    allocations: list[Allocation] = []
    if len(inputs) == 1:
        size = inputs[0].numel() * inputs[0].element_size()
        besides = Allocation(size, -2, 0)
        name = _name(op)
        if not inputs[0].is_contiguous() and name not in ("all_reduce", "broadcast"):
            allocations.append(besides)
        if name == "shard_dim_alltoall":
            allocations.append(besides)
        allocations.append(Allocation(sizes[0], 0, 0))
        if device == "cpu" and name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            allocations.append(besides)
    else:
        allocations += [Allocation(size, i, 0) for i, size in enumerate(sizes)]
    moved = max(sum(sizes), _bytes(inputs))
    return OpProfile(
        cost_us=LATENCY_US + moved / BYTES_PER_US[device],
        outputs=tuple(map(_described, outputs, sizes)),
        allocations=tuple(a for a in allocations if a.bytes),
        workspace_bytes=0,
        beside_bytes=0,
    )


def scratch_bytes(op: OpOverload, args: Any, kwargs: Any, made: Any) -> int:
    """What the process group takes for a collective besides its outputs, at most, in bytes."""
    inputs, outputs = _tensors((args, kwargs)), _tensors(made)
    copied = sum(_bytes([tensor]) for tensor in inputs if not tensor.is_contiguous())
    if inputs[0].device.type != "cpu":
        return copied
    of_inputs, of_outputs = SCRATCH[_name(op)]
    return copied + of_inputs * _bytes(inputs) + of_outputs * _bytes(outputs)


def _name(op: OpOverload) -> str:
    return str(op).split(".")[1]


@functools.cache
def _completed(op: OpOverload) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        # A redistribution of DTensor waits itself.
        return result if op.namespace == "_dtensor" else tree_map(wait_for_collective, result)

    run.__name__ = run.__qualname__ = _name(op)
    setattr(run, OPERATION, op)
    return run


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [value for value in tree_flatten(tree)[0] if isinstance(value, torch.Tensor)]


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _described(tensor: torch.Tensor, size: int) -> Output:
    shape = tuple(tensor.shape)
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return Output(size, -1, -1, str(tensor.dtype), shape, strides, 0)
