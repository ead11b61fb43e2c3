"""Ops that a region may contain, and the storages that values of a joint graph share."""

import torch
from torch import fx

from coop_plan.runtime.capture.graph_builder import GETITEM, is_view
from coop_plan.runtime.torch_internals.inductor import (
    CREATIONS,
    MOVES,
    REDUCTIONS,
    UNTAGGED_POINTWISE,
)
from coop_plan.runtime.torch_internals.ops import OpOverload, is_mutable, tree_flatten

_DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}


def storage_of(node: fx.Node) -> fx.Node:
    """The node whose storage a value shares: `node` itself unless it is a view."""
    while is_view(node):
        node = _first(node)
    return node


def producer_of(node: fx.Node) -> fx.Node:
    """The op, input or constant that makes the storage of a value."""
    node = storage_of(node)
    return _first(node) if node.target is GETITEM else node


def is_pointwise(node: fx.Node) -> bool:
    """True if an element of the result depends on one element of each argument."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target.overloadpacket in UNTAGGED_POINTWISE


def is_creation(node: fx.Node) -> bool:
    """True if an op reads no element of a tensor."""
    return isinstance(node.target, OpOverload) and node.target.overloadpacket in CREATIONS


def is_fusible(node: fx.Node) -> bool:
    """True if an op may be in a region: it is deterministic, and Inductor writes a kernel for it.

    Products, convolutions, attention, sorts and scatters are left to their libraries. Random ops
    and ops with side effects keep program order.
    """
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload) or is_view(node):
        return False
    if is_mutable(target) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    if target.namespace not in ("aten", "prims"):
        return False
    if not (is_pointwise(node) or target.overloadpacket in REDUCTIONS | CREATIONS | MOVES):
        return False
    made = tensors_of(node)
    read = [value for arg in node.all_input_nodes for value in tensors_of(storage_of(arg))]
    return bool(made) and all(_is_plain(value, made[0].device) for value in [*made, *read])


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that a node stands for."""
    return [v for v in tree_flatten(node.meta.get("val"))[0] if isinstance(v, torch.Tensor)]


def bytes_of(node: fx.Node) -> int:
    """Bytes of the elements of a node's tensors."""
    return sum(value.numel() * value.element_size() for value in tensors_of(node))


def _first(node: fx.Node) -> fx.Node:
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first


def _is_plain(value: torch.Tensor, device: torch.device) -> bool:
    if value.device != device or value.dtype not in _DTYPES or value.layout is not torch.strided:
        return False
    sizes = all(isinstance(size, int) and size for size in value.shape)
    return sizes and not (value.is_conj() or value.is_neg())
