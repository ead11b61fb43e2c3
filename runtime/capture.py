"""The joint forward and backward graph of AOTAutograd as a profiled graph.

Views are folded into the storages they alias, by what the profile saw, not by schemas. Program
order is the forward ops, then the backward ops, each in traced order.
"""

import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.utils._pytree import tree_flatten

from runtime.errors import CaptureError
from runtime.profile import OpProfile, profile
from schemas import Graph, parse_graph

GETITEM = operator.getitem

SNAPSHOT = "coop_snapshot"
"""Key in `node.meta` of the copy of an input that the step overwrites when its forward ends."""

COLLECTIVES = ("_c10d_functional", "c10d", "_dtensor")
"""Namespaces of ops that every rank must run equally often."""


@dataclass
class Captured:
    """A profiled graph and where its parts are in the joint FX graph.

    Tensor ids and op ids of `graph` are positions. `storages[node]` has the tensor id of each
    flattened tensor a node stands for (None where it is none). `ops[i]` is the node of op i;
    `views` are nodes that make no storage, `getitem` included. `base[t]` is the node and the output
    position that made tensor t.
    """

    module: fx.GraphModule
    num_fwd_outputs: int
    graph: Graph
    ops: list[fx.Node]
    profiles: list[OpProfile]
    storages: dict[fx.Node, tuple[int | None, ...]]
    views: set[fx.Node]
    base: dict[int, tuple[fx.Node, int]]
    forward_ops: int
    profile_seconds: float
    output_args: list[Any] = field(default_factory=list)


def capture_joint(
    module: fx.GraphModule,
    num_fwd_outputs: int,
    static_inputs: Sequence[int] = (),
    name: str = "step",
) -> Captured:
    """Profile the ops of a joint graph and describe it.

    Args:
        module: AOTAutograd's joint graph; `meta["val"]` of every node is set.
        num_fwd_outputs: how many of its outputs are the forward's.
        static_inputs: positions of the primals that are parameters or buffers.
        name: of the graph.

    Raises:
        CaptureError: something that cannot be planned, named.
    """
    began = time.perf_counter()
    output = next(iter(reversed(module.graph.nodes)))
    outputs: list[Any] = list(output.args[0])
    _snapshot_overwritten(module, output.meta.get("desc", [])[:num_fwd_outputs])
    gradients = outputs[num_fwd_outputs:]
    trained = {i for i, gradient in enumerate(gradients) if gradient is not None}
    builder = _Builder(module, set(static_inputs), trained)
    for node in module.graph.nodes:
        builder.visit(node)
    leaving = {
        t for value in outputs if isinstance(value, fx.Node) for t in builder.storages[value]
    }
    for t in leaving:
        if t is not None and builder.tensors[t]["kind"] == "activation":
            builder.tensors[t]["kind"] = "output"
    forward = _forward_nodes(module, outputs[:num_fwd_outputs])
    order = [i for i, node in enumerate(builder.ops) if node in forward]
    forward_ops = len(order)
    order += [i for i, node in enumerate(builder.ops) if node not in forward]
    ops = []
    for position, i in enumerate(order):
        phase = "forward" if position < forward_ops else "backward"
        ops.append({"id": position, "phase": phase, **builder.op_fields[i]})
    document = {
        "schema": "coop-plan/graph/1",
        "name": name,
        "device": {"kind": "cpu", "name": torch.backends.cpu.get_cpu_capability()},
        "tensors": builder.tensors,
        "ops": ops,
    }
    return Captured(
        module=module,
        num_fwd_outputs=num_fwd_outputs,
        graph=parse_graph(document, source="captured graph"),
        ops=[builder.ops[i] for i in order],
        profiles=[builder.profiles[i] for i in order],
        storages=builder.storages,
        views=builder.views,
        base=builder.base,
        forward_ops=forward_ops,
        profile_seconds=time.perf_counter() - began,
        output_args=outputs,
    )


