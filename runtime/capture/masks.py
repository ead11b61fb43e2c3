"""Bodies that keep the masks of dropout as bits: one where the default keeps a byte an element.

Of a `native_dropout` and of the backward of each, as variants with a tensor of their own between
them; which run, the plan says. They are offered only if what they return on stand-in data is the
same to the bit as the default's, and lies in memory as that does.
"""

from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.bodies import Offers, Other
from coop_plan.runtime.capture.builder import GETITEM, GraphBuilder
from coop_plan.runtime.capture.own_ops import DROPOUT_BITS, DROPOUT_BITS_BACKWARD
from coop_plan.runtime.capture.profile import profile, signature, stand_in_arguments
from coop_plan.runtime.capture.tried import same_bits, tried

NAME = "bits"

_DROPOUT: Any = torch.ops.aten.native_dropout.default
_BACKWARD: Any = torch.ops.aten.native_dropout_backward.default


def offer_bits(builder: GraphBuilder, offers: Offers) -> None:
    """Give dropouts in the builder's graph, and their backwards, variants."""
    position = {node: i for i, node in enumerate(builder.ops)}
    graph = builder.module.graph
    for node in [node for node in builder.ops if node.target is _DROPOUT]:
        readers = _readers(node)
        if not readers or not _fits(node, readers):
            continue
        bits = _bits_of(node.meta["val"][1])
        arguments = fx.node.map_arg(node.args, _fake)
        forward = profile(DROPOUT_BITS, arguments, {}, f"{node.name}_bits")
        backward = {}
        for reader in readers:
            gradient, _, scale = reader.args
            given = _fake(gradient), bits, scale
            backward[reader] = profile(DROPOUT_BITS_BACKWARD, given, {}, f"{reader.name}_bits")
        default = {reader: builder.profiles[position[reader]] for reader in readers}
        same = all(backward[reader].outputs == default[reader].outputs for reader in readers)
        if not same or forward.allocated - {-1} != {0, 1} or not _same(arguments):
            continue
        made, mask = builder.storages[node]
        assert made is not None
        t = builder.add(f"{node.name}_bits", bits.numel(), "activation")
        with graph.inserting_after(node):
            other = graph.call_function(DROPOUT_BITS, node.args)
        with graph.inserting_after(other):
            second = graph.call_function(GETITEM, (other, 1))
        other.meta["val"], second.meta["val"] = (node.meta["val"][0], bits), bits
        builder.base[t] = other, 1
        builder.storages[other], builder.storages[second] = (made, t), (t,)
        builder.views.add(second)
        offers.add(node, NAME, Other(other, forward), outputs=[made, t])
        for reader in readers:
            gradient, _, scale = reader.args
            with graph.inserting_after(reader):
                other = graph.call_function(DROPOUT_BITS_BACKWARD, (gradient, second, scale))
            other.meta["val"] = reader.meta["val"]
            builder.storages[other] = builder.storages[reader]
            reads = builder.op_fields[position[reader]]["inputs"]
            inputs = [t if read == mask else read for read in reads]
            offers.add(reader, NAME, Other(other, backward[reader]), inputs=inputs)


def _fake(node: Any) -> Any:
    return node.meta["val"]


def _readers(node: fx.Node) -> list[fx.Node]:
    """The backwards of a dropout."""
    masks = [user for user in node.users if user.target is GETITEM and user.args[1] == 1]
    users = [user for mask in masks for user in mask.users]
    return [user for user in users if user.target is _BACKWARD and user.args[1] in masks]


def _fits(node: fx.Node, readers: list[fx.Node]) -> bool:
    """Whether the mask is whole bytes of bits, and all is in the order of its elements."""
    values, mask = _fake(node.args[0]), node.meta["val"][1]
    inorder = (values, mask, *(_fake(reader.args[0]) for reader in readers))
    return all(v.is_contiguous() for v in inorder) and mask.numel() % 8 == 0 < mask.numel()


def _bits_of(mask: Any) -> torch.Tensor:
    with mask.fake_mode:
        return torch.empty(mask.numel() // 8, dtype=torch.uint8, device=mask.device)


def _same(arguments: Any) -> bool:
    """Whether both bodies return the same, as tried."""
    return tried(
        "alike",
        signature(DROPOUT_BITS, arguments, {}),
        bool,
        lambda: _alike(stand_in_arguments(_DROPOUT, arguments, {})[0]),
    )


def _alike(given: tuple[Any, ...]) -> bool:
    """Whether both drop the same from one state of the generator, and so do their backwards."""
    values, p, _ = given
    with torch.random.fork_rng(devices=[values.device] if values.is_cuda else []):
        torch.manual_seed(0)
        made, mask = _DROPOUT(*given)
        torch.manual_seed(0)
        ours, bits = DROPOUT_BITS(*given)
    scale = 1 / (1 - p)
    backward = _BACKWARD(values, mask, scale), DROPOUT_BITS_BACKWARD(values, bits, scale)
    return same_bits(made, ours) and same_bits(*backward)
