"""Variants that keep masks as bits: of dropouts, whose masks are bytes, and of ReLUs.

Of a ReLU the default keeps the result. A `hardtanh` gets none: through NaN its kernel passes a
gradient or not by where the element is.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.variants.bit_mask_ops import (
    DROPOUT_BITS,
    DROPOUT_BITS_BACKWARD,
    RELU_BITS,
    RELU_BITS_BACKWARD,
)
from coop_plan.runtime.variants.registry import Offers
from coop_plan.runtime.capture.graph_builder import GETITEM, GraphBuilder, tensor_args
from coop_plan.runtime.capture.dropout import DROPOUT, DROPOUT_BACKWARD
from coop_plan.runtime.capture.op_profile import OpProfile
from coop_plan.runtime.variants.saved_pairs import Keeping, offer_keeping
from coop_plan.runtime.variants.inplace_outputs import lies_alike, written_over
from coop_plan.runtime.capture.profiler import fakes, signature, stand_in_arguments
from coop_plan.runtime.variants.bitwise_check import same_bits, tried
from coop_plan.runtime.torch_internals.joint_graphs import is_tangent
from coop_plan.runtime.torch_internals.ops import OpOverload

NAME = "bits"

_DROPOUT: Any = torch.ops.aten.native_dropout.default
_DROPOUT_BACKWARD: Any = torch.ops.aten.native_dropout_backward.default
_DROPOUTS = (_DROPOUT, DROPOUT)
_DROPOUT_BACKWARDS = (_DROPOUT_BACKWARD, DROPOUT_BACKWARD)
_RELU: Any = torch.ops.aten.relu.default
_RELU_BACKWARD: Any = torch.ops.aten.threshold_backward.default


def offer_bits(builder: GraphBuilder, offers: Offers) -> None:
    """Give ops in the builder's graph that have masks, and their backwards, variants."""
    behind = _behind_tangents(builder)
    for node in list(builder.ops):
        masked = _dropout(builder, node) or _relu(builder, node, behind)
        if masked is not None and masked.kept and _fits(masked):
            offer_keeping(builder, offers, masked, _same)


def _dropout(builder: GraphBuilder, node: fx.Node) -> Keeping | None:
    if node.target not in _DROPOUTS:
        return None
    masks = [user for user in node.users if user.target is GETITEM and user.args[1] == 1]
    users = [user for mask in masks for user in mask.users]
    readers = [u for u in users if u.target in _DROPOUT_BACKWARDS and u.args[1] in masks]
    kept = dict.fromkeys(readers, builder.storages[node][1])
    return _masked(node, DROPOUT_BITS, DROPOUT_BITS_BACKWARD, _of_dropout, kept)


def _of_dropout(reader: fx.Node, bits: Any) -> tuple[Any, ...]:
    gradient, _, scale = reader.args
    return gradient, bits, scale


def _relu(builder: GraphBuilder, node: fx.Node, behind: set[fx.Node]) -> Keeping | None:
    """One whose backwards are all that reads its result behind the tangents.

    Else the result is there for another op, and bits would be one tensor more.
    """
    if node.target is not _RELU:
        return None
    kept = builder.storages[node][0]
    readers = []
    for reader in builder.ops:
        if reader not in behind or kept not in _reads(builder, reader):
            continue
        if reader.target is not _RELU_BACKWARD or reader.args[2] != 0:
            return None
        gradient, source = reader.args[:2]
        assert isinstance(gradient, fx.Node)
        assert isinstance(source, fx.Node)
        same = fakes(source).stride() == fakes(node).stride()
        if not same or kept in builder.storages[gradient] or kept not in builder.storages[source]:
            return None
        readers.append(reader)
    given = dict.fromkeys(readers, kept)
    return _masked(node, RELU_BITS, RELU_BITS_BACKWARD, lambda r, bits: (r.args[0], bits), given)


def _masked(
    node: fx.Node,
    target: OpOverload,
    backward: OpOverload,
    given: Callable[[fx.Node, Any], tuple[Any, ...]],
    kept: Mapping[fx.Node, int | None],
) -> Keeping:
    count = fakes(node.args[0]).numel() // 8
    return Keeping(NAME, node, target, node.args, backward, given, kept, count, inplace=True)


def _reads(builder: GraphBuilder, node: fx.Node) -> set[int | None]:
    return {t for argument in tensor_args(node) for t in builder.storages[argument]}


def _behind_tangents(builder: GraphBuilder) -> set[fx.Node]:
    """What waits for a gradient: the ops of the backward."""
    found: set[fx.Node] = set()
    for node in builder.module.graph.nodes:
        if is_tangent(node) or any(argument in found for argument in node.all_input_nodes):
            found.add(node)
    return found


def _fits(masked: Keeping) -> bool:
    """Whether the mask is whole bytes of bits, and all is in the order of its elements."""
    made, values = masked.made, masked.args[0]
    inorder = (fakes(values), made, *(fakes(reader.args[0]) for reader in masked.kept))
    return all(v.is_contiguous() for v in inorder) and made.numel() % 8 == 0 < made.numel()


def _same(masked: Keeping, forward: OpProfile, backward: Mapping[fx.Node, OpProfile]) -> bool:
    """Whether both variants return the same, as tried."""
    args = fakes(masked.args)
    key = signature(masked.target, args, {})

    def attempt() -> bool:
        (values, *others), _ = stand_in_arguments(masked.target, args, {})
        reader = next(iter(backward))
        gradient = values.neg()
        if masked.target is DROPOUT_BITS:
            theirs, mask = _seeded(lambda: _DROPOUT(values, *others), values)
            scale = reader.args[2]
            expected = _DROPOUT_BACKWARD(gradient, mask, scale)
            rest = [scale]
        else:
            _spread(values)
            theirs, rest = _RELU(values), []
            expected = _RELU_BACKWARD(gradient, theirs, 0)
        ours, ones = _seeded(lambda: masked.target(values, *others), values)
        variant, back = forward, backward[reader]
        return (
            same_bits(ours, theirs)
            and same_bits(masked.backward(gradient, ones, *rest), expected)
            and _in_place(masked.target, (values, *others), variant, [theirs, ones])
            and _in_place(masked.backward, (gradient, ones, *rest), back, [expected])
        )

    return tried("alike", key, bool, attempt)


def _in_place(target: OpOverload, args: Any, facts: OpProfile, expected: list[Any]) -> bool:
    if not lies_alike(args[0], facts.outputs[0]):
        return True
    made, taken = _seeded(lambda: written_over(target, (args, {}), {0: 0}), args[0])
    return taken == facts.allocated_beside({0}) and all(map(same_bits, made, expected))


def _seeded(run: Any, values: torch.Tensor) -> Any:
    """What `run` returns from one state of the generator, which is put back."""
    with torch.random.fork_rng(devices=[values.device] if values.is_cuda else []):
        torch.manual_seed(0)
        return run()


def _spread(values: torch.Tensor) -> None:
    """Numbers on both sides of zero, zeros of both signs, and what is none."""
    special = values.new_tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan")])
    flat = values.view(-1)
    flat.copy_(torch.linspace(-9, 9, flat.numel(), dtype=values.dtype, device=values.device))
    flat[: special.numel()].copy_(special[: flat.numel()])