def _snapshot_overwritten(module: fx.GraphModule, descs: Sequence[object]) -> None:
    """Let the ops read copies of inputs that AOTAutograd overwrites after the forward.

    BatchNorm's running statistics are the usual case. A recomputation in the backward must read
    what the first run read. The copies are resident: made when the step begins, never evicted.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    overwritten = [d.mutated_input for d in descs if isinstance(d, InputMutationAOTOutput)]
    for node in inputs:
        readers = [user for user in node.users if user.op != "output"]
        if node.meta.get("desc") in overwritten and readers:
            with module.graph.inserting_after(inputs[-1]):
                copy = module.graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta = {"val": node.meta["val"], SNAPSHOT: True}
            for user in readers:
                user.replace_input_with(node, copy)


class _Builder:
    def __init__(self, module: fx.GraphModule, static_inputs: set[int], trained: set[int]) -> None:
        self.module = module
        self.static_inputs = static_inputs
        self.trained = trained
        self.tensors: list[dict[str, Any]] = []
        self.storages: dict[fx.Node, tuple[int | None, ...]] = {}
        self.views: set[fx.Node] = set()
        self.base: dict[int, tuple[fx.Node, int]] = {}
        self.ops: list[fx.Node] = []
        self.profiles: list[OpProfile] = []
        self.op_fields: list[dict[str, Any]] = []
        self._primals = 0

    def visit(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._placeholder(node)
        elif SNAPSHOT in node.meta:
            self._resident(node, node.meta["val"], "buffer")
        elif node.op == "get_attr":
            value = node.meta.get("val", getattr(self.module, str(node.target), None))
            self._resident(node, value, "constant")
        elif node.op == "call_function":
            if node.target is GETITEM:
                parent, index = node.args
                assert isinstance(parent, fx.Node)
                assert isinstance(index, int)
                self.storages[node] = (self.storages[parent][index],)
                self.views.add(node)
            else:
                self._call(node)
        elif node.op != "output":
            raise CaptureError(f"{node.op} of {node.target} cannot be planned")

    def _placeholder(self, node: fx.Node) -> None:
        kind = "input"
        if str(node.target).startswith("primals"):
            if self._primals in self.static_inputs:
                kind = "parameter" if self._primals in self.trained else "buffer"
            self._primals += 1
        elif not str(node.target).startswith("tangents"):
            raise CaptureError(f"input {node.target} is neither a primal nor a tangent")
        self._resident(node, node.meta.get("val"), kind)

    def _resident(self, node: fx.Node, value: object, kind: str) -> None:
        if isinstance(value, torch.Tensor):
            self.storages[node] = (self._tensor(node.name, _storage_bytes(value, node), kind),)
        elif value is None or isinstance(value, (int, float, bool, str)):
            self.storages[node] = (None,)
        else:
            raise CaptureError(
                f"input {node.name} is a {type(value).__name__}: dynamic shapes cannot be planned,"
                " compile with dynamic=False"
            )

    def _tensor(self, name: str, size: int, kind: str) -> int:
        t = len(self.tensors)
        self.tensors.append({"id": t, "name": name, "bytes": size, "kind": kind})
        return t

    def _call(self, node: fx.Node) -> None:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            raise CaptureError(f"{target} is not an ATen op and cannot be planned")
        if target._schema.is_mutable:
            raise CaptureError(f"{target} overwrites its input inside the graph")
        facts = profile(target, *fx.node.map_arg((node.args, node.kwargs), _fake))
        reads = [
            self.storages[arg][0] for arg in _tensor_args(node)
        ]  # a tensor argument is never a tuple node: those are taken apart by getitem
        produced: list[int | None] = []
        fresh: list[int] = []
        for position, output in enumerate(facts.outputs):
            if output is None:
                produced.append(None)
            elif output.alias >= 0:
                produced.append(reads[output.alias])
            else:
                t = self._tensor(node.name, output.bytes, "activation")
                self.base[t] = (node, position)
                produced.append(t)
                fresh.append(t)
        self.storages[node] = tuple(produced)
        if not fresh and produced:
            self.views.add(node)
            return
        if any(output is not None and output.alias >= 0 for output in facts.outputs):
            raise CaptureError(f"{target} returns both a new tensor and a view of its input")
        self.ops.append(node)
        self.profiles.append(facts)
        inputs = [t for t in dict.fromkeys(reads) if t is not None]
        self.op_fields.append(
            {
                "name": str(target),
                "inputs": inputs,
                "outputs": fresh,
                "cost_us": facts.cost_us,
                "workspace_bytes": facts.workspace_bytes,
                "recomputable": target.namespace not in COLLECTIVES,
                "rng": torch.Tag.nondeterministic_seeded in target.tags,
            }
        )


def _fake(node: fx.Node) -> Any:
    return node.meta["val"]


def _tensor_args(node: fx.Node) -> list[fx.Node]:
    """The nodes among a call's arguments that stand for one tensor, in flattened order."""
    flat, _ = tree_flatten((node.args, node.kwargs))
    return [
        value
        for value in flat
        if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
    ]


def _storage_bytes(value: torch.Tensor, node: fx.Node) -> int:
    size = value.untyped_storage().nbytes()
    if not isinstance(size, int):
        raise CaptureError(
            f"input {node.name} has dynamic shapes, which cannot be planned: compile with"
            " dynamic=False"
        )
    return size


def _forward_nodes(module: fx.GraphModule, fwd_outputs: Sequence[Any]) -> set[fx.Node]:
    """What the forward's outputs need, and every random op that waits for no gradient.

    The latter keeps the generator's stream in program order, used by the outputs or not.
    """
    from_tangent: set[fx.Node] = set()
    for node in module.graph.nodes:
        is_tangent = node.op == "placeholder" and str(node.target).startswith("tangents")
        if is_tangent or any(arg in from_tangent for arg in node.all_input_nodes):
            from_tangent.add(node)
    stack = [value for value in fwd_outputs if isinstance(value, fx.Node)]
    for node in module.graph.nodes:
        target = node.target
        if (
            isinstance(target, torch._ops.OpOverload)
            and torch.Tag.nondeterministic_seeded in target.tags
            and node not in from_tangent
        ):
            stack.append(node)
    found: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found
