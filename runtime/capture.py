"""The joint forward and backward graph of AOTAutograd as a profiled graph.

Views are folded into the storages they alias, by what the profile saw, not by schemas. Program
order is the forward ops, then the backward ops, each in traced order.
"""

import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from coop_plan.runtime import cuda
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.profile import OpProfile, measured_ops, profile
from coop_plan.runtime.profile_cache import kept_profiles
from coop_plan.runtime.recurrent import TRAINED
from coop_plan.schemas import Graph, parse_graph

GETITEM = operator.getitem

GENERATOR_BYTES = 5056
"""Of one state of the CPU's generator, of which each random op may need one to run again."""

TICKET_BYTES = 8
"""Of what the forward saves to know its step by (runtime.executor)."""

SNAPSHOT = "coop_snapshot"
"""Key in `node.meta` of the copy of an input that the step overwrites when its forward ends."""

NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)

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
    device: torch.device
    profiled_ops: int = 0
    output_args: list[Any] = field(default_factory=list)
    resident_within: int = 0
    """Bytes that count as resident and are allocated when the step runs: tangents, copies of inputs
    that the step overwrites, the runtime's own."""


@kept_profiles()
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
    began, measured = time.perf_counter(), measured_ops()
    output = next(iter(reversed(module.graph.nodes)))
    outputs: list[Any] = list(output.args[0])
    device = _device_of_step(module)
    _snapshot_overwritten(module, output.meta.get("desc", [])[:num_fwd_outputs])
    gradients = outputs[num_fwd_outputs:]
    trained = {i for i, gradient in enumerate(gradients) if gradient is not None}
    builder = _Builder(module, device, set(static_inputs), trained)
    for node in module.graph.nodes:
        builder.visit(node)
    _own_layout(module, builder, outputs, num_fwd_outputs)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what profiling took
    random = sum(op["rng"] for op in builder.op_fields)
    states = GENERATOR_BYTES * (random + 1 if random else 0)
    builder.add("runtime", TICKET_BYTES + states if device.type == "cpu" else 0, "buffer")
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
        "device": _described(device),
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
    )


