"""Gradients of pooling that need the size of what was pooled, and read nothing of it.

ATen's take it for its shape alone, and it would be kept or made again for that.
"""

from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.custom_ops import define, name_and_arguments
from coop_plan.runtime.capture.profiler import fakes, signature, stand_in_arguments
from coop_plan.runtime.variants.bitwise_check import same_bits, tried
from coop_plan.runtime.torch_internals.ops import OpOverload

_aten = torch.ops.aten


def _define(original: OpOverload) -> OpOverload:
    """The original, which is given the sizes of its second argument in its place."""
    name, arguments = name_and_arguments(original)

    def run(gradient: torch.Tensor, sizes: list[int], *args: Any) -> Any:
        return original(gradient, gradient.new_empty(1).expand(sizes), *args)

    arguments = arguments.replace("Tensor self", "int[] sizes", 1)
    return define(f"{name}_of_size", f"({arguments}", run)


OF_SIZE = {
    original: _define(original)
    for original in (
        _aten.max_pool2d_with_indices_backward.default,
        _aten.avg_pool2d_backward.default,
    )
}


def read_sizes_alone(module: fx.GraphModule) -> None:
    """Let gradients of pooling in the graph take sizes, where that gives the same as tried."""
    for original, target in OF_SIZE.items():
        for node in module.graph.find_nodes(op="call_function", target=original):
            gradient, source, *others = node.args
            value = source.meta["val"]
            if node.kwargs or not value.is_contiguous() or not _same(original, node):
                continue
            with module.graph.inserting_before(node):
                other = module.graph.call_function(target, (gradient, [*value.shape], *others))
            other.meta = dict(node.meta)
            node.replace_all_uses_with(other)
            module.graph.erase_node(node)


def _same(original: OpOverload, node: fx.Node) -> bool:
    args = fakes(node.args)

    def attempt() -> bool:
        (gradient, values, *others), _ = stand_in_arguments(original, args, {})
        expected = original(gradient, values, *others)
        ours = OF_SIZE[original](gradient, list(values.shape), *others)
        return ours.stride() == expected.stride() and same_bits(ours, expected)

    return tried("alike of size", signature(original, args, {}), bool, attempt)
