"""Tensors and ops of a graph document, collected from a joint graph node by node.

Views are folded into the storages that they alias. Aliases come from the profiles, not the schemas.
"""

import functools
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import fx

from coop_plan.runtime.capture.nondeterminism import may_differ
from coop_plan.runtime.capture.op_replacements import original_of, replacement_of
from coop_plan.runtime.capture.profiler import fake_values, profile_op
from coop_plan.runtime.capture.source_locations import source_of
from coop_plan.runtime.distributed.collectives import collective_of, modelled_profile, scratch_bytes
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.op_profile import BYTES_PER_US, OpProfile, UpdateProfile
from coop_plan.runtime.torch_internals.fakes import FakeTensor
from coop_plan.runtime.torch_internals.joint_graphs import is_primal, is_tangent
from coop_plan.runtime.torch_internals.ops import (
    UNTAGGED_VIEWS,
    OpOverload,
    argument_names,
    elements_spanned,
    is_mutable,
    is_view_op,
    negative_view,
    return_count,
    storage_key,
    tree_flatten,
    tree_unflatten,
)
from coop_plan.runtime.torch_internals.ranks import is_object

GETITEM = operator.getitem

SNAPSHOT = "coop_snapshot"
"""Key in `node.meta` of the copy of an input that the step overwrites after its forward."""

OP_MAKER = "coop_op_maker"
"""Key in `node.meta` of a function that makes the node's op for the layouts of its arguments."""

UPDATE = "coop_update"
"""Key in `node.meta` of the `UpdateOp` of a node that updates a parameter."""

UNREAD = "coop_unread"
"""Key in `node.meta` of arguments on which no result depends that a later recomputation is for."""

Shape = tuple[int, ...]

SCALAR_TYPES = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


OverwritableArguments = Callable[[OpOverload, Any, Any, OpProfile], list[int]]
"""Positions of the tensor arguments that the result may overwrite: (op, args, kwargs, profile)."""


class CostModel(Protocol):
    """Model of ops on a device that is absent (`offline_capture.roofline`)."""

    @property
    def resident_bytes(self) -> int:
        """Memory that libraries hold for the ops profiled so far."""

    def device_document(self) -> dict[str, Any]:
        """The device entry of the graph document."""

    def profile(self, target: OpOverload, args: Any, kwargs: Any, result: Any) -> OpProfile:
        """The profile of an op, from fake tensors."""


@dataclass(frozen=True)
class UpdateOp:
    """Update of the parameter of an input node by its optimizer."""

    profile: UpdateProfile
    parameter: fx.Node


