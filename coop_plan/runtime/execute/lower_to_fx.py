"""Lowers a plan to two FX graphs: the forward and the backward.

Each compute step becomes a copy of its op's node whose arguments are the buffers that the plan
reads. Views are recomputed from their base. The forward returns the tensors that later steps read,
and the backward takes them.

AOTAutograd sees the same for every plan of a graph (`stubs`): a forward that saves one handle, and
a backward that takes it. So a plan can be replaced while the step is in use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.graph_builder import (
    GETITEM,
    SNAPSHOT,
    UPDATE,
    tensor_args,
    write_input,
)
from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.runtime.execute.plan_index import Buffer, PlanIndex
from coop_plan.runtime.execute.straight_line import INVOCATION
from coop_plan.runtime.torch_internals.fakes import FakeTensor
from coop_plan.runtime.torch_internals.joint_graphs import (
    SavedForBackwardsAOTOutput,
    is_primal,
    is_tangent,
)
from coop_plan.runtime.variants.inplace_outputs import into
from coop_plan.schemas import Compute, Free, Offload, Plan, Prefetch, TensorRead, Wait, Write

Source = tuple[str, Any]
"""("buffer", id), ("outside", tensor id) or ("input", node: a primal or the copy of one)."""

OCCURRENCE = "coop_occurrence"
"""Key in `node.meta`: the number of the op occurrence among the plan's compute steps."""


@dataclass(frozen=True)
class Halves:
    """The two graphs of a plan; the first input of each is the invocation that runs it.

    The forward then takes the inputs of the step (`inputs_of`) and returns outputs and saved
    tensors; the backward takes saved tensors and tangents. `saved_inputs[i]` is the position of
    saved tensor i among the inputs, None if the forward makes it. `inputs_read` are the positions
    of the inputs that the forward reads and does not update; `updated_inputs` has the output that
    returns each updated one, by position.
    """

    forward: fx.Graph
    backward: fx.Graph
    saved_inputs: Sequence[int | None]
    inputs_read: Sequence[int]
    updated_inputs: Mapping[int, int]


def inputs_of(captured: Captured) -> list[fx.Node]:
    """Primals of a step, then the snapshots of those that it overwrites."""
    nodes = captured.module.graph.nodes
    return [*filter(is_primal, nodes), *(node for node in nodes if SNAPSHOT in node.meta)]


def tangents_of(captured: Captured) -> list[fx.Node]:
    """Gradients of its outputs that a step is given."""
    return list(filter(is_tangent, captured.module.graph.nodes))


def snapshot_positions(captured: Captured) -> list[int]:
    """Positions of the primals that a step snapshots, in the order of the snapshots."""
    inputs = inputs_of(captured)
    return [inputs.index(node.all_input_nodes[0]) for node in inputs if SNAPSHOT in node.meta]


SharedPlaces = dict[int, fx.Node]
"""By position of a result the argument whose place it takes."""


def split(
    captured: Captured, plan: Plan, index: PlanIndex, over: Mapping[int, SharedPlaces]
) -> Halves:
    """Forward and backward of `plan`; `over` are its `shared_places`."""
    border = _border(captured, plan, index)
    emitter = _Emitter(plan, index, over)
    final = {t: _source(t, buffer) for t, buffer in index.final.items()}
    forward = _Half(captured, None)
    inputs = inputs_of(captured)
    for node in inputs:
        forward.place(node)
    emitter.emit(forward, range(border))
    backward = _Half(captured, forward)
    for node in tangents_of(captured):
        backward.place(node)
    emitter.emit(backward, range(border, len(plan.steps)))

    cut = captured.num_fwd_outputs
    gradients = [backward.value(arg, final) for arg in captured.output_args[cut:]]
    results = [forward.value(arg, final) for arg in captured.output_args[:cut]]
    outputs = enumerate(captured.output_args[:cut])
    updated = {inputs.index(node.args[2]): i for i, node in outputs if _writes_input(node)}
    inputs_read = [
        i for i, node in enumerate(inputs) if forward.placed[node].users and i not in updated
    ]
    saved = [forward.tensor(source) for source in backward.saved]
    positions = {forward.placed[node]: i for i, node in enumerate(inputs)}
    for half, values in ((forward, [*results, *saved]), (backward, gradients)):
        half.graph.output(tuple(values))
        half.graph.lint()
    saved_inputs = [positions.get(node) for node in saved]
    return Halves(forward.graph, backward.graph, saved_inputs, inputs_read, updated)


def _writes_input(output: object) -> bool:
    return isinstance(output, fx.Node) and output.target is write_input


