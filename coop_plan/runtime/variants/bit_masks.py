"""Variants of dropouts and ReLUs that save bit masks for their gradients.

The default of a dropout saves a mask of bytes, that of a ReLU its result. A set bit passes the
gradient; of eight elements in a row the first is the lowest bit. Masks are computed and read in
chunks. `hardtanh` has no such variant: for NaN its kernel passes the gradient or not, depending on
the element's position.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.custom_ops import OutTensors, define_out_op
from coop_plan.runtime.capture.graph_builder import GETITEM, GraphBuilder, tensor_args
from coop_plan.runtime.capture.op_replacements import (
    DROPOUT,
    DROPOUT_BACKWARD,
    byte_aligned_chunks,
    dropout,
    dropout_backward,
    out_or_empty_like,
)
from coop_plan.runtime.capture.op_variants import VariantTable
from coop_plan.runtime.capture.profiler import fake_values, signature, synthetic_arguments
from coop_plan.runtime.op_profile import OpProfile
from coop_plan.runtime.torch_internals.joint_graphs import is_tangent
from coop_plan.runtime.torch_internals.ops import OpOverload
from coop_plan.runtime.variants.bitwise_check import bitwise_equal, cached_check
from coop_plan.runtime.variants.inplace_outputs import has_layout, run_into_copies
from coop_plan.runtime.variants.saved_pairs import SavedPair, add_saved_pair

NAME = "bits"

_aten = torch.ops.aten

PACK_FACTOR = 0x0102040810204080
"""Multiplier that gathers eight bytes of 0 or 1, read as an int64, in the highest byte."""

UNPACK = 0x0101010101010101, 0x8040201008040201 - (1 << 64)
"""Multiplier that copies a byte to all eight bytes, and the mask of one bit in each of them."""


def _pack(mask: torch.Tensor, bits: torch.Tensor) -> None:
    """Pack a mask of 8n bytes into n bytes of `bits`; overwrites `mask`."""
    whole = mask.view(-1).view(torch.int64)
    bits.copy_(whole.mul_(PACK_FACTOR).bitwise_right_shift_(56))


def _unpack(bits: torch.Tensor) -> torch.Tensor:
    spread = bits.to(torch.int64)
    spread.mul_(UNPACK[0]).bitwise_and_(UNPACK[1])
    return spread.view(torch.uint8).clamp_(max=1).view(torch.bool)


def _bits_for(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(values.numel() // 8, dtype=torch.uint8, device=values.device)


def _dropout_bits(
    outs: OutTensors, values: torch.Tensor, p: float, train: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`native_dropout` with a bit mask."""
    result, mask = dropout(outs, values, p, train)
    bits = _bits_for(values)
    _pack(mask, bits)
    return result, bits


