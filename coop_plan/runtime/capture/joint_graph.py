"""The joint forward and backward graph of AOTAutograd as a profiled graph.

Program order is the forward ops, then the backward ops, each in traced order.
"""

import contextlib
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from coop_plan.runtime.cache.profiles import kept_profiles
from coop_plan.runtime.variants.registry import Offers, Other
from coop_plan.runtime.capture.graph_builder import SNAPSHOT, GraphBuilder, is_check, is_random
from coop_plan.runtime.distributed.collectives import (
    GROUP_THREADS,
    collective_of,
    complete_collectives,
)
from coop_plan.runtime.capture.op_profile import OpProfile
from coop_plan.runtime.variants.fused_cross_entropy import fuse_cross_entropies
from coop_plan.runtime.variants.bit_masks import offer_bits
from coop_plan.runtime.variants.chunked import offer_parts
from coop_plan.runtime.variants.max_pool import offer_places
from coop_plan.runtime.capture.profiler import measured_ops
from coop_plan.runtime.variants.output_for_grad import offer_results
from coop_plan.runtime.offline_capture.roofline import Roofline
from coop_plan.runtime.variants.shape_only_backward import read_sizes_alone
from coop_plan.runtime.device import cuda
from coop_plan.runtime.device.copy_engines import measured_link
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.torch_internals.joint_graphs import (
    InputMutationAOTOutput,
    is_primal,
    is_tangent,
)
from coop_plan.runtime.torch_internals.ops import tree_flatten
from coop_plan.runtime.torch_internals.ranks import is_object, real_object
from coop_plan.schemas import Compute, Graph, Op, Variant, parse_graph

GENERATOR_BYTES = 5056
"""Of one state of the CPU's generator, of which each random op may need one to run again."""

RUNTIME = "runtime"
"""Name of the tensor that stands for what the runtime itself takes while a step runs."""

TICKET_BYTES = 8
"""Of what the forward saves to know its step by (runtime.execute.planned_step)."""


class Running(NamedTuple):
    """A variant of an op: what the graph says of it, the node that runs, and its facts."""

    form: Op | Variant
    node: fx.Node
    facts: OpProfile


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
    device: torch.device
    profiled_ops: int = 0
    output_args: list[Any] = field(default_factory=list)
    resident_within: int = 0
    """Bytes that count as resident and are allocated when the step runs: tangents, copies of inputs
    that the step overwrites, the runtime's own."""
    others: Mapping[fx.Node, Mapping[str, Other]] = field(default_factory=dict)
    """The variants of ops, by node and name."""

    def running(self, step: Compute) -> Running:
        """What a step of a plan runs.

        Raises:
            CaptureError: a variant of which nothing is known here.
        """
        op, node = self.graph.ops[step.op], self.ops[step.op]
        if step.variant is None:
            return Running(op, node, self.profiles[step.op])
        other = self.others.get(node, {}).get(step.variant)
        if other is None:
            raise CaptureError(
                f"the plan runs op {op.id} ({op.name}) as '{step.variant}', which is not known"
                " here: plan the graph that this version captures"
            )
        form = next(form for form in op.variants if form.name == step.variant)
        return Running(form, other.node, other.facts)


