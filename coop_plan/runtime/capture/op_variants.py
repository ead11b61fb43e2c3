"""Variants of ops: their entries in the graph document, and the nodes that run them.

A variant is added only if its results on synthetic inputs are bitwise equal to the default's, with
the same memory layout. The passes that find variants are in `coop_plan.runtime.variants`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from coop_plan.runtime.capture.graph_builder import GraphBuilder, OverwritableArguments, tensor_args
from coop_plan.runtime.op_profile import OpProfile


@dataclass(frozen=True)
class OpVariant:
    """A variant of an op other than the default: the node that runs it, and its profile."""

    node: fx.Node
    profile: OpProfile


class VariantTable:
    """The variants of a builder's ops, by node and name, and in the builder's op fields."""

    def __init__(self, builder: GraphBuilder) -> None:
        self.variants: dict[fx.Node, dict[str, OpVariant]] = {}
        self._builder = builder
        self._fields = dict(zip(builder.ops, builder.op_fields, strict=True))

    def add_node(self, node: fx.Node, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
        """Insert a call after `node` that computes the same tensors as `node`."""
        graph = self._builder.module.graph
        with graph.inserting_after(node):
            added = graph.call_function(target, args, kwargs)
        added.meta["val"] = node.meta["val"]
        self._builder.storages[added] = self._builder.storages[node]
        return added

    def inplace_pairs(
        self, node: fx.Node, pairs: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """In-place pairs (result, input) of tensor ids, from positions of results and arguments.

        An input that the op reads twice, also through a view, is left out.
        """
        reads = [self._builder.storages[argument][0] for argument in tensor_args(node)]
        found = []
        for result, argument in pairs:
            made, read = self._builder.storages[node][result], reads[argument]
            if made is not None and read is not None and reads.count(read) == 1:
                found.append((made, read))
        return found

    def add(
        self,
        node: fx.Node,
        name: str,
        variant: OpVariant,
        *,
        inputs: Sequence[int] | None = None,
        outputs: Sequence[int] | None = None,
        inplace: Sequence[Sequence[int]] = (),
    ) -> None:
        """Add a variant of an op; `inputs` and `outputs` are the default's by default."""
        fields = self._fields[node]
        entry = {
            "name": name,
            "cost_us": variant.profile.cost_us,
            "workspace_bytes": variant.profile.workspace_bytes,
            "inputs": fields["inputs"] if inputs is None else inputs,
            "outputs": fields["outputs"] if outputs is None else outputs,
            "inplace": inplace,
        }
        fields.setdefault("variants", []).append(entry)
        self.variants.setdefault(node, {})[name] = variant


@dataclass(frozen=True)
class VariantPasses:
    """Passes over a joint graph that add variants of its ops.

    Attributes:
        rewrites: rewrite the joint graph in place, before it is profiled.
        overwritable_arguments: positions of the tensor arguments that an op's result may overwrite,
            from the op, its arguments and its profile.
        additions: add variants to a profiled graph.
    """

    rewrites: Sequence[Callable[[fx.GraphModule], None]]
    overwritable_arguments: OverwritableArguments
    additions: Sequence[Callable[[GraphBuilder, VariantTable], None]]
