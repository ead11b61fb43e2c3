"""Ops that a region may contain, and the storages that values of a joint graph share."""

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.torch_internals.ops import OpOverload, is_mutable, is_view_op, tree_flatten

GETITEM = operator.getitem

_aten = torch.ops.aten
_prims = torch.ops.prims

_VIEWS = {_aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default}

_REDUCTIONS = {
    *(_aten.sum, _aten.mean, _aten.amax, _aten.amin, _aten.var, _aten.var_mean, _aten.any),
    *(_aten.all, _aten.argmax, _aten.logsumexp, _aten.linalg_vector_norm),
    *(_aten._softmax, _aten._log_softmax),
    *(_aten._softmax_backward_data, _aten._log_softmax_backward_data),
    *(_aten.native_layer_norm, _aten.native_layer_norm_backward),
    *(_aten.native_group_norm, _aten.native_group_norm_backward),
    *(_aten._native_batch_norm_legit_functional, _aten.native_batch_norm_backward),
    *(_aten._fused_rms_norm, _aten._fused_rms_norm_backward),
    *(_aten.nll_loss_forward, _aten.nll_loss_backward),
}
"""Ops that Inductor decomposes into reductions and pointwise ops."""

CREATIONS = {
    *(_aten.full, _aten.zeros, _aten.ones, _aten.arange, _aten.scalar_tensor),
    *(_aten.full_like, _aten.zeros_like, _aten.ones_like),
}
"""Ops whose results depend on no element of a tensor."""

_MOVES = {
    *(_aten.clone, _aten._to_copy, _aten.copy, _aten.cat, _aten.stack, _aten.repeat),
    *(_aten.constant_pad_nd, _aten.slice_backward, _aten.select_backward),
    *(_aten.slice_scatter, _aten.select_scatter, _aten.tril, _aten.triu),
    *(_aten.upsample_nearest2d, _aten.upsample_nearest2d_backward),
}
"""Ops that copy elements to places that depend on no element."""

_POINTWISE = {
    *(_aten.where, _aten.masked_fill, _aten.clone, _aten._to_copy, _prims.convert_element_type),
}
"""Pointwise ops without the tag."""

_DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}


def is_view(node: fx.Node) -> bool:
    """True if an op returns views of an argument, or one of the views."""
    if node.op != "call_function":
        return False
    if node.target is GETITEM:
        return is_view(_first(node))
    return node.target in _VIEWS or is_view_op(node.target)


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
    return torch.Tag.pointwise in target.tags or target.overloadpacket in _POINTWISE


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
    if not (is_pointwise(node) or target.overloadpacket in _REDUCTIONS | CREATIONS | _MOVES):
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


def ancestors(nodes: Iterable[Any]) -> set[fx.Node]:
    """The given nodes and all that they are computed from."""
    found: set[fx.Node] = set()
    stack = [node for node in nodes if isinstance(node, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _first(node: fx.Node) -> fx.Node:
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first


def _is_plain(value: torch.Tensor, device: torch.device) -> bool:
    if value.device != device or value.dtype not in _DTYPES or value.layout is not torch.strided:
        return False
    sizes = all(isinstance(size, int) and size for size in value.shape)
    return sizes and not (value.is_conj() or value.is_neg())
