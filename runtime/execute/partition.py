"""A plan as ordinary FX: one graph for the forward, one for the backward.

Every compute step becomes a copy of its op's node, with the arguments taken from the buffers the
plan reads; views are made again from the tensor they are views of. The forward returns the tensors
that later steps read, the backward starts from them: that is the contract between AOTAutograd's
partitioner and its autograd function (functorch's partitioners, PyTorch 2.13).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.builder import GETITEM, SNAPSHOT
from coop_plan.runtime.capture.joint import Captured
from coop_plan.runtime.torch_internals import (
    SavedForBackwardsAOTOutput,
    is_primal,
    is_tangent,
)
from coop_plan.schemas import Compute, Free, Plan, TensorRead

Source = tuple[str, Any]
"""("buffer", id), ("outside", tensor id) or ("primal", placeholder node)."""

OCCURRENCE = "coop_occurrence"
"""Key in `node.meta`: the number of the op occurrence among the plan's compute steps."""


def split(
    captured: Captured,
    plan: Plan,
    ticket: Callable[[], torch.Tensor],
    redeem: Callable[[torch.Tensor], None],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward module of `plan`.

    The forward saves a `ticket`, a CPU scalar of type int64, which the backward redeems first.
    """
    steps = [step for step in plan.steps if isinstance(step, Compute)]
    firsts = {step.op: i for i, step in reversed(list(enumerate(steps)))}
    last_forward = max((firsts[op] for op in range(captured.forward_ops)), default=-1)
    final = _final(plan)
    forward = _Half(captured, None)
    for node in captured.module.graph.find_nodes(op="placeholder"):
        if is_primal(node):
            forward.place(node)
    for node in captured.module.graph.nodes:
        if SNAPSHOT in node.meta:
            forward.place(node)
    for number in range(last_forward + 1):
        forward.emit(steps[number], number)
    backward = _Half(captured, forward)
    for node in captured.module.graph.find_nodes(op="placeholder"):
        if not is_primal(node):
            backward.place(node)
    for number in range(last_forward + 1, len(steps)):
        backward.emit(steps[number], number)

    output = next(iter(reversed(captured.module.graph.nodes)))
    descs = output.meta.get("desc", [None] * len(captured.output_args))
    cut = captured.num_fwd_outputs
    gradients = [backward.value(arg, final) for arg in captured.output_args[cut:]]
    results = [forward.value(arg, final) for arg in captured.output_args[:cut]]
    saved = [forward.tensor(source) for source in backward.saved]
    saved.append(_ticket(forward.graph, backward.graph, ticket, redeem))
    _finish(
        forward.graph,
        [*results, *saved],
        [*descs[:cut], *(SavedForBackwardsAOTOutput(i) for i in range(len(saved)))],
    )
    _finish(backward.graph, gradients, list(descs[cut:]))
    return (
        fx.GraphModule(captured.module, forward.graph),
        fx.GraphModule(captured.module, backward.graph),
    )


def _ticket(
    forward: fx.Graph,
    backward: fx.Graph,
    ticket: Callable[[], torch.Tensor],
    redeem: Callable[[torch.Tensor], None],
) -> fx.Node:
    """Let the forward return a ticket as the last thing saved, and the backward redeem it."""
    first = next(node for node in forward.nodes if node.op == "placeholder" and "val" in node.meta)
    with forward.inserting_before(next(n for n in forward.nodes if n.op != "placeholder")):
        issued = forward.call_function(ticket)  # before the first op: no slot is meant for it
    with first.meta["val"].fake_mode:
        issued.meta["val"] = torch.empty((), dtype=torch.int64)
    tangent = next(filter(is_tangent, backward.nodes), None)
    body = next((n for n in backward.nodes if n.op != "placeholder"), None)
    with backward.inserting_before(tangent or body):
        received = backward.placeholder("saved_ticket")
    received.meta["val"] = issued.meta["val"]
    with backward.inserting_before(body):
        backward.call_function(redeem, (received,))
    return issued


def _final(plan: Plan) -> dict[int, Source]:
    """Where each output is when the step is over.

    It may have been made again after that, as a by-product of another output of its op: such a
    buffer is freed, and its place taken.
    """
    freed = {b for step in plan.steps if isinstance(step, Free) for b in step.buffers}
    found: dict[int, Source] = {}
    for step in plan.steps:
        if isinstance(step, Compute):
            for write in step.writes:
                if write.offset is None:
                    found[write.tensor] = ("outside", write.tensor)
                elif write.buffer not in freed:
                    found.setdefault(write.tensor, ("buffer", write.buffer))
    return found


def _finish(graph: fx.Graph, values: list[Any], descs: list[Any]) -> None:
    graph.output(tuple(values)).meta["desc"] = descs
    graph.lint()


class _Half:
    """One of the two graphs under construction."""

    def __init__(self, captured: Captured, before: "_Half | None") -> None:
        self.captured = captured
        self.graph = fx.Graph()
        self.saved: list[Source] = []
        self._before = before
        self._first_input: fx.Node | None = None
        self._placed: dict[fx.Node, fx.Node] = {}
        self._made: dict[Source, tuple[fx.Node, int]] = {}
        self._tensors: dict[Source, fx.Node] = {}
        self._views: dict[tuple[fx.Node, tuple[Source, ...]], fx.Node] = {}

    def place(self, node: fx.Node) -> None:
        """Copy an input of the step, or the snapshot of one."""
        copy = self.graph.node_copy(node, self._placed.__getitem__)
        self._placed[node] = copy
        if self._first_input is None:
            self._first_input = copy

    def emit(self, step: Compute, number: int) -> None:
        """Copy the op of a compute step."""
        captured = self.captured
        op = captured.graph.ops[step.op]
        bind: dict[int, Source] = {}
        for t, read in zip(op.inputs, step.reads, strict=True):
            if isinstance(read, TensorRead):
                bind[t] = ("outside", t)
            else:
                bind[t] = ("buffer", read)
        node = captured.ops[step.op]
        copy = self.graph.node_copy(node, lambda arg: self._resolve(arg, bind))
        copy.meta[OCCURRENCE] = number
        for write in step.writes:
            source: Source = (
                ("outside", write.tensor) if write.offset is None else ("buffer", write.buffer)
            )
            self._made[source] = (copy, captured.base[write.tensor][1])

    def value(self, arg: Any, final: Mapping[int, Source]) -> Any:
        """An output of the step in terms of this graph."""
        if not isinstance(arg, fx.Node):
            return arg
        return self._resolve(arg, final)

    def tensor(self, source: Source) -> fx.Node:
        """The node that holds a whole buffer, outside tensor or primal."""
        kind, which = source
        if kind == "primal":
            return self._placed[which]
        found = self._tensors.get(source)
        if found is not None:
            return found
        made = self._made.get(source)
        if made is None:
            return self._receive(source)
        node, position = made
        if isinstance(node.meta["val"], torch.Tensor):
            self._tensors[source] = node
        else:
            item = self.graph.call_function(GETITEM, (node, position))
            item.meta["val"] = node.meta["val"][position]
            self._tensors[source] = item
        return self._tensors[source]

    def _receive(self, source: Source) -> fx.Node:
        """A backward input for something that the forward has and returns as saved."""
        assert self._before is not None, f"{source} is read before it is made"
        origin = self._before.tensor(source)
        anchor = self._first_input
        if anchor is None:  # no tangents: behind the inputs received so far
            anchor = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
        with self.graph.inserting_before(anchor):
            node = self.graph.placeholder(f"saved_{len(self.saved)}")
        node.meta = {key: val for key, val in origin.meta.items() if key != OCCURRENCE}
        self.saved.append(source)
        if source[0] == "primal":
            self._placed[source[1]] = node
        else:
            self._tensors[source] = node
        return node

    def _resolve(self, node: fx.Node, bind: Mapping[int, Source]) -> fx.Node:
        if node.op == "placeholder" or SNAPSHOT in node.meta:
            if node not in self._placed:
                return self._receive(("primal", node))
            return self._placed[node]
        if node.op == "get_attr":
            if node not in self._placed:
                self._placed[node] = self.graph.node_copy(node)
            return self._placed[node]
        if node not in self.captured.views:
            (t,) = self.captured.storages[node]
            assert t is not None
            return self.tensor(bind[t])
        if node.target is GETITEM:
            parent = node.args[0]
            assert isinstance(parent, fx.Node)
            if parent not in self.captured.views:
                (t,) = self.captured.storages[node]
                assert t is not None
                return self.tensor(bind[t])
        behind = {t for t in self.captured.storages[node] if t is not None}
        key = (node, tuple(bind[t] for t in sorted(behind) if t in bind))
        if key not in self._views:
            self._views[key] = self.graph.node_copy(node, lambda arg: self._resolve(arg, bind))
        return self._views[key]
