"""Tensors and ops of a joint graph, node by node.

Views are folded into the storages they alias, by what the profile saw, not by schemas.
"""

import operator
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.distributed.collectives import collective_of, modelled, scratch_bytes
from coop_plan.runtime.capture.op_profile import OpProfile
from coop_plan.runtime.variants.inplace_outputs import overwritable
from coop_plan.runtime.capture.op_replacements import instead_of, original_of
from coop_plan.runtime.capture.profiler import fakes, profile
from coop_plan.runtime.offline_capture.roofline import Roofline
from coop_plan.runtime.capture.source_locations import source_of
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.torch_internals.fakes import FakeTensor
from coop_plan.runtime.torch_internals.joint_graphs import is_primal, is_tangent
from coop_plan.runtime.torch_internals.ops import (
    OpOverload,
    argument_names,
    is_mutable,
    negative_view,
    returns_of,
    tree_flatten,
    tree_unflatten,
)
from coop_plan.runtime.torch_internals.ranks import is_object

GETITEM = operator.getitem

SNAPSHOT = "coop_snapshot"
"""Key in `node.meta` of the copy of an input that the step overwrites when its forward ends."""

NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


class GraphBuilder:
    """Collects what the profiled graph of `module` is made of; nodes are visited in its order.

    The fields are as in `joint.Captured`; `op_fields[i]` is what the document says of op i. Ops are
    measured, or with a `model` modelled for the device it stands for; with `variants` it is tried
    what results may overwrite.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        device: torch.device,
        static_inputs: set[int],
        trained: set[int],
        model: Roofline | None = None,
        *,
        variants: bool = False,
    ) -> None:
        self.module = module
        self.device = device
        self.static_inputs = static_inputs
        self.trained = trained
        self.model = model
        self.variants = variants and model is None
        self.tensors: list[dict[str, Any]] = []
        self.storages: dict[fx.Node, tuple[int | None, ...]] = {}
        self.views: set[fx.Node] = set()
        self.base: dict[int, tuple[fx.Node, int]] = {}
        self.ops: list[fx.Node] = []
        self.profiles: list[OpProfile] = []
        self.op_fields: list[dict[str, Any]] = []
        self.communication: list[int] = []
        """What the process group takes for each collective, in bytes."""
        self._primals = 0
        self.names: dict[fx.Node, str] = {}
        """What ops are known by in all traces of a function, of which some name nodes otherwise."""
        self._met: Counter[object] = Counter()

    def visit(self, node: fx.Node) -> None:
        """Take the next node; what is wrong with it is told with its place in the program."""
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
            if isinstance(value, fx.GraphModule):  # told by the op that takes it
                value = None
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
        if is_primal(node):
            if self._primals in self.static_inputs:
                kind = "parameter" if self._primals in self.trained else "buffer"
            self._primals += 1
        elif not is_tangent(node):
            raise CaptureError(f"input {node.target} is neither a primal nor a tangent")
        self._resident(node, node.meta.get("val"), kind)

    def _resident(self, node: fx.Node, value: object, kind: str) -> None:
        if isinstance(value, torch.Tensor):
            there = value.device.type == self.device.type  # no bytes on the CPU count on CUDA
            size = _storage_bytes(value, node) if there else 0
            self.storages[node] = (self.add(node.name, size, kind),)
        elif value is None or isinstance(value, (int, float, bool, str)) or is_object(value):
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
        node.target = instead_of(node.target, partial(device_of, node))
        collective = collective_of(node.target)
        target = collective or node.target
        if not isinstance(target, OpOverload):
            within = [arg for arg in node.args if isinstance(arg, OpOverload)]
            ops = "".join(f" of {op}" for op in within)
            raise CaptureError(f"{target}{ops} is not an ATen op and cannot be planned")
        if is_mutable(target):
            raise CaptureError(f"{target} overwrites its input inside the graph")
        if node.users and isinstance(node.meta["val"], NUMBERS):
            raise CaptureError.out_of_data(target, "a number")
        if is_check(node):
            node.meta["val"] = None
        if target is torch.ops.aten.view.default:
            self._make_viewable(node)
        args, kwargs = fakes((node.args, node.kwargs))
        if collective is None and self.model is not None:
            facts = self.model.profile(target, args, kwargs, node.meta["val"])
        elif collective is None:
            self._met[target] += 1
            self.names[node] = f"{target} {self._met[target]}"
            facts = profile(target, args, kwargs, op=self.names[node])
        else:
            facts = modelled(collective, args, kwargs, node.meta["val"])
            self.communication.append(scratch_bytes(collective, args, kwargs, node.meta["val"]))
        node.meta["val"] = _as_run(node, facts)
        if device_of(node).type != self.device.type:
            facts = _elsewhere(node, facts, self.device)
        reads = [
            self.storages[arg][0] for arg in tensor_args(node)
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
        if not fresh and produced and not is_check(node):
            self.views.add(node)
            return
        if any(output is not None and output.alias >= 0 for output in facts.outputs):
            raise CaptureError(f"{target} returns both a new tensor and a view of its input")
        self.ops.append(node)
        self.profiles.append(facts)
        inputs = [t for t in dict.fromkeys(reads) if t is not None]
        inplace: list[list[int]] = []
        if self.variants and collective is None and not is_random(node):
            over = [reads[i] for i in overwritable(target, args, kwargs, facts)]
            inplace = [[fresh[0], t] for t in over if t is not None and reads.count(t) == 1]
        self.op_fields.append(
            {
                "name": str(original_of(target)),
                "inputs": inputs,
                "outputs": fresh,
                "cost_us": facts.cost_us,
                "workspace_bytes": facts.workspace_bytes,
                "recomputable": collective is None and not is_check(node),
                "rng": is_random(node),
                "inplace": inplace,
                "source": source_of(node),
            }
        )


def is_check(node: fx.Node) -> bool:
    """Whether an op returns nothing: it is there to raise an error."""
    target = node.target
    return isinstance(target, OpOverload) and not returns_of(target)


def device_of(node: fx.Node) -> torch.device:
    """The device of the first tensor a node stands for."""
    tensors = (v for v in tree_flatten(node.meta["val"])[0] if isinstance(v, torch.Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _is_viewable(value: Any, shape: Any) -> bool:
    try:
        value.view(shape)
    except (RuntimeError, ValueError):
        return False
    return True


def is_random(node: fx.Node) -> bool:
    """Whether an op draws random numbers; attention without dropout does not."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = argument_names(target)
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


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
