"""Bodies of ops beside their defaults: as the graph has them, and as they run.

Each is offered only if what it returns on stand-in data is the same to the bit as the default's,
and lies in memory as that does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from coop_plan.runtime.capture.builder import GraphBuilder
from coop_plan.runtime.capture.facts import OpProfile


@dataclass(frozen=True)
class Other:
    """A body of an op beside its default: the node that runs it, and its facts."""

    node: fx.Node
    facts: OpProfile


class Offers:
    """The variants of a builder's ops: in its fields, and by node and name."""

    def __init__(self, builder: GraphBuilder) -> None:
        self.others: dict[fx.Node, dict[str, Other]] = {}
        self._fields = dict(zip(builder.ops, builder.op_fields, strict=True))

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
