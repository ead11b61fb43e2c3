"""Capture of AOTAutograd's joint graph of a step as a profiled graph document.

Program order: the forward ops, then the backward ops, each in traced order.
"""

import contextlib
import functools
import json
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import torch
from torch import fx

from coop_plan.planner.progress import counted
from coop_plan.runtime.cache.profiles import profile_session, session
from coop_plan.runtime.capture.graph_builder import (
    SNAPSHOT,
    UPDATE,
    CostModel,
    GraphBuilder,
    is_check,
    is_random,
)
from coop_plan.runtime.capture.input_updates import add_updates
from coop_plan.runtime.capture.op_variants import OpVariant, VariantPasses, VariantTable
from coop_plan.runtime.capture.profiler import largest_measurement, measured_ops
from coop_plan.runtime.device import cuda
from coop_plan.runtime.device.copy_engines import measure_link
from coop_plan.runtime.distributed.collectives import (
    GROUP_THREADS,
    collective_of,
    complete_collectives,
)
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.op_profile import LaunchTimes, OpProfile
from coop_plan.runtime.torch_internals.fakes import real_mode
from coop_plan.runtime.torch_internals.joint_graphs import (
    checkpoint_of,
    is_primal,
    is_tangent,
)
from coop_plan.runtime.torch_internals.ops import tree_flatten
from coop_plan.runtime.torch_internals.ranks import is_object, real_object
from coop_plan.schemas import Compute, Graph, Op, Variant, parse_graph

GENERATOR_BYTES = 5056
"""Size of one saved state of the CPU generator; a recomputed random op needs one."""

RUNTIME = "runtime"
"""Name of the tensor for the memory that the runtime itself allocates during a step."""

KEPT_OPS = 16
"""Ops after which the code of a kernel is taken for gone from the processor's caches."""

LAUNCHES = "launches"

Launches = Callable[[], LaunchTimes]
"""Signature of the launch times in the cache of profiles."""

SAVED_HANDLE_BYTES = 8
"""Size of the handle by which the backward finds its step (runtime.execute.planned_step)."""


class SelectedVariant(NamedTuple):
    """The variant that a plan runs for an op: its document entry, its node and its profile."""

    spec: Op | Variant
    node: fx.Node
    profile: OpProfile


@dataclass
class Captured:
    """A profiled graph, and the nodes of the joint FX graph that its tensors and ops come from.

    Tensor ids and op ids of `graph` are positions. `storages[node]` are the tensor ids of a node's
    flattened value (None: no tensor). `ops[i]` is the node of op i. `views` are nodes without a
    storage of their own, `getitem` included. `producer[t]` is the node that produces tensor t, and
    the output position.
    """

    module: fx.GraphModule
    num_fwd_outputs: int
    graph: Graph
    ops: list[fx.Node]
    profiles: list[OpProfile]
    storages: dict[fx.Node, tuple[int | None, ...]]
    views: set[fx.Node]
    producer: dict[int, tuple[fx.Node, int]]
    forward_ops: int
    profile_seconds: float
    device: torch.device
    profiled_ops: int = 0
    profiling_bytes: int = 0
    """Most bytes that the measurement of an op took, that of `profiling_op`; 0 if none was."""
    profiling_op: str = ""
    output_args: list[Any] = field(default_factory=list)
    resident_in_step: int = 0
    """Resident bytes that are allocated during the step: tangents, copies of inputs that the step
    overwrites, the runtime's own memory."""
    variants: Mapping[fx.Node, Mapping[str, OpVariant]] = field(default_factory=dict)
    """Variants of ops other than the default, by node and name."""
    any_sizes: bool = False
    """True if its numbers are `sized_numbers`: plans run at these sizes and at smaller ones."""

    @property
    def checkpoints(self) -> list[Hashable | None]:
        """The user's checkpoint that recomputes each op, if one does."""
        return [checkpoint_of(node) for node in self.ops]

    def selected_variant(self, step: Compute) -> SelectedVariant:
        """The variant that a step of a plan runs.

        Raises:
            CaptureError: the plan names a variant that this capture does not have.
        """
        op, node = self.graph.ops[step.op], self.ops[step.op]
        if step.variant is None:
            return SelectedVariant(op, node, self.profiles[step.op])
        variant = self.variants.get(node, {}).get(step.variant)
        if variant is None:
            raise CaptureError(
                f"the plan runs variant '{step.variant}' of op {op.id} ({op.name}), which this"
                " capture does not have: capture the graph with this version, and plan that graph"
            )
        spec = next(spec for spec in op.variants if spec.name == step.variant)
        return SelectedVariant(spec, variant.node, variant.profile)