def _dropout_bits_backward(
    outs: OutTensors, gradient: torch.Tensor, bits: torch.Tensor, scale: float
) -> torch.Tensor:
    """`native_dropout_backward` with a bit mask."""
    out = out_or_empty_like(outs, gradient)
    for chunk in byte_aligned_chunks(gradient.numel()):
        mask = _unpack(bits[chunk.start // 8 : chunk.stop // 8])
        dropout_backward((out.view(-1)[chunk],), gradient.view(-1)[chunk], mask, scale)
        del mask  # freed before the next chunk
    return out


def _relu_bits(outs: OutTensors, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`relu`, and the bit mask of elements that pass the gradient, NaN included."""
    result, bits = out_or_empty_like(outs, values), _bits_for(values)
    _aten.clamp_min.out(values, 0, out=result)  # `relu.out` would copy
    for chunk in byte_aligned_chunks(result.numel()):
        mask = result.view(-1)[chunk].le(0).logical_not_()
        _pack(mask, bits[chunk.start // 8 : chunk.stop // 8])
        del mask  # freed before the next chunk
    return result, bits


def _relu_bits_backward(
    outs: OutTensors, gradient: torch.Tensor, bits: torch.Tensor
) -> torch.Tensor:
    """The gradient where the bit is set, zero elsewhere."""
    out = out_or_empty_like(outs, gradient)
    if out is not gradient:
        out.copy_(gradient)
    for chunk in byte_aligned_chunks(gradient.numel()):
        mask = _unpack(bits[chunk.start // 8 : chunk.stop // 8]).logical_not_()
        out.view(-1)[chunk].masked_fill_(mask, 0.0)
        del mask  # freed before the next chunk
    return out


DROPOUT_BITS = define_out_op(
    "(Tensor values, float p, bool train) -> (Tensor, Tensor)",
    _dropout_bits,
    (torch.Tag.nondeterministic_seeded,),
)
DROPOUT_BITS_BACKWARD = define_out_op(
    "(Tensor gradient, Tensor bits, float scale) -> Tensor", _dropout_bits_backward
)
RELU_BITS = define_out_op("(Tensor values) -> (Tensor, Tensor)", _relu_bits)
RELU_BITS_BACKWARD = define_out_op("(Tensor gradient, Tensor bits) -> Tensor", _relu_bits_backward)

_DROPOUT: Any = _aten.native_dropout.default
_DROPOUT_BACKWARD: Any = _aten.native_dropout_backward.default
_DROPOUTS = (_DROPOUT, DROPOUT)
_DROPOUT_BACKWARDS = (_DROPOUT_BACKWARD, DROPOUT_BACKWARD)
_RELU: Any = _aten.relu.default
_RELU_BACKWARD: Any = _aten.threshold_backward.default


def add_bit_mask_variants(builder: GraphBuilder, table: VariantTable) -> None:
    """Add the bit-mask variants of dropouts and ReLUs, and of their backwards."""
    backward_nodes = _backward_nodes(builder)
    for node in list(builder.ops):
        pair = _dropout(builder, node) or _relu(builder, node, backward_nodes)
        if pair is not None and pair.replaced and _is_packable(pair):
            add_saved_pair(builder, table, pair, _is_exact)


def _dropout(builder: GraphBuilder, node: fx.Node) -> SavedPair | None:
    if node.target not in _DROPOUTS:
        return None
    masks = [user for user in node.users if user.target is GETITEM and user.args[1] == 1]
    users = [user for mask in masks for user in mask.users]
    readers = [u for u in users if u.target in _DROPOUT_BACKWARDS and u.args[1] in masks]
    replaced = dict.fromkeys(readers, builder.storages[node][1])
    return _mask_pair(node, DROPOUT_BITS, DROPOUT_BITS_BACKWARD, _of_dropout, replaced)


def _of_dropout(reader: fx.Node, bits: Any) -> tuple[Any, ...]:
    gradient, _, scale = reader.args
    return gradient, bits, scale


def _relu(builder: GraphBuilder, node: fx.Node, backward_nodes: set[fx.Node]) -> SavedPair | None:
    """The pair of a ReLU whose result is read in the backward by its own gradient only.

    If another op of the backward reads the result, it is saved anyway, and bits take extra memory.
    """
    if node.target is not _RELU:
        return None
    result_id = builder.storages[node][0]
    readers = []
    for reader in builder.ops:
        if reader not in backward_nodes or result_id not in _reads(builder, reader):
            continue
        if reader.target is not _RELU_BACKWARD or reader.args[2] != 0:
            return None
        gradient, source = reader.args[:2]
        assert isinstance(gradient, fx.Node)
        assert isinstance(source, fx.Node)
        same_strides = fake_values(source).stride() == fake_values(node).stride()
        if not same_strides or result_id in builder.storages[gradient]:
            return None
        if result_id not in builder.storages[source]:
            return None
        readers.append(reader)
    replaced = dict.fromkeys(readers, result_id)
    return _mask_pair(
        node, RELU_BITS, RELU_BITS_BACKWARD, lambda r, bits: (r.args[0], bits), replaced
    )


def _mask_pair(
    node: fx.Node,
    target: OpOverload,
    backward: OpOverload,
    reader_args: Callable[[fx.Node, Any], tuple[Any, ...]],
    replaced: Mapping[fx.Node, int | None],
) -> SavedPair:
    count = fake_values(node.args[0]).numel() // 8
    return SavedPair(
        NAME, node, target, node.args, backward, reader_args, replaced, count, inplace=True
    )


def _reads(builder: GraphBuilder, node: fx.Node) -> set[int | None]:
    return {t for argument in tensor_args(node) for t in builder.storages[argument]}


def _backward_nodes(builder: GraphBuilder) -> set[fx.Node]:
    """The nodes that depend on a tangent: the backward."""
    found: set[fx.Node] = set()
    for node in builder.module.graph.nodes:
        if is_tangent(node) or any(argument in found for argument in node.all_input_nodes):
            found.add(node)
    return found


def _is_packable(pair: SavedPair) -> bool:
    """True if the bits fill whole bytes, and all tensors are contiguous."""
    result, values = pair.result, pair.args[0]
    gradients = (fake_values(reader.args[0]) for reader in pair.replaced)
    contiguous = all(v.is_contiguous() for v in (fake_values(values), result, *gradients))
    return contiguous and result.numel() % 8 == 0 < result.numel()


def _is_exact(pair: SavedPair, forward: OpProfile, backward: Mapping[fx.Node, OpProfile]) -> bool:
    """Check of both variants on synthetic inputs: bitwise equal results, also in place."""
    args = fake_values(pair.args)
    key = signature(pair.target, args, {})

    def run_check() -> bool:
        (values, *rest_args), _ = synthetic_arguments(pair.target, args, {})
        reader = next(iter(backward))
        gradient = values.neg()
        if pair.target is DROPOUT_BITS:
            expected_result, mask = _seeded(lambda: _DROPOUT(values, *rest_args), values)
            scale = reader.args[2]
            expected = _DROPOUT_BACKWARD(gradient, mask, scale)
            rest = [scale]
        else:
            _fill_special(values)
            expected_result, rest = _RELU(values), []
            expected = _RELU_BACKWARD(gradient, expected_result, 0)
        result, bits = _seeded(lambda: pair.target(values, *rest_args), values)
        return (
            bitwise_equal(result, expected_result)
            and bitwise_equal(pair.backward(gradient, bits, *rest), expected)
            and _is_exact_in_place(
                pair.target, (values, *rest_args), forward, [expected_result, bits]
            )
            and _is_exact_in_place(
                pair.backward, (gradient, bits, *rest), backward[reader], [expected]
            )
        )

    return cached_check("alike", key, bool, run_check)


def _is_exact_in_place(
    target: OpOverload, args: Any, profile: OpProfile, expected: list[Any]
) -> bool:
    if not has_layout(args[0], profile.outputs[0]):
        return True
    results, allocations = _seeded(lambda: run_into_copies(target, (args, {}), {0: 0}), args[0])
    if allocations != profile.allocations_except({0}):
        return False
    return all(map(bitwise_equal, results, expected))


def _seeded(run: Any, values: torch.Tensor) -> Any:
    """The result of `run` with a fixed seed; the generator state is restored."""
    with torch.random.fork_rng(devices=[values.device] if values.is_cuda else []):
        torch.manual_seed(0)
        return run()


def _fill_special(values: torch.Tensor) -> None:
    """Fill with numbers of both signs, zeros of both signs, infinities and NaN."""
    special = values.new_tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan")])
    flat = values.view(-1)
    flat.copy_(torch.linspace(-9, 9, flat.numel(), dtype=values.dtype, device=values.device))
    flat[: special.numel()].copy_(special[: flat.numel()])