@kept_profiles()
def capture_joint(
    module: fx.GraphModule,
    num_fwd_outputs: int,
    static_inputs: Sequence[int] = (),
    name: str = "step",
    model: Roofline | None = None,
    *,
    variants: bool = False,
) -> Captured:
    """Profile the ops of a joint graph and describe it.

    Args:
        module: AOTAutograd's joint graph; `meta["val"]` of every node is set.
        num_fwd_outputs: how many of its outputs are the forward's.
        static_inputs: positions of the primals that are parameters or buffers.
        name: of the graph.
        model: costs of a device that is not there; without one, ops are measured.
        variants: also try in what other ways ops can be run; only what is measured counts.

    Raises:
        CaptureError: something that cannot be planned, named.
    """
    began, measured = time.perf_counter(), measured_ops()
    complete_collectives(module)
    if variants and model is None:
        fuse_cross_entropies(module)
        read_sizes_alone(module)
    _bind_objects(module)
    _tangents_last(module)
    output = next(iter(reversed(module.graph.nodes)))
    outputs: list[Any] = list(output.args[0])
    device = _device_of_step(module)
    if device.type == "cuda" and model is None:
        _take_over()
    _snapshot_overwritten(module, output.meta.get("desc", [])[:num_fwd_outputs])
    gradients = outputs[num_fwd_outputs:]
    trained = {i for i, gradient in enumerate(gradients) if gradient is not None}
    builder = GraphBuilder(module, device, set(static_inputs), trained, model, variants=variants)
    measuring = device.type == "cuda" and model is None
    with cuda.kernels_untried() if measuring else contextlib.nullcontext():
        for node in module.graph.nodes:
            builder.visit(node)
        _own_layout(module, builder, outputs, num_fwd_outputs)
        offers = Offers(builder)
        if variants and model is None:
            offer_bits(builder, offers)
            offer_places(builder, offers)
            offer_results(builder, offers)
            offer_parts(builder, offers)
    described = _described(device) if model is None else model.described()
    if measuring:
        torch.cuda.empty_cache()  # of what profiling took
    random = sum(op["rng"] for op in builder.op_fields)
    states = GENERATOR_BYTES * (random + 2 if random else 0)  # at the start, and now
    own = TICKET_BYTES + states if device.type == "cpu" else 0
    communication = sum(sorted(builder.communication)[-GROUP_THREADS:])
    libraries = 0 if model is None else model.resident_bytes
    beside = max((facts.beside_bytes for facts in builder.profiles), default=0)
    builder.add(RUNTIME, own + communication + libraries + beside, "buffer")
    leaving = {
        t for value in outputs if isinstance(value, fx.Node) for t in builder.storages[value]
    }
    for t in leaving:
        if t is not None and builder.tensors[t]["kind"] == "activation":
            builder.tensors[t]["kind"] = "output"
    for op in builder.op_fields:  # what is not the step's own is neither overwritten nor in a place
        for variant in (op, *op.get("variants", ())):
            pairs = variant["inplace"]
            variant["inplace"] = [
                p for p in pairs if {builder.tensors[t]["kind"] for t in p} == {"activation"}
            ]
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
        "device": described,
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
        device=device,
        profiled_ops=measured_ops() - measured,
        output_args=outputs,
        # On CUDA only what the arena's hook sees is counted, and this is not.
        resident_within=_resident_within(builder) if device.type == "cpu" else 0,
        others=offers.others,
    )


def _bind_objects(module: fx.GraphModule) -> None:
    """Let the step return meshes of DTensor as constants: no half hands one to the other."""
    output = next(iter(reversed(module.graph.nodes)))
    for i, node in enumerate(module.graph.find_nodes(op="placeholder")):
        value = node.meta.get("val")
        if output not in node.users or not is_object(value):
            continue
        setattr(module, f"coop_object_{i}", real_object(value))
        with module.graph.inserting_before(output):
            constant = module.graph.create_node("get_attr", f"coop_object_{i}")
        constant.meta["val"] = value
        output.replace_input_with(node, constant)


def _tangents_last(module: fx.GraphModule) -> None:
    """Let a sum with a tangent lie in memory as its other part does.

    Where the loss is made of an output that the user's code leaves alone, as logits are, its
    tangent is zeros that eager autograd does not add, in the layout of the output, which the
    gradient in eager need not have.
    """
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        first, second = node.args[:2]
        if node.kwargs or not all(isinstance(arg, fx.Node) for arg in (first, second)):
            continue
        if is_tangent(first) and first.meta["val"].shape == second.meta["val"].shape:
            node.args = (second, first)