def device_of(node: fx.Node) -> torch.device:
    """The device of the first tensor a node stands for."""
    tensors = (v for v in tree_flatten(node.meta["val"])[0] if isinstance(v, torch.Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


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
    if cuda.capturing():
        raise CaptureError(
            "a step cannot be profiled while a CUDA graph is captured: run it once before"
        )
    cuda.take_over()
    return device


def _described(device: torch.device) -> dict[str, Any]:
    """The device of the graph document."""
    if device.type == "cpu":
        return {"kind": "cpu", "name": torch.backends.cpu.get_cpu_capability()}
    found = torch.cuda.get_device_properties(device)
    return {"kind": "cuda", "name": found.name, "memory_bytes": found.total_memory}


def _own_layout(
    module: fx.GraphModule, builder: "_Builder", outputs: list[Any], num_fwd_outputs: int
) -> None:
    """Copy the gradients that autograd would copy when it puts them into `.grad`.

    It keeps a gradient as it is only with the parameter's strides and with memory of its own
    (torch/csrc/autograd/functions/accumulate_grad.h, torch 2.13); its copy would not be planned.
    """
    primals = [
        node
        for node in module.graph.find_nodes(op="placeholder")
        if str(node.target).startswith("primals")
    ]
    taken = {t for value in outputs[:num_fwd_outputs] for t in builder.stored(value)}
    end = next(iter(reversed(module.graph.nodes)))
    for i, gradient in enumerate(outputs[num_fwd_outputs:]):
        if not isinstance(gradient, fx.Node) or i not in builder.static_inputs:
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


def _resident_within(builder: "_Builder") -> int:
    found = {
        t
        for node, storages in builder.storages.items()
        for t in storages
        if SNAPSHOT in node.meta
        or (node.op == "placeholder" and str(node.target).startswith("tangents"))
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


class _Builder:
    def __init__(
        self,
        module: fx.GraphModule,
        device: torch.device,
        static_inputs: set[int],
        trained: set[int],
    ) -> None:
        self.module = module
        self.device = device
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
                node.meta["val"] = parent.meta["val"][index]
                if isinstance(node.meta.get("val"), (int, float)) and node.users:
                    raise CaptureError(f"{parent.target} returns a number that other ops take")
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
            there = value.device.type == self.device.type  # no bytes on the CPU count on CUDA
            size = _storage_bytes(value, node) if there else 0
            self.storages[node] = (self.add(node.name, size, kind),)
        elif value is None or isinstance(value, (int, float, bool, str)):
            self.storages[node] = (None,)
        else:
            raise CaptureError(
                f"input {node.name} is a {type(value).__name__}: dynamic shapes cannot be planned,"
                " compile with dynamic=False"
            )

    def stored(self, value: object) -> set[int | None]:
        """The tensors behind an output of the graph."""
        return set(self.storages[value]) if isinstance(value, fx.Node) else set()

    def add(self, name: str, size: int, kind: str) -> int:
        """A new tensor."""
        t = len(self.tensors)
        self.tensors.append({"id": t, "name": name, "bytes": size, "kind": kind})
        return t

    def _make_viewable(self, node: fx.Node) -> None:
        """Let a view that the layout does not allow, though traced, be one of a copy."""
        source, shape = node.args
        assert isinstance(source, fx.Node)
        if _is_viewable(source.meta["val"], shape):
            return
        with self.module.graph.inserting_before(node):
            copy = self.module.graph.call_function(
                torch.ops.aten.clone.default,
                (source,),
                {"memory_format": torch.contiguous_format},
            )
        copy.meta["val"] = source.meta["val"].clone(memory_format=torch.contiguous_format)
        self.visit(copy)
        node.replace_input_with(source, copy)

    def _call(self, node: fx.Node) -> None:
        target = node.target = TRAINED.get(node.target, node.target)
        if not isinstance(target, torch._ops.OpOverload):
            within = [arg for arg in node.args if isinstance(arg, torch._ops.OpOverload)]
            ops = "".join(f" of {op}" for op in within)
            raise CaptureError(f"{target}{ops} is not an ATen op and cannot be planned")
        if target._schema.is_mutable:
            raise CaptureError(f"{target} overwrites its input inside the graph")
        if node.users and isinstance(node.meta["val"], NUMBERS):
            raise CaptureError(f"{target} makes a number out of data, which cannot be planned")
        if target is torch.ops.aten.view.default:
            self._make_viewable(node)
        facts = profile(target, *fx.node.map_arg((node.args, node.kwargs), _fake))
        node.meta["val"] = _as_run(node, facts)
        if device_of(node).type != self.device.type:
            facts = _elsewhere(node, facts, self.device)
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
            elif output.twin >= 0:
                produced.append(produced[output.twin])
            else:
                # A CUDA op may return a scalar on the CPU.
                there = self.device.type == "cpu" or position in facts.allocated
                t = self.add(node.name, output.bytes if there else 0, "activation")
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
                "rng": _is_random(node),
            }
        )


def _is_viewable(value: Any, shape: Any) -> bool:
    try:
        value.view(shape)
    except (RuntimeError, ValueError):
        return False
    return True


def _is_random(node: fx.Node) -> bool:
    """Whether an op draws random numbers; attention without dropout does not."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


def _fake(node: fx.Node) -> Any:
    return node.meta["val"]


def _elsewhere(node: fx.Node, facts: OpProfile, device: torch.device) -> OpProfile:
    """The profile of an op on the CPU in a step on CUDA: it takes nothing there."""
    for value in tree_flatten(node.meta["val"])[0]:
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            raise CaptureError(f"{node.target} computes on the CPU in a step on {device}")
    return replace(facts, allocations=(), workspace_bytes=0)


def _as_run(node: fx.Node, facts: OpProfile) -> Any:
    """The fake result of an op, with the type and the memory layout that the op chose when it ran.

    A few kernels choose others than FakeTensorMode says, and the ops behind them would fail on the
    fake result, or make other allocations.

    Raises:
        CaptureError: the shape of the result depends on data.
    """
    values, spec = tree_flatten(node.meta["val"])
    for i, output in enumerate(facts.outputs):
        value = values[i]
        if output is None or not isinstance(value, FakeTensor):
            continue
        size = output.bytes
        if output.alias >= 0:
            size = _tensor_args(node)[output.alias].meta["val"].untyped_storage().nbytes()
        if not all(isinstance(length, int) for length in value.shape):
            raise CaptureError(f"{node.target} makes a shape out of data, which cannot be planned")
        fake = str(value.dtype), tuple(value.shape), value.stride(), value.storage_offset()
        layout = output.dtype, output.shape, output.stride, output.offset
        if fake != layout or value.untyped_storage().nbytes() != size:
            dtype = getattr(torch, output.dtype.removeprefix("torch."))
            with value.fake_mode:
                whole = value.new_empty(size // dtype.itemsize, dtype=dtype)
                made = whole.as_strided(output.shape, output.stride, output.offset)
                made = made.conj() if value.is_conj() else made
                values[i] = torch._neg_view(made) if value.is_neg() else made
    return tree_unflatten(values, spec)


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
    stack += [n for n in module.graph.nodes if _is_random(n) and n not in from_tangent]
    found: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found
