"""Pooling gradients that take the shape of the pooled tensor instead of the tensor.

ATen's read only its shape, but the tensor would be saved or recomputed for that.
"""

from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.custom_ops import define_op, name_and_schema
from coop_plan.runtime.capture.profiler import fake_values, signature, synthetic_arguments
from coop_plan.runtime.torch_internals.ops import OpOverload
from coop_plan.runtime.variants.bitwise_check import bitwise_equal, cached_check

_aten = torch.ops.aten


def _define(original: OpOverload) -> OpOverload:
    """Register `<original>_of_size`, whose second argument is the shape of the original's."""
    name, arguments = name_and_schema(original)

    def run(gradient: torch.Tensor, sizes: list[int], *args: Any) -> Any:
        return original(gradient, gradient.new_empty(1).expand(sizes), *args)

    arguments = arguments.replace("Tensor self", "int[] sizes", 1)
    return define_op(f"{name}_of_size", f"({arguments}", run)


SHAPE_ONLY_OPS = {
    original: _define(original)
    for original in (
        _aten.max_pool2d_with_indices_backward.default,
        _aten.avg_pool2d_backward.default,
    )
}


def use_shape_only_backwards(module: fx.GraphModule) -> None:
    """Replace pooling gradients by shape-only ones whose results are bitwise equal."""
    for original, target in SHAPE_ONLY_OPS.items():
        for node in module.graph.find_nodes(op="call_function", target=original):
            gradient, source, *rest_args = node.args
            value = source.meta["val"]
            if node.kwargs or not value.is_contiguous() or not _is_exact(original, node):
                continue
            with module.graph.inserting_before(node):
                args = (gradient, [*value.shape], *rest_args)
                replacement = module.graph.call_function(target, args)
            replacement.meta = dict(node.meta)
            node.replace_all_uses_with(replacement)
            module.graph.erase_node(node)


def _is_exact(original: OpOverload, node: fx.Node) -> bool:
    args = fake_values(node.args)

    def run_check() -> bool:
        (gradient, values, *rest_args), _ = synthetic_arguments(original, args, {})
        expected = original(gradient, values, *rest_args)
        result = SHAPE_ONLY_OPS[original](gradient, list(values.shape), *rest_args)
        return result.stride() == expected.stride() and bitwise_equal(result, expected)

    return cached_check("alike of size", signature(original, args, {}), bool, run_check)