def _device_of_step(module: fx.GraphModule) -> torch.device:
    """The one device that a step runs on; scalars on the CPU are no other."""
    found: dict[torch.device, fx.Node] = {}
    for node in module.graph.nodes:
        for value in tree_flatten(node.meta.get("val"))[0]:
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                found.setdefault(value.device, node)
    if not found:
        return torch.device("cpu")
    if len(found) > 1:
        where = ", ".join(f"{node.name} on {device}" for device, node in found.items())
        raise CaptureError(f"a step runs on one device, and this one has {where}")
    (device,) = found
    if device.type != "cuda":
        raise CaptureError(f"steps run on the CPU or on CUDA, not on {device}")
    return device


def _take_over() -> None:
    if cuda.capturing():
        raise CaptureError(
            "a step cannot be profiled while a CUDA graph is captured: run it once before"
        )
    cuda.take_over()


def _described(device: torch.device) -> dict[str, Any]:
    """The device of the graph document."""
    if device.type == "cpu":
        return {"kind": "cpu", "name": torch.backends.cpu.get_cpu_capability()}
    found = torch.cuda.get_device_properties(device)
    described = {"kind": "cuda", "name": found.name, "memory_bytes": found.total_memory}
    return described | _link(device)


@functools.cache
def _link(device: torch.device) -> dict[str, float]:
    return measured_link(device, functools.partial(cuda.device_us, device.index))


def _own_layout(
    module: fx.GraphModule, builder: GraphBuilder, outputs: list[Any], num_fwd_outputs: int
) -> None:
    """Copy the gradients that autograd would copy when it puts them into `.grad`.

    It keeps a gradient as it is only with the parameter's strides and with memory of its own
    (torch/csrc/autograd/functions/accumulate_grad.h, torch 2.13); its copy would not be planned.
    """
    primals = list(filter(is_primal, module.graph.nodes))
    taken = {t for value in outputs[:num_fwd_outputs] for t in builder.stored(value)}
    end = next(iter(reversed(module.graph.nodes)))
    for i, gradient in enumerate(outputs[num_fwd_outputs:]):
        if not isinstance(gradient, fx.Node) or i not in builder.static_inputs:
            continue
        if is_object(gradient.meta["val"]):
            continue
        (t,) = builder.storages[gradient]
        parameter, value = primals[i].meta["val"], gradient.meta["val"]
        own = t in builder.base and t not in taken
        taken.add(t)
        if own and value.stride() == parameter.stride():
            continue
        if not parameter.is_contiguous() and not (own and value.is_contiguous()):
            continue  # of another memory format: left to autograd
        with module.graph.inserting_before(end):
            copy = module.graph.call_function(
                torch.ops.aten.clone.default,
                (gradient,),
                {"memory_format": torch.contiguous_format},
            )
        copy.meta["val"] = torch.empty_like(value, memory_format=torch.contiguous_format)
        builder.visit(copy)
        outputs[num_fwd_outputs + i] = copy


def _resident_within(builder: GraphBuilder) -> int:
    found = {
        t
        for node, storages in builder.storages.items()
        for t in storages
        if SNAPSHOT in node.meta or is_tangent(node)
    }
    found.add(len(builder.tensors) - 1)  # the runtime's own
    return sum(int(builder.tensors[t]["bytes"]) for t in found if t is not None)


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


def _forward_nodes(module: fx.GraphModule, fwd_outputs: Sequence[Any]) -> set[fx.Node]:
    """What the outputs need, and random ops, collectives and checks that wait for no gradient.

    So the generator's stream and what ranks exchange keep the order of the program, whether the
    outputs use them or not.
    """
    from_tangent: set[fx.Node] = set()
    for node in module.graph.nodes:
        if is_tangent(node) or any(arg in from_tangent for arg in node.all_input_nodes):
            from_tangent.add(node)
    stack = [value for value in fwd_outputs if isinstance(value, fx.Node)]
    stack += [
        node
        for node in module.graph.nodes
        if (is_random(node) or collective_of(node.target) or is_check(node))
        and node not in from_tangent
    ]
    found: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found
