"""Collectives in a step: executed once, in program order, each complete before the next op.

A collective is not run for its profile, because the other ranks would pair it with one of theirs.
Its profile is modelled: outputs from their shapes, time from the bytes, and the process group's
buffers from the behaviour of gloo and NCCL (PyTorch 2.13, torch/csrc/distributed/c10d). All ranks
compute equal profiles.

A traced graph waits for each collective where it is issued, so one op that issues and waits loses
no overlap, and no buffer counts as free while another thread reads it.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.op_profile import Allocation, OpProfile, Output
from coop_plan.runtime.torch_internals.ops import OpOverload, argument_names, tree_flatten, tree_map
from coop_plan.runtime.torch_internals.ranks import group_name, wait_for_collective

NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor")
"""Namespaces of ops that all ranks must run equally often, in one order."""

LATENCY_US = 30.0
BYTES_PER_US = {"cpu": 1e3, "cuda": 1e5}
"""A rough time model: plans never recompute a collective, and all ranks use equal costs."""

GLOO_SCRATCH: dict[str, tuple[int, int]] = {
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
"""Copies of inputs and of outputs that gloo allocates, as measured by
`tests/runtime/test_collectives.py`. NCCL works in the tensors and in its own memory."""

GROUP_THREADS = 2
"""Threads of gloo; each frees a collective's buffers some time after it is complete."""

GROUP_ARGUMENT = "group_name"
"""The argument of a collective that names its process group."""

COLLECTIVE = "coop_collective"
"""Attribute of a function in a graph: the collective that the function runs and waits for."""


def complete_collectives(module: fx.GraphModule) -> None:
    """Replace each collective by a blocking call, and remove the waits.

    Raises:
        CaptureError: point-to-point messages, or a wait for a collective issued outside the graph.
    """
    for node in list(module.graph.nodes):
        target = node.target
        if not isinstance(target, OpOverload) or target.namespace not in NAMESPACES:
            continue
        name = _name(target)
        if name == "wait_tensor":
            result = node.args[0]
            result = result.args[0] if result.target is operator.getitem else result
            if not hasattr(result.target, COLLECTIVE):
                raise CaptureError(
                    f"the graph waits for a collective issued outside it ({node.args[0].name}):"
                    " wait for it before the compiled function is called"
                )
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        elif name in GLOO_SCRATCH:
            _name_group(node, target)
            node.target = _blocking(target)
        else:
            raise CaptureError(
                f"{target} inside the graph cannot be planned: send and receive outside the"
                " compiled function, or use a collective"
            )


def collective_of(target: object) -> OpOverload | None:
    """The collective that a node's target runs (see `complete_collectives`), or None."""
    return getattr(target, COLLECTIVE, None)


def group_of(node: fx.Node) -> str | None:
    """The process group of the collective that a node runs, or None."""
    op = collective_of(node.target)
    return None if op is None else str(node.kwargs[GROUP_ARGUMENT])


def _name_group(node: fx.Node, op: OpOverload) -> None:
    """Pass a collective's group by name, as its last argument; DTensor passes it as an input."""
    given = dict(zip(argument_names(op), node.args, strict=False)) | node.kwargs
    group = given.pop(GROUP_ARGUMENT)
    named = group.meta["val"] if isinstance(group, fx.Node) else group
    node.args, node.kwargs = (), {**given, GROUP_ARGUMENT: group_name(named)}


def modelled_profile(op: OpOverload, args: Any, kwargs: Any, result: Any) -> OpProfile:
    """The profile of a collective that returns `made`; tensors are fake ones."""
    inputs = _tensors((args, kwargs))
    outputs = _tensors(result)
    device = inputs[0].device.type
    sizes = [tensor.numel() * tensor.element_size() for tensor in outputs]
    allocations: list[Allocation] = []
    if len(inputs) == 1:
        size = inputs[0].numel() * inputs[0].element_size()
        scratch = Allocation(size, -2, 0)
        name = _name(op)
        if not inputs[0].is_contiguous() and name not in ("all_reduce", "broadcast"):
            allocations.append(scratch)
        if name == "shard_dim_alltoall":
            allocations.append(scratch)
        allocations.append(Allocation(sizes[0], 0, 0))
        if device == "cpu" and name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            allocations.append(scratch)
    else:
        allocations += [Allocation(size, i, 0) for i, size in enumerate(sizes)]
    moved = max(sum(sizes), _bytes(inputs))
    return OpProfile(
        cost_us=LATENCY_US + moved / BYTES_PER_US[device],
        outputs=tuple(map(_contiguous_output, outputs, sizes)),
        allocations=tuple(a for a in allocations if a.bytes),
        workspace_bytes=0,
        worker_bytes=0,
    )


def scratch_bytes(op: OpOverload, args: Any, kwargs: Any, result: Any) -> int:
    """Upper bound on the bytes that the process group allocates besides a collective's outputs."""
    inputs, outputs = _tensors((args, kwargs)), _tensors(result)
    copied = sum(_bytes([tensor]) for tensor in inputs if not tensor.is_contiguous())
    if inputs[0].device.type != "cpu":
        return copied
    of_inputs, of_outputs = GLOO_SCRATCH[_name(op)]
    return copied + of_inputs * _bytes(inputs) + of_outputs * _bytes(outputs)


def _name(op: OpOverload) -> str:
    return str(op).split(".")[1]


@functools.cache
def _blocking(op: OpOverload) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        # A redistribution of DTensor waits by itself.
        return result if op.namespace == "_dtensor" else tree_map(wait_for_collective, result)

    run.__name__ = run.__qualname__ = _name(op)
    setattr(run, COLLECTIVE, op)
    return run


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [value for value in tree_flatten(tree)[0] if isinstance(value, torch.Tensor)]


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _contiguous_output(tensor: torch.Tensor, size: int) -> Output:
    shape = tuple(tensor.shape)
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return Output(size, -1, -1, str(tensor.dtype), shape, strides, 0)