@profile_session()
def capture_joint(
    module: fx.GraphModule,
    num_fwd_outputs: int,
    static_inputs: Sequence[int] = (),
    name: str = "step",
    model: CostModel | None = None,
    variants: VariantPasses | None = None,
    fuse: Callable[[fx.GraphModule, int], None] | None = None,
    *,
    cuda_graphs: bool = False,
    launches: Launches | None = None,
) -> Captured:
    """Profile the ops of a joint graph, and build its graph document.

    Args:
        module: AOTAutograd's joint graph; `meta["val"]` of every node is set.
        num_fwd_outputs: how many of its outputs are the forward's.
        static_inputs: positions of the primals that are parameters or buffers.
        name: of the graph.
        model: cost model of an absent device; without one, ops are measured.
        variants: passes that add variants of ops.
        fuse: a pass (`fused.regions.fuse_regions`) that replaces ops by fused regions.
        cuda_graphs: on CUDA, count memory that graphs of the step keep: for the results, and for
            copies of inputs that are neither parameters nor buffers.
        launches: measures the CPU's launch times (`execute.launch_times`); without it they are 0.

    Raises:
        CaptureError: an op or input that cannot be planned.
    """
    began, measured = time.perf_counter(), measured_ops()
    largest_measurement()  # forgets earlier ones
    complete_collectives(module)
    for rewrite in variants.rewrites if variants else ():
        rewrite(module)
    _bind_objects(module)
    _add_tangents_last(module)
    if fuse is not None:
        fuse(module, num_fwd_outputs)
    output = next(iter(reversed(module.graph.nodes)))
    outputs: list[Any] = list(output.args[0])
    device = _device_of_step(module)
    if device.type == "cuda" and model is None:
        _hook_cuda_allocator()
    add_updates(module, outputs, num_fwd_outputs, static_inputs)
    gradients = outputs[num_fwd_outputs:]
    trained = {i for i, gradient in enumerate(gradients) if gradient is not None}
    overwritable = variants.overwritable_arguments if variants else None
    builder = GraphBuilder(module, device, set(static_inputs), trained, model, overwritable)
    measured_on_cuda = device.type == "cuda" and model is None
    with cuda.without_cudnn_benchmark() if measured_on_cuda else contextlib.nullcontext():
        ops = sum(node.op == "call_function" for node in module.graph.nodes)
        verb = "profiling" if model is None else "modelling"
        nodes = counted(module.graph.nodes, len(module.graph.nodes), f"{verb} {ops} ops")
        for node in nodes:
            builder.visit(node)
        _copy_shared_gradients(module, builder, outputs, num_fwd_outputs)
        table = VariantTable(builder)
        for add_variants in variants.additions if variants else ():
            add_variants(builder, table)
    if model is None:
        device_document = _device_document(device, launches)
    else:
        device_document = model.device_document()
    if cuda_graphs and device.type == "cuda":  # a replay launches nothing by itself
        device_document |= {"launch_us": 0.0, "copy_launch_us": 0.0}
    if measured_on_cuda:
        torch.cuda.empty_cache()  # cached by PyTorch while profiling
    random = sum(op["rng"] for op in builder.op_fields)
    states = GENERATOR_BYTES * (
        random + 2 if random else 0
    )  # plus one at the start and one during the step
    own_bytes = SAVED_HANDLE_BYTES + states if device.type == "cpu" else 0
    collective_scratch = sum(sorted(builder.collective_scratch)[-GROUP_THREADS:])
    libraries = 0 if model is None else model.resident_bytes
    worker_bytes = max((profile.worker_bytes for profile in builder.profiles), default=0)
    output_tensors = {
        t for value in outputs if isinstance(value, fx.Node) for t in builder.storages[value]
    }
    if cuda_graphs and device.type == "cuda":
        own_bytes += _kept_by_graphs(builder, output_tensors)
    builder.add(RUNTIME, own_bytes + collective_scratch + libraries + worker_bytes, "buffer")
    for t in output_tensors:
        if t is not None and builder.tensors[t]["kind"] == "activation":
            builder.tensors[t]["kind"] = "output"
    for op in builder.op_fields:  # only activations may overwrite or be overwritten
        for variant in (op, *op.get("variants", ())):
            pairs = variant["inplace"]
            variant["inplace"] = [
                p for p in pairs if {builder.tensors[t]["kind"] for t in p} == {"activation"}
            ]
    profiling_bytes, profiling_op = largest_measurement()
    forward = forward_nodes(module, outputs[:num_fwd_outputs])
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
        "device": device_document,
        "tensors": builder.tensors,
        "ops": ops,
    }
    captured = Captured(
        module=module,
        num_fwd_outputs=num_fwd_outputs,
        graph=parse_graph(document, source="captured graph"),
        ops=[builder.ops[i] for i in order],
        profiles=[builder.profiles[i] for i in order],
        storages=builder.storages,
        views=builder.views,
        producer=builder.producer,
        forward_ops=forward_ops,
        profile_seconds=time.perf_counter() - began,
        device=device,
        profiled_ops=measured_ops() - measured,
        profiling_bytes=profiling_bytes,
        profiling_op=profiling_op,
        output_args=outputs,
        # On CUDA the arena's hook does not see these bytes.
        resident_in_step=_resident_in_step(builder) if device.type == "cpu" else 0,
        variants=table.variants,
    )
    return with_costs_in_order(captured)