def _border(captured: Captured, plan: Plan, index: PlanIndex) -> int:
    """Number of plan steps of the forward: up to its last first run, with offloads after it.

    Waits, and steps that reuse memory, belong to the backward.
    """
    firsts = (at for op, at in index.first_run.items() if op < captured.forward_ops)
    border = max(firsts, default=-1) + 1
    while border < len(plan.steps) and isinstance(plan.steps[border], Offload | Free):
        border += 1
    return border


def shared_places(captured: Captured, plan: Plan, index: PlanIndex) -> dict[int, SharedPlaces]:
    """Results that take the place of an argument, by run."""
    found: dict[int, SharedPlaces] = {}
    for number, at in enumerate(index.runs):
        step = plan.steps[at]
        assert isinstance(step, Compute)
        for write in step.writes:
            shares = index.buffers[write.buffer].shares
            if shares is None:
                continue
            source = index.buffers[shares].tensor
            arguments = tensor_args(captured.selected_variant(step).node)
            argument = next(a for a in arguments if captured.storages[a][0] == source)
            found.setdefault(number, {})[captured.producer[write.tensor][1]] = argument
    return found


class _Emitter:
    """Emits the steps of a plan into the halves, in order."""

    def __init__(self, plan: Plan, index: PlanIndex, over: Mapping[int, SharedPlaces]) -> None:
        self._steps = plan.steps
        self._transfer_of = index.transfer_of
        self._over = over
        self._occurrence = 0

    def emit(self, half: "_Half", numbers: range) -> None:
        """Emit the steps with these numbers."""
        for number in numbers:
            step = self._steps[number]
            if isinstance(step, Compute):
                if number in self._transfer_of:
                    half.update_on_host(step, self._transfer_of[number])
                else:
                    half.emit(step, self._occurrence, self._over.get(self._occurrence, {}))
                self._occurrence += 1
            elif not isinstance(step, Free):
                half.transfer(step, self._transfer_of[number])


