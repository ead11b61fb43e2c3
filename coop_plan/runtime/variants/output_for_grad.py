"""Variants of activations' gradients that read what the activation made instead of what it was given.

Beyond an activation its result is often kept for the next op, and its input for its gradient alone.
Of those here the kernel asks which side of a bound an element is on, and the result says that as
the input does.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.variants.registry import Offers, Other
from coop_plan.runtime.capture.graph_builder import GraphBuilder, tensor_args
from coop_plan.runtime.capture.profiler import fakes, profile, signature, stand_in_arguments
from coop_plan.runtime.variants.bitwise_check import same_bits, tried
from coop_plan.runtime.torch_internals.ops import OpOverload

NAME = "output"

_aten = torch.ops.aten

ACTIVATIONS: Mapping[OpOverload, tuple[OpOverload, tuple[float, ...], Callable[..., bool]]] = {
    _aten.hardtanh_backward.default: (
        *(_aten.hardtanh.default, (-1, 1)),
        lambda low, high: low < high,
    ),
    _aten.leaky_relu_backward.default: (
        *(_aten.leaky_relu.default, (0.01,)),
        lambda slope, of_result: slope > 0 and not of_result,
    ),
}
"""By gradient its activation, that one's defaults, and for which arguments a result says enough."""


def offer_results(builder: GraphBuilder, offers: Offers) -> None:
    """Give gradients of activations in the builder's graph variants that read the result."""
    made = {
        (node.target, builder.storages[argument]): node
        for node in builder.ops
        for argument in tensor_args(node)[:1]
    }
    ops = zip(list(builder.ops), builder.op_fields, builder.profiles, strict=True)
    for node, fields, facts in ops:
        if not isinstance(node.target, OpOverload) or node.target not in ACTIVATIONS:
            continue
        activation, defaults, enough = ACTIVATIONS[node.target]
        gradient, source, *others = node.args
        assert isinstance(source, fx.Node)
        result = made.get((activation, builder.storages[source]))
        if result is None or result.kwargs or not enough(*others):
            continue
        bounds = [*result.args[1:], *defaults[len(result.args) - 1 :]]
        if bounds != others[: len(bounds)]:
            continue
        if result.meta["val"].stride() != source.meta["val"].stride():
            continue
        args = fakes((gradient, result, *others))
        variant = profile(node.target, args, {}, f"{builder.names[node]}_{NAME}")
        if variant.outputs != facts.outputs or not _same(activation, bounds, node.target, args):
            continue
        other = offers.beside(node, node.target, (gradient, result, *others))
        (old,), (new,) = builder.storages[source], builder.storages[result]
        assert new is not None
        inputs = [new if t == old else t for t in fields["inputs"]]
        pairs = [pair for pair in fields["inplace"] if pair[1] != old]
        offers.add(node, NAME, Other(other, variant), inputs=inputs, inplace=pairs)


def _same(activation: OpOverload, bounds: list[Any], backward: OpOverload, args: Any) -> bool:
    """Whether the result says what the input does, as tried."""

    def attempt() -> bool:
        (gradient, values, *others), _ = stand_in_arguments(backward, args, {})
        flat = values.as_strided((values.numel(),), (1,))
        flat.copy_(torch.linspace(-9, 9, flat.numel(), dtype=flat.dtype, device=flat.device))
        result = activation(values, *bounds)
        ours = backward(gradient, result, *others)
        return same_bits(ours, backward(gradient, values, *others))

    return tried("alike of result", signature(backward, args, {}), bool, attempt)