def with_costs_in_order(captured: Captured) -> Captured:
    """A captured graph with the costs that its ops have in their order.

    An op costs its `first_us` if none of its kind ran within `KEPT_OPS` ops, or since an update,
    which runs more code than the processor's caches hold.
    """
    latest: dict[object, int] = {}
    ops = []
    for at, (node, op) in enumerate(zip(captured.ops, captured.graph.ops, strict=True)):
        is_first = at - latest.get(node.target, -KEPT_OPS) >= KEPT_OPS
        of = captured.variants.get(node, {})
        forms = [captured.profiles[at], *(of[variant.name].profile for variant in op.variants)]
        costs = [max(p.cost_us, p.first_us) if is_first else p.cost_us for p in forms]
        variants = [
            variant.model_copy({"cost_us": cost})
            for variant, cost in zip(op.variants, costs[1:], strict=True)
        ]
        ops.append(op.model_copy({"cost_us": costs[0], "variants": variants}))
        latest[node.target] = at
        if UPDATE in node.meta:
            latest.clear()
    return replace(captured, graph=captured.graph.model_copy({"ops": ops}))


def _bind_objects(module: fx.GraphModule) -> None:
    """Return DTensor meshes as constants: forward and backward pass no objects to each other."""
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


def _add_tangents_last(module: fx.GraphModule) -> None:
    """Make the other operand of a sum with a tangent the first one, whose layout the sum gets.

    An output that the user's code does not differentiate, as logits next to a loss, has a tangent
    of zeros in the output's layout. Eager autograd does not add it, so its layout may differ.
    """
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        first, second = node.args[:2]
        if node.kwargs or not all(isinstance(arg, fx.Node) for arg in (first, second)):
            continue
        if is_tangent(first) and first.meta["val"].shape == second.meta["val"].shape:
            node.args = (second, first)


def _device_of_step(module: fx.GraphModule) -> torch.device:
    """The one device that a step runs on; scalars on the CPU do not count."""
    found: dict[torch.device, fx.Node] = {}
    for node in module.graph.nodes:
        for value in tree_flatten(node.meta.get("val"))[0]:
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                found.setdefault(value.device, node)
    if not found:
        return torch.device("cpu")
    if len(found) > 1:
        where = ", ".join(f"{node.name} on {device}" for device, node in found.items())
        raise CaptureError(
            f"a step runs on one device, and this one has {where}: move them to one device"
        )
    (device,) = found
    if device.type != "cuda":
        raise CaptureError(f"steps run on the CPU or on CUDA, not on {device}")
    return device


def _hook_cuda_allocator() -> None:
    if cuda.capturing():
        raise CaptureError(
            "a step cannot be profiled while a CUDA graph is captured: run the step once before"
        )
    cuda.install_allocator()


def _device_document(device: torch.device, launches: Launches | None) -> dict[str, Any]:
    """The device entry of the graph document."""
    if device.type == "cpu":
        name = torch.backends.cpu.get_cpu_capability()
        return {"kind": "cpu", "name": name, **({} if launches is None else _cached(launches))}
    found = torch.cuda.get_device_properties(device)
    device_document = {"kind": "cuda", "name": found.name, "memory_bytes": found.total_memory}
    return device_document | _link(device)


