"""Variants of ops beside their defaults: as the graph has them, and as they run.

Each is offered only if what it returns on stand-in data is the same to the bit as the default's,
and lies in memory as that does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from coop_plan.runtime.capture.graph_builder import GraphBuilder, tensor_args
from coop_plan.runtime.capture.op_profile import OpProfile


@dataclass(frozen=True)
class Other:
    """A variant of an op beside its default: the node that runs it, and its facts."""

    node: fx.Node
    facts: OpProfile


class Offers:
    """The variants of a builder's ops: in its fields, and by node and name."""

    def __init__(self, builder: GraphBuilder) -> None:
        self.others: dict[fx.Node, dict[str, Other]] = {}
        self._builder = builder
        self._fields = dict(zip(builder.ops, builder.op_fields, strict=True))

    def beside(self, node: fx.Node, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
        """A node behind another that makes the same as that one, in the tensors of that one."""
        graph = self._builder.module.graph
        with graph.inserting_after(node):
            other = graph.call_function(target, args, kwargs)
        other.meta["val"] = node.meta["val"]
        self._builder.storages[other] = self._builder.storages[node]
        return other

    def places(self, node: fx.Node, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """In-place pairs of tensors, from positions of results and tensor arguments.

        What is read a second time, under whatever name, gives no place.
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
        other: Other,
        *,
        inputs: Sequence[int] | None = None,
        outputs: Sequence[int] | None = None,
        inplace: Sequence[Sequence[int]] = (),
    ) -> None:
        """One of an op; without `inputs` or `outputs` these are its default's."""
        fields = self._fields[node]
        variant = {
            "name": name,
            "cost_us": other.facts.cost_us,
            "workspace_bytes": other.facts.workspace_bytes,
            "inputs": fields["inputs"] if inputs is None else inputs,
            "outputs": fields["outputs"] if outputs is None else outputs,
            "inplace": inplace,
        }
        fields.setdefault("variants", []).append(variant)
        self.others.setdefault(node, {})[name] = other
