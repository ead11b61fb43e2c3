"""Variants of an op and of its backwards that keep something smaller between them.

Both the op and its backwards get a variant, with a tensor of their own between them; which run, the
plan says.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.variants.registry import Offers, Other
from coop_plan.runtime.capture.graph_builder import GETITEM, GraphBuilder
from coop_plan.runtime.capture.op_profile import OpProfile
from coop_plan.runtime.variants.inplace_outputs import lies_alike
from coop_plan.runtime.capture.profiler import fakes, profile
from coop_plan.runtime.torch_internals.ops import OpOverload


@dataclass(frozen=True)
class Keeping:
    """
    An op of the graph, its backwards, and the ops that run in their stead.

    `target` takes `args` and returns the result and `count` bytes; of these `backward` makes what
    each of its readers does, from the arguments that `given` puts together from a reader and them.
    `kept[reader]` is the tensor that a reader needs no more then. With `inplace` both may write
    their result in the place of their first argument.
    """

    name: str
    node: fx.Node
    target: OpOverload
    args: tuple[Any, ...]
    backward: OpOverload
    given: Callable[[fx.Node, Any], tuple[Any, ...]]
    kept: Mapping[fx.Node, int | None]
    count: int
    inplace: bool

    @property
    def made(self) -> Any:
        """The fake result."""
        value = self.node.meta["val"]
        return value if isinstance(value, torch.Tensor) else value[0]

    def pairs(self, node: fx.Node, facts: OpProfile) -> list[tuple[int, int]]:
        """The result in the place of what it is computed from, by position."""
        if self.inplace and lies_alike(fakes(node.args[0]), facts.outputs[0]):
            return [(0, 0)]
        return []


Same = Callable[[Keeping, OpProfile, Mapping[fx.Node, OpProfile]], bool]


def offer_keeping(builder: GraphBuilder, offers: Offers, keeping: Keeping, same: Same) -> None:
    """Give an op and its backwards their variants, if they make the `same`, and it lies alike."""
    node, graph, made = keeping.node, builder.module.graph, keeping.made
    position = {node: i for i, node in enumerate(builder.ops)}
    with made.fake_mode:
        small = torch.empty(keeping.count, dtype=torch.uint8, device=made.device)
    name = f"{builder.names[node]}_{keeping.name}"
    forward = profile(keeping.target, fakes(keeping.args), {}, name)
    backward = {}
    for reader in keeping.kept:
        given = fakes(keeping.given(reader, small))
        name = f"{builder.names[reader]}_{keeping.name}"
        backward[reader] = profile(keeping.backward, given, {}, name)
        if backward[reader].outputs != builder.profiles[position[reader]].outputs:
            return
    first = builder.profiles[position[node]].outputs[0]
    alike = forward.outputs[0] == first and forward.allocated - {-1} == {0, 1}
    if not alike or not same(keeping, forward, backward):
        return
    t = builder.add(f"{node.name}_{keeping.name}", keeping.count, "activation")
    other = offers.beside(node, keeping.target, keeping.args)
    with graph.inserting_after(other):
        second = graph.call_function(GETITEM, (other, 1))
    other.meta["val"], second.meta["val"] = (made, small), small
    builder.base[t] = other, 1
    result = builder.storages[node][0]
    assert result is not None
    builder.storages[other], builder.storages[second] = (result, t), (t,)
    builder.views.add(second)
    pairs = offers.places(node, keeping.pairs(node, forward))
    offers.add(node, keeping.name, Other(other, forward), outputs=[result, t], inplace=pairs)
    for reader, kept in keeping.kept.items():
        other = offers.beside(reader, keeping.backward, keeping.given(reader, second))
        reads = builder.op_fields[position[reader]]["inputs"]
        inputs = [t if read == kept else read for read in reads]
        pairs = offers.places(reader, keeping.pairs(reader, backward[reader]))
        variant = Other(other, backward[reader])
        offers.add(reader, keeping.name, variant, inputs=inputs, inplace=pairs)