def _cached(launches: Launches) -> LaunchTimes:
    """Launch times of the CPU, from the cache of profiles or measured."""
    cache = session()
    record = None if cache is None else cache.get(LAUNCHES)
    if record is not None:
        with contextlib.suppress(msgspec.DecodeError):  # damaged: measured again and replaced
            return msgspec.json.decode(record, type=LaunchTimes)
    found = _measured(launches)
    if cache is not None:
        cache.put(LAUNCHES, json.dumps(found))
    return found


@functools.cache
def _measured(launches: Launches) -> LaunchTimes:
    with real_mode():
        return launches()


@functools.cache
def _link(device: torch.device) -> dict[str, float]:
    return measure_link(device, functools.partial(cuda.device_us, device.index))


def _copy_shared_gradients(
    module: fx.GraphModule, builder: GraphBuilder, outputs: list[Any], num_fwd_outputs: int
) -> None:
    """Copy the gradients that autograd would copy into `.grad`, as planned ops.

    Autograd keeps a gradient without a copy only if it has the parameter's strides and shares no
    memory (torch/csrc/autograd/functions/accumulate_grad.h, torch 2.13).
    """
    primals = list(filter(is_primal, module.graph.nodes))
    taken = {t for value in outputs[:num_fwd_outputs] for t in builder.tensors_of(value)}
    end = next(iter(reversed(module.graph.nodes)))
    for i, gradient in enumerate(outputs[num_fwd_outputs:]):
        if not isinstance(gradient, fx.Node) or i not in builder.static_inputs:
            continue
        if is_object(gradient.meta["val"]):
            continue
        (t,) = builder.storages[gradient]
        parameter, value = primals[i].meta["val"], gradient.meta["val"]
        own_bytes = t in builder.producer and t not in taken
        taken.add(t)
        if own_bytes and value.stride() == parameter.stride():
            continue
        if not parameter.is_contiguous() and not (own_bytes and value.is_contiguous()):
            continue  # another memory format: autograd copies it
        with module.graph.inserting_before(end):
            copy = module.graph.call_function(
                torch.ops.aten.clone.default,
                (gradient,),
                {"memory_format": torch.contiguous_format},
            )
        copy.meta["val"] = torch.empty_like(value, memory_format=torch.contiguous_format)
        builder.visit(copy)
        outputs[num_fwd_outputs + i] = copy


def _kept_by_graphs(builder: GraphBuilder, outputs: set[int | None]) -> int:
    """Bytes that CUDA graphs of a step keep: of its results, and of copies of its inputs."""
    snapshots = (node for node in builder.storages if SNAPSHOT in node.meta)
    copied = {t for node in snapshots for t in builder.storages[node]}
    return sum(
        tensor["bytes"]
        for t, tensor in enumerate(builder.tensors)
        if t in copied
        or tensor["kind"] == "input"
        or (tensor["kind"] == "activation" and t in outputs)
    )


def _resident_in_step(builder: GraphBuilder) -> int:
    found = {
        t
        for node, storages in builder.storages.items()
        for t in storages
        if SNAPSHOT in node.meta or is_tangent(node)
    }
    found.add(len(builder.tensors) - 1)  # the runtime's own
    return sum(int(builder.tensors[t]["bytes"]) for t in found if t is not None)


def keeps_program_order(node: fx.Node) -> bool:
    """True for random ops, collectives and checks, which run in program order."""
    return is_random(node) or collective_of(node.target) is not None or is_check(node)


def forward_nodes(module: fx.GraphModule, fwd_outputs: Sequence[Any]) -> set[fx.Node]:
    """Ancestors of the outputs, and random ops, collectives and checks that need no gradient.

    The latter belong to the forward even if no output needs them: the random stream and the
    collectives keep program order.
    """
    from_tangent: set[fx.Node] = set()
    for node in module.graph.nodes:
        if is_tangent(node) or any(arg in from_tangent for arg in node.all_input_nodes):
            from_tangent.add(node)
    stack = [value for value in fwd_outputs if isinstance(value, fx.Node)]
    stack += [
        node
        for node in module.graph.nodes
        if keeps_program_order(node) and node not in from_tangent
    ]
    found: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found