def stubs(
    joint: fx.GraphModule, output_args: Sequence[Any], num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The two graphs as AOTAutograd sees them: inputs and outputs without ops.

    `output_args` are the outputs of the joint graph, the first of which are the forward's. That is
    AOTAutograd's contract between partitioner and autograd function (functorch's partitioners,
    PyTorch 2.13).
    """
    primals = list(filter(is_primal, joint.graph.nodes))
    tangents = list(filter(is_tangent, joint.graph.nodes))
    output = next(iter(reversed(joint.graph.nodes)))
    descs = output.meta.get("desc", [None] * len(output_args))
    cut = num_fwd_outputs
    forward, backward = fx.Graph(), fx.Graph()
    placed = {node: forward.node_copy(node) for node in primals}
    results = [_stub(forward, arg, placed) for arg in output_args[:cut]]
    issued = forward.call_function(int)
    # Its fake value aliases an input: AOTAutograd takes others for buffers that the backward may
    # write to, and then refuses a second backward (collect_bw_donated_buffer_idxs).
    fakes = (node.meta["val"] for node in primals)
    issued.meta["val"] = next(value for value in fakes if isinstance(value, FakeTensor))
    received = backward.placeholder("saved_handle")
    received.meta["val"] = issued.meta["val"]
    placed = {node: backward.node_copy(node) for node in tangents}
    gradients = [_stub(backward, arg, placed) for arg in output_args[cut:]]
    saved = SavedForBackwardsAOTOutput(0)
    forward.output((*results, issued)).meta["desc"] = [*descs[:cut], saved]
    backward.output(tuple(gradients)).meta["desc"] = list(descs[cut:])
    return fx.GraphModule(joint, forward), fx.GraphModule(joint, backward)


def _stub(graph: fx.Graph, arg: Any, placed: Mapping[fx.Node, fx.Node]) -> Any:
    if not isinstance(arg, fx.Node):
        return arg
    if arg in placed:
        return placed[arg]
    node = graph.call_function(int)
    node.meta["val"] = arg.meta["val"]
    return node


def _source(tensor: int, made: Buffer | Write) -> Source:
    if made.offset is None:
        return ("outside", tensor)
    return ("buffer", made.id if isinstance(made, Buffer) else made.buffer)


class _Half:
    """One of the two graphs under construction."""

    def __init__(self, captured: Captured, before: "_Half | None") -> None:
        self.captured = captured
        self.graph = fx.Graph()
        self.saved: list[Source] = []
        self.placed: dict[fx.Node, fx.Node] = {}
        self._before = before
        self._invocation = self._last_saved = self.graph.placeholder(INVOCATION)
        self._made: dict[Source, tuple[fx.Node, int]] = {}
        self._tensors: dict[Source, fx.Node] = {}
        self._views: dict[tuple[fx.Node, tuple[Source, ...]], fx.Node] = {}

    def place(self, node: fx.Node) -> None:
        """Add an input of the step to the graph."""
        self.placed[node] = self.graph.placeholder(node.name)
        self.placed[node].meta = dict(node.meta)

    def emit(self, step: Compute, number: int, over: SharedPlaces) -> None:
        """Copy the op of a compute step; results in `over` take the place of an argument."""
        captured = self.captured
        form, node, _ = captured.selected_variant(step)
        bind: dict[int, Source] = {}
        for t, read in zip(form.inputs, step.reads, strict=True):
            if isinstance(read, TensorRead):
                bind[t] = ("outside", t)
            else:
                bind[t] = ("buffer", read)
        copy = self.graph.node_copy(node, lambda arg: self._resolve(arg, bind))
        if UPDATE in node.meta:
            homes = [bind[t] for t in form.inputs[1:] if bind[t][0] == "buffer"]
            copy.args = (*copy.args, *map(self.tensor, homes))
        if over:
            target: Any = copy.target
            places = [
                self._resolve(over[i], bind) if i in over else None for i in range(max(over) + 1)
            ]
            copy.target, copy.args, copy.kwargs = into(target, places, copy.args, copy.kwargs)
        copy.meta[OCCURRENCE] = number
        if not step.writes:  # its result is no tensor of the plan
            self.placed[node] = copy
        for write in step.writes:
            source = _source(write.tensor, write)
            self._made[source] = (copy, captured.producer[write.tensor][1])
            self.tensor(source)  # now: a tuple would keep all results of the op alive

    def transfer(self, step: Offload | Prefetch | Wait, number: int) -> None:
        """Start transfer `number` of the plan, or wait for it."""
        if isinstance(step, Wait):
            self.graph.call_method("transfers.wait", (self._invocation, number))
        elif isinstance(step, Offload):
            source = self.tensor(("buffer", step.buffer))
            self.graph.call_method("transfers.offload", (self._invocation, number, source))
        else:
            node = self.graph.call_method("transfers.prefetch", (self._invocation, number))
            if step.from_ is None:  # no op takes a list of it apart
                self._tensors["buffer", step.buffer] = node
                return
            maker, position = self.captured.producer[step.tensor]
            value = maker.meta["val"]
            node.meta["val"] = value if isinstance(value, torch.Tensor) else value[position]
            self._made["buffer", step.buffer] = (node, 0)

    def update_on_host(self, step: Compute, number: int) -> None:
        """Start an update on the host by the gradient that transfer `number` copies there."""
        _, position, gradient = self.captured.ops[step.op].args
        assert isinstance(gradient, fx.Node)
        value = gradient.meta["val"]
        layout = (value.dtype, value.storage_offset(), tuple(value.shape), value.stride())
        self.graph.call_method("update_on_host", (self._invocation, position, number, layout))

    def value(self, arg: Any, final: Mapping[int, Source]) -> Any:
        """The value of an output of the step in this graph."""
        if not isinstance(arg, fx.Node):
            return arg
        return self._resolve(arg, final)

    def tensor(self, source: Source) -> fx.Node:
        """The node of a whole buffer, outside tensor or primal."""
        kind, which = source
        if kind == "input":
            return self.placed[which]
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
        """Add a backward input for a tensor that the forward returns as saved."""
        assert self._before is not None, f"{source} is read before it is made"
        origin = self._before.tensor(source)
        with self.graph.inserting_after(self._last_saved):
            node = self.graph.placeholder(f"saved_{len(self.saved)}")
        self._last_saved = node
        node.meta = {key: val for key, val in origin.meta.items() if key != OCCURRENCE}
        self.saved.append(source)
        if source[0] == "input":
            self.placed[source[1]] = node
        else:
            self._tensors[source] = node
        return node

    def _resolve(self, node: fx.Node, bind: Mapping[int, Source]) -> fx.Node:
        if node.op == "placeholder":
            (t,) = self.captured.storages[node]
            if t is not None and bind.get(t, (None,))[0] == "buffer":  # a copy of its home
                return self.tensor(bind[t])
        if node in self.placed:
            return self.placed[node]
        if node.op == "placeholder" or SNAPSHOT in node.meta:
            return self._receive(("input", node))
        if node.op == "get_attr":
            self.placed[node] = self.graph.node_copy(node)
            return self.placed[node]
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
        bases = {t for t in self.captured.storages[node] if t is not None}
        key = (node, tuple(bind[t] for t in sorted(bases) if t in bind))
        if key not in self._views:
            self._views[key] = self.graph.node_copy(node, lambda arg: self._resolve(arg, bind))
        return self._views[key]
