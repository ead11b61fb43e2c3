"""Pairs of variants, of an op and of its backwards, with a smaller saved tensor.

The variant of the op returns the saved tensor, and the variants of its backwards read it. The plan
selects the variants.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.graph_builder import GETITEM, GraphBuilder
from coop_plan.runtime.capture.op_variants import OpVariant, VariantTable
from coop_plan.runtime.capture.profiler import fake_values, profile_op
from coop_plan.runtime.op_profile import OpProfile
from coop_plan.runtime.torch_internals.ops import OpOverload
from coop_plan.runtime.variants.inplace_outputs import has_layout


@dataclass(frozen=True)
class SavedPair:
    """An op and its backwards ("readers"), and the ops that run as their variants.

    Attributes:
        target: runs for `node` with `args`; returns the result and `saved_bytes` bytes.
        backward: runs for each reader, with the arguments `reader_args(reader, saved)`.
        replaced: by reader, the tensor id that the variant does not read any more.
        inplace: True if both ops may write their result into their first argument.
    """

    name: str
    node: fx.Node
    target: OpOverload
    args: tuple[Any, ...]
    backward: OpOverload
    reader_args: Callable[[fx.Node, Any], tuple[Any, ...]]
    replaced: Mapping[fx.Node, int | None]
    saved_bytes: int
    inplace: bool

    @property
    def result(self) -> Any:
        """The fake result."""
        value = self.node.meta["val"]
        return value if isinstance(value, torch.Tensor) else value[0]

    def inplace_pairs(self, node: fx.Node, profile: OpProfile) -> list[tuple[int, int]]:
        """Positions of the result and of the argument that it may overwrite."""
        if self.inplace and has_layout(fake_values(node.args[0]), profile.outputs[0]):
            return [(0, 0)]
        return []


ExactnessCheck = Callable[[SavedPair, OpProfile, Mapping[fx.Node, OpProfile]], bool]


def add_saved_pair(
    builder: GraphBuilder, table: VariantTable, pair: SavedPair, is_exact: ExactnessCheck
) -> None:
    """Add the variants of a pair, if results and layouts equal the default's."""
    node, graph, result = pair.node, builder.module.graph, pair.result
    position = {node: i for i, node in enumerate(builder.ops)}
    with result.fake_mode:
        saved = torch.empty(pair.saved_bytes, dtype=torch.uint8, device=result.device)
    name = f"{builder.names[node]}_{pair.name}"
    forward = profile_op(pair.target, fake_values(pair.args), {}, name)
    backward = {}
    for reader in pair.replaced:
        reader_args = fake_values(pair.reader_args(reader, saved))
        name = f"{builder.names[reader]}_{pair.name}"
        backward[reader] = profile_op(pair.backward, reader_args, {}, name)
        if backward[reader].outputs != builder.profiles[position[reader]].outputs:
            return
    first = builder.profiles[position[node]].outputs[0]
    has_same_outputs = forward.outputs[0] == first and forward.allocated_outputs - {-1} == {0, 1}
    if not has_same_outputs or not is_exact(pair, forward, backward):
        return
    t = builder.add(f"{node.name}_{pair.name}", pair.saved_bytes, "activation")
    variant_node = table.add_node(node, pair.target, pair.args)
    with graph.inserting_after(variant_node):
        saved_node = graph.call_function(GETITEM, (variant_node, 1))
    variant_node.meta["val"], saved_node.meta["val"] = (result, saved), saved
    builder.producer[t] = variant_node, 1
    result_id = builder.storages[node][0]
    assert result_id is not None
    builder.storages[variant_node], builder.storages[saved_node] = (result_id, t), (t,)
    builder.views.add(saved_node)
    inplace = table.inplace_pairs(node, pair.inplace_pairs(node, forward))
    variant = OpVariant(variant_node, forward)
    table.add(node, pair.name, variant, outputs=[result_id, t], inplace=inplace)
    for reader, replaced in pair.replaced.items():
        variant_node = table.add_node(reader, pair.backward, pair.reader_args(reader, saved_node))
        reads = builder.op_fields[position[reader]]["inputs"]
        inputs = [t if read == replaced else read for read in reads]
        inplace = table.inplace_pairs(reader, pair.inplace_pairs(reader, backward[reader]))
        variant = OpVariant(variant_node, backward[reader])
        table.add(reader, pair.name, variant, inputs=inputs, inplace=inplace)