@dataclass(eq=False)
class GraphBuilder:
    """Collects the tensors and ops of `module`'s profiled graph; nodes are visited in order.

    The fields are as in `joint_graph.Captured`; `op_fields[i]` is the document's entry of op i. Ops
    are measured, or profiled by `model` if there is one.
    """

    module: fx.GraphModule
    device: torch.device
    static_inputs: set[int]
    trained: set[int]
    model: CostModel | None = None
    overwritable_arguments: OverwritableArguments | None = None
    tensors: list[dict[str, Any]] = field(default_factory=list)
    storages: dict[fx.Node, tuple[int | None, ...]] = field(default_factory=dict)
    views: set[fx.Node] = field(default_factory=set)
    producer: dict[int, tuple[fx.Node, int]] = field(default_factory=dict)
    ops: list[fx.Node] = field(default_factory=list)
    profiles: list[OpProfile] = field(default_factory=list)
    op_fields: list[dict[str, Any]] = field(default_factory=list)
    collective_scratch: list[int] = field(default_factory=list)
    """Bytes that the process group allocates for each collective."""
    _primals: int = 0
    _spans: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # of primals, by storage
    names: dict[fx.Node, str] = field(default_factory=dict)
    """Names of ops that are equal in all traces of a function; names of nodes are not."""
    _op_counts: Counter[object] = field(default_factory=Counter)

    def visit(self, node: fx.Node) -> None:
        """Add the next node; errors are prefixed with its source location."""
        try:
            self._visit(node)
        except CaptureError as error:
            if not (source := source_of(node)):
                raise
            raise CaptureError(f"{source}: {error}") from error.__cause__

    def _visit(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._placeholder(node)
        elif SNAPSHOT in node.meta:
            self._resident(node, node.meta["val"], "buffer")
        elif node.op == "get_attr":
            value = node.meta.get("val", getattr(self.module, str(node.target), None))
            if isinstance(value, fx.GraphModule):  # the op that reads it raises
                value = None
            self._resident(node, value, "constant")
        elif UPDATE in node.meta:
            self._update(node, node.meta[UPDATE])
        elif node.op == "call_function":
            if node.target is GETITEM:
                parent, index = node.args
                assert isinstance(parent, fx.Node)
                assert isinstance(index, int)
                node.meta["val"] = parent.meta["val"][index]
                if isinstance(node.meta.get("val"), (int, float)) and node.users:
                    raise CaptureError(f"{parent.target} returns a number that other ops read")
                self.storages[node] = (self.storages[parent][index],)
                self.views.add(node)
            elif node.target is write_input:
                self._write_input(node)
            else:
                self._call(node)
        elif node.op != "output":
            raise CaptureError(f"{node.op} of {node.target} cannot be planned")

    def _placeholder(self, node: fx.Node) -> None:
        kind = "input"
        if is_primal(node):
            if self._primals in self.static_inputs:
                kind = "parameter" if self._primals in self.trained else "buffer"
            self._primals += 1
        elif not is_tangent(node):
            raise CaptureError(f"input {node.target} is neither a primal nor a tangent")
        self._resident(node, node.meta.get("val"), kind)

    def _resident(self, node: fx.Node, value: object, kind: str) -> None:
        if isinstance(value, torch.Tensor):
            on_device = value.device.type == self.device.type  # CPU bytes do not count on CUDA
            size = self._reached_bytes(value, node) if on_device else 0
            self.storages[node] = (self.add(node.name, size, kind),)
        elif value is None or isinstance(value, (int, float, bool, str)) or is_object(value):
            self.storages[node] = (None,)
        else:
            raise CaptureError(
                f"input {node.name} is a {type(value).__name__}: dynamic shapes cannot be planned,"
                " compile with dynamic=False"
            )

    def _reached_bytes(self, value: torch.Tensor, node: fx.Node) -> int:
        """Bytes of a storage that an input reaches, and no primal before it."""
        span = _span(value, node)
        others = self._spans.setdefault(storage_key(value), []) if is_primal(node) else []
        before = _covered(others)
        others.append(span)
        return _covered(others) - before

    def tensors_of(self, value: object) -> set[int | None]:
        """Tensor ids of an output of the graph."""
        return set(self.storages[value]) if isinstance(value, fx.Node) else set()

    def add(self, name: str, size: int, kind: str) -> int:
        """Add a tensor and return its id."""
        t = len(self.tensors)
        self.tensors.append({"id": t, "name": name, "bytes": size, "kind": kind})
        return t

    def _make_viewable(self, node: fx.Node) -> None:
        """Insert a copy before a view that the measured layout of its input does not allow."""
        source, shape = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(shape, list | tuple)
        value = source.meta["val"]
        layout = tuple(value.shape), value.stride()
        if _is_viewable(*layout, tuple(shape)):
            return
        with self.module.graph.inserting_before(node):
            copy = self.module.graph.call_function(
                torch.ops.aten.clone.default, (source,), {"memory_format": torch.contiguous_format}
            )
        copy.meta["val"] = source.meta["val"].clone(memory_format=torch.contiguous_format)
        self.visit(copy)
        node.replace_input_with(source, copy)

    def _update(self, node: fx.Node, update: UpdateOp) -> None:
        """Add an update: it reads a gradient, and overwrites its parameter and the states."""
        gradient = self.storages[node.all_input_nodes[0]][0]
        (parameter,) = self.storages[update.parameter]
        assert gradient is not None and parameter is not None
        self.tensors[parameter]["kind"] = "parameter"
        profile, changed = update.profile, [parameter]
        if profile.state_bytes:
            states = self.add(f"states of {update.parameter.name}", profile.state_bytes, "buffer")
            changed.append(states)
        inputs = [gradient, *changed]
        if profile.changes_gradient:
            changed.append(gradient)
        self.storages[node] = (None,)
        planned = replace(profile.later, workspace_bytes=profile.workspace_bytes)
        self._add_writer(node, "coop_plan.update_parameter", inputs, changed, planned)

    def _write_input(self, node: fx.Node) -> None:
        """Add the write of a buffer's new value, which returns the buffer."""
        value, buffer = (self.storages[argument][0] for argument in node.all_input_nodes)
        assert value is not None and buffer is not None
        self.storages[node] = (buffer,)
        cost = 2 * self.tensors[buffer]["bytes"] / BYTES_PER_US[self.device.type]
        profile = OpProfile(cost, (), (), 0, 0)
        self._add_writer(node, "coop_plan.write_input", [value, buffer], [buffer], profile)

    def _add_writer(
        self, node: fx.Node, name: str, inputs: list[int], mutates: list[int], profile: OpProfile
    ) -> None:
        """Add an op that overwrites inputs, and so runs once."""
        self.ops.append(node)
        self.profiles.append(profile)
        self.op_fields.append(
            {
                "name": name,
                "inputs": inputs,
                "outputs": [],
                "mutates": mutates,
                "cost_us": profile.cost_us,
                "workspace_bytes": profile.workspace_bytes,
                "recomputable": False,
                "rng": False,
                "inplace": [],
                "source": source_of(node),
            }
        )

    def _call(self, node: fx.Node) -> None:
        fused = OP_MAKER in node.meta
        if fused:
            node.target = node.meta[OP_MAKER]([arg.meta["val"] for arg in tensor_args(node)])
        node.target = replacement_of(node.target, partial(device_of, node))
        collective = collective_of(node.target)
        target = collective or node.target
        if not isinstance(target, OpOverload):
            within = [arg for arg in node.args if isinstance(arg, OpOverload)]
            ops = "".join(f" of {op}" for op in within)
            raise CaptureError(f"{target}{ops} is not an ATen op and cannot be planned")
        if is_mutable(target):
            raise CaptureError(f"{target} overwrites its input inside the graph")
        if node.users and isinstance(node.meta["val"], SCALAR_TYPES):
            raise CaptureError.out_of_data(target, "a number")
        if is_check(node):
            node.meta["val"] = None
        if target is torch.ops.aten.view.default:
            self._make_viewable(node)
        args, kwargs = fake_values((node.args, node.kwargs))
        if collective is None and self.model is not None:
            profile = self.model.profile(target, args, kwargs, node.meta["val"])
        elif collective is None:
            self._op_counts[target] += 1
            self.names[node] = f"{target} {self._op_counts[target]}"
            profile = profile_op(target, args, kwargs, op=self.names[node])
        else:
            profile = modelled_profile(collective, args, kwargs, node.meta["val"])
            scratch = scratch_bytes(collective, args, kwargs, node.meta["val"])
            self.collective_scratch.append(scratch)
        node.meta["val"] = _with_measured_layout(node, profile)
        if device_of(node).type != self.device.type:
            profile = _off_device_profile(node, profile, self.device)
        reads = [
            self.storages[arg][0] for arg in tensor_args(node)
        ]  # a tensor argument is never a tuple node: those are taken apart by getitem
        produced: list[int | None] = []
        fresh: list[int] = []
        for position, output in enumerate(profile.outputs):
            if output is None:
                produced.append(None)
            elif output.alias >= 0:
                produced.append(reads[output.alias])
            elif output.duplicate_of >= 0:
                produced.append(produced[output.duplicate_of])
            else:
                # A CUDA op may return a scalar on the CPU.
                on_device = self.device.type == "cpu" or position in profile.allocated_outputs
                t = self.add(node.name, output.bytes if on_device else 0, "activation")
                self.producer[t] = (node, position)
                produced.append(t)
                fresh.append(t)
        self.storages[node] = tuple(produced)
        if not fresh and produced and not is_check(node):
            self.views.add(node)
            return
        if any(output is not None and output.alias >= 0 for output in profile.outputs):
            raise CaptureError(f"{target} returns both a new tensor and a view of its input")
        self.ops.append(node)
        self.profiles.append(profile)
        unread = [self.storages[argument][0] for argument in node.meta.get(UNREAD, ())]
        inputs = [t for t in dict.fromkeys(reads) if t is not None and t not in unread]
        inplace: list[list[int]] = []
        if self.overwritable_arguments and collective is None and not is_random(node):
            positions = self.overwritable_arguments(target, args, kwargs, profile)
            overwritten = [reads[i] for i in positions]
            inplace = [[fresh[0], t] for t in overwritten if t is not None and reads.count(t) == 1]
        self.op_fields.append(
            {
                "name": str(target.overloadpacket if fused else original_of(target)),
                "inputs": inputs,
                "outputs": fresh,
                "cost_us": profile.cost_us,
                "workspace_bytes": profile.workspace_bytes,
                "recomputable": collective is None
                and not is_check(node)
                and not may_differ(node, self.device)
                and (is_random(node) or not profile.differs),
                "rng": is_random(node),
                "inplace": inplace,
                "source": source_of(node),
            }
        )


def write_input(invocation: Any, value: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Graph op: `invocation` writes a buffer's new value; returns the buffer."""
    written: torch.Tensor = invocation.write_input(value, buffer)
    return written


def is_view(node: fx.Node) -> bool:
    """True if an op returns views of an argument, or one of the views."""
    if node.op != "call_function":
        return False
    if node.target is GETITEM:
        parent = node.args[0]
        assert isinstance(parent, fx.Node)
        return is_view(parent)
    return node.target in UNTAGGED_VIEWS or is_view_op(node.target)


def is_check(node: fx.Node) -> bool:
    """True if an op returns nothing; its only effect is to raise an error."""
    target = node.target
    return isinstance(target, OpOverload) and not return_count(target)


def device_of(node: fx.Node) -> torch.device:
    """The device of the first tensor a node stands for."""
    tensors = (v for v in tree_flatten(node.meta["val"])[0] if isinstance(v, torch.Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


@functools.lru_cache(4096)
def _is_viewable(sizes: Shape, stride: Shape, shape: Shape) -> bool:
    """True if a tensor of this layout has a view of another shape."""
    value = torch.empty_strided(sizes, stride, device="meta")
    try:
        value.view(shape)
    except (RuntimeError, ValueError):
        return False
    return True


def is_random(node: fx.Node) -> bool:
    """True if an op samples random numbers; attention without dropout does not."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = argument_names(target)
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


def _off_device_profile(node: fx.Node, profile: OpProfile, device: torch.device) -> OpProfile:
    """The profile of a CPU op in a CUDA step: without memory on the device."""
    for value in tree_flatten(node.meta["val"])[0]:
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            raise CaptureError(
                f"{node.target} computes on the CPU in a step on {device}: move its inputs there"
            )
    return replace(profile, allocations=(), workspace_bytes=0)


def _with_measured_layout(node: fx.Node, profile: OpProfile) -> Any:
    """The fake result of an op, with the dtype and memory layout of the measured result.

    A few kernels choose other layouts than FakeTensorMode. Later ops would fail on the fake result,
    or make other allocations.

    Raises:
        CaptureError: the shape of the result depends on data.
    """
    values, spec = tree_flatten(node.meta["val"])
    for i, output in enumerate(profile.outputs):
        value = values[i]
        if output is None or not isinstance(value, FakeTensor):
            continue
        size = output.bytes
        if output.alias >= 0:
            size = tensor_args(node)[output.alias].meta["val"].untyped_storage().nbytes()
        if not all(isinstance(length, int) for length in value.shape):
            raise CaptureError.out_of_data(node.target, "a shape")
        fake = str(value.dtype), tuple(value.shape), value.stride(), value.storage_offset()
        layout = output.dtype, output.shape, output.stride, output.offset
        if fake != layout or value.untyped_storage().nbytes() != size:
            dtype = getattr(torch, output.dtype.removeprefix("torch."))
            with value.fake_mode:
                whole = value.new_empty(size // dtype.itemsize, dtype=dtype)
                made = whole.as_strided(output.shape, output.stride, output.offset)
                made = made.conj() if value.is_conj() else made
                values[i] = negative_view(made) if value.is_neg() else made
    return tree_unflatten(values, spec)


def tensor_args(node: fx.Node) -> list[fx.Node]:
    """The nodes among a call's arguments whose value is one tensor, in flattened order."""
    flat, _ = tree_flatten((node.args, node.kwargs))
    return [
        value
        for value in flat
        if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
    ]


def _span(value: torch.Tensor, node: fx.Node) -> tuple[int, int]:
    """Bytes of its storage from a tensor's first element to its last, half-open."""
    begin = value.storage_offset()
    if not all(isinstance(n, int) for n in (*value.shape, *value.stride(), begin)):
        raise CaptureError(
            f"input {node.name} has dynamic shapes, which cannot be planned: compile with"
            " dynamic=False"
        )
    first, size = int(begin), value.element_size()
    return first * size, (first + elements_spanned(value)) * size


def _covered(spans: list[tuple[int, int]]) -> int:
    """Bytes in at least one of the spans."""
    total = end = 0
    for first, last in sorted(spans):
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total
