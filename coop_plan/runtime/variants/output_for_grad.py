"""Variants of activation gradients that read the activation's output instead of its input.

The next op often saves the output anyway, and then the input is saved for the gradient alone. The
gradients here only compare each element with a bound, for which the output serves as well.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.graph_builder import GraphBuilder, tensor_args
from coop_plan.runtime.capture.op_variants import OpVariant, VariantTable
from coop_plan.runtime.capture.profiler import (
    fake_values,
    profile_op,
    signature,
    synthetic_arguments,
)
from coop_plan.runtime.torch_internals.ops import OpOverload
from coop_plan.runtime.variants.bitwise_check import bitwise_equal, cached_check

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
"""By gradient op: its activation, the default arguments, and a test that the output suffices."""


def add_output_variants(builder: GraphBuilder, table: VariantTable) -> None:
    """Add variants of activation gradients that read the activation's output."""
    made = {
        (node.target, builder.storages[argument]): node
        for node in builder.ops
        for argument in tensor_args(node)[:1]
    }
    ops = zip(list(builder.ops), builder.op_fields, builder.profiles, strict=True)
    for node, fields, default in ops:
        if not isinstance(node.target, OpOverload) or node.target not in ACTIVATIONS:
            continue
        activation, defaults, is_sufficient = ACTIVATIONS[node.target]
        gradient, source, *rest_args = node.args
        assert isinstance(source, fx.Node)
        result = made.get((activation, builder.storages[source]))
        if result is None or result.kwargs or not is_sufficient(*rest_args):
            continue
        bounds = [*result.args[1:], *defaults[len(result.args) - 1 :]]
        if bounds != rest_args[: len(bounds)]:
            continue
        if result.meta["val"].stride() != source.meta["val"].stride():
            continue
        args = fake_values((gradient, result, *rest_args))
        variant = profile_op(node.target, args, {}, f"{builder.names[node]}_{NAME}")
        if variant.outputs != default.outputs:
            continue
        if not _is_exact(activation, bounds, node.target, args):
            continue
        variant_node = table.add_node(node, node.target, (gradient, result, *rest_args))
        (old,), (new,) = builder.storages[source], builder.storages[result]
        assert new is not None
        inputs = [new if t == old else t for t in fields["inputs"]]
        pairs = [pair for pair in fields["inplace"] if pair[1] != old]
        table.add(node, NAME, OpVariant(variant_node, variant), inputs=inputs, inplace=pairs)


def _is_exact(activation: OpOverload, bounds: list[Any], backward: OpOverload, args: Any) -> bool:
    """Check on synthetic inputs: the gradients from output and input are bitwise equal."""

    def run_check() -> bool:
        (gradient, values, *rest_args), _ = synthetic_arguments(backward, args, {})
        flat = values.as_strided((values.numel(),), (1,))
        flat.copy_(torch.linspace(-9, 9, flat.numel(), dtype=flat.dtype, device=flat.device))
        result = activation(values, *bounds)
        gradient_from_output = backward(gradient, result, *rest_args)
        return bitwise_equal(gradient_from_output, backward(gradient, values, *rest_args))

    return cached_check("alike of result", signature(backward, args, {}), bool, run_check)
