"""A joint graph that an earlier start traced: kept on disk with AOTAutograd's entry for it.

The key has all that a trace depends on: AOTAutograd's own key, the source lines that the graph's
nodes carry, aliases and leaves among the inputs, and settings. The graph is kept as AOTAutograd
made it, before profiling.
"""

import contextlib
import io
import json
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from coop_plan.runtime.cache import traces
from coop_plan.runtime.torch_internals.fakes import (
    FakeTensor,
    FakeTensorMode,
    Layout,
    fake_over,
    meta_storage,
)
from coop_plan.runtime.torch_internals.joint_graphs import CHECKPOINT_KEYS, interpreted_module
from coop_plan.runtime.torch_internals.kept_traces import (
    CodeSlot,
    TraceStore,
    depends_only_on_key,
    keep_traces,
    slots_of,
    trace_settings,
)
from coop_plan.runtime.torch_internals.ops import OpOverload, storage_key

CONSTANT_BYTES = 4096
"""Most bytes of a constant that a trace computed, such as a mask's number, for it to be kept."""


class Joint(NamedTuple):
    """AOTAutograd's joint graph, and what it passes to the partitioner with it."""

    module: fx.GraphModule
    num_fwd_outputs: int
    static_inputs: Sequence[int]


@dataclass
class KeptTrace:
    """The trace of one compilation: found on disk, or written there.

    `graph` and `inputs` are Dynamo's. After a compilation in `lookup`, `found` is the joint graph
    of an earlier trace, and `slots` are the places of its forward and backward.
    """

    graph: fx.GraphModule
    inputs: Sequence[Any]
    found: Joint | None = None
    slots: tuple[CodeSlot, CodeSlot] | None = None
    _key: str = ""
    _record: bytes = field(default=b"", repr=False)

    @property
    def can_be_kept(self) -> bool:
        """True if a joint graph may be traced that depends on nothing but the key."""
        return (
            torch.is_grad_enabled()
            and any(
                isinstance(value, torch.Tensor) and value.requires_grad for value in self.inputs
            )
            and depends_only_on_key(self.graph, self.inputs)
        )

    @contextlib.contextmanager
    def lookup(self) -> Iterator[None]:
        """AOTAutograd looks the trace up while it compiles in this context."""
        with keep_traces(TraceStore(self._find, self._save)):
            yield

    def traced(self, joint: Joint) -> None:
        """Record a joint graph before it is profiled, which changes it."""
        self.found = None
        if self._key:
            with contextlib.suppress(pickle.PicklingError, TypeError, AttributeError):
                self._record = _dumps(joint)

    def _find(self, key: str, inputs: Sequence[Any]) -> Any:
        mode = next(value.fake_mode for value in inputs if isinstance(value, FakeTensor))
        self._key = traces.key_of(json.dumps([key, _signature(self.graph, inputs)]))
        record = traces.read(self._key)
        if record is None:
            return None
        try:
            entry, joint = pickle.loads(record)  # noqa: S301 - of this user
            self.found, self.slots = _loads(joint, mode), slots_of(entry)
        except Exception as error:
            traces.discard(self._key, error)
            return None
        return entry

    def _save(self, entry: Any) -> None:
        if self._record:
            with contextlib.suppress(pickle.PicklingError, TypeError, AttributeError):
                traces.write(self._key, pickle.dumps((entry, self._record)))
            self._record = b""


def _signature(graph: fx.GraphModule, inputs: Sequence[Any]) -> list[object]:
    """The part of the key that AOTAutograd's own does not have."""
    storages: dict[int, int] = {}
    given = [
        (value.is_leaf, str(value.device), storages.setdefault(storage_key(value), len(storages)))
        for value in inputs
    ]
    lines = [(_source(node), node.meta.get("stack_trace")) for node in graph.graph.nodes]
    return [given, lines, trace_settings()]


def _source(node: fx.Node) -> str:
    """The path of the module that a node is in, as Dynamo writes it."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return str(next(reversed(list(stack.values())))[0]) if stack else ""


class _Pickler(pickle.Pickler):
    """Pickles nodes of a graph by number, and fake tensors by layout and storage."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.numbers: dict[fx.Node, int] = {}
        self._storages: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        """See `_Unpickler.persistent_load`."""
        if isinstance(value, fx.Node):
            return self.numbers[value]
        if isinstance(value, OpOverload):
            return str(value)
        if isinstance(value, torch.Tensor):
            if not isinstance(value, FakeTensor) and value.nbytes <= CONSTANT_BYTES:
                return None
            if not isinstance(value, FakeTensor) or value.layout != torch.strided:
                raise pickle.PicklingError("a tensor with values")
            storage = self._storages.setdefault(storage_key(value), len(self._storages))
            return storage, value.untyped_storage().nbytes(), tuple(Layout.of(value))
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | fx.GraphModule):
            raise pickle.PicklingError("a symbol")
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, mode: FakeTensorMode) -> None:
        super().__init__(file)
        self.nodes: list[fx.Node] = []
        self._mode = mode
        self._storages: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, made: Any) -> Any:
        """The node of a number, the op of a name, or a new fake tensor."""
        if isinstance(made, int):
            return self.nodes[made]
        if isinstance(made, str):
            namespace, name, overload = made.split(".")
            return getattr(getattr(getattr(torch.ops, namespace), name), overload)
        number, size, layout = made
        if number not in self._storages:
            self._storages[number] = meta_storage(size)
        return fake_over(self._storages[number], Layout(*layout), self._mode)


def _dumps(joint: Joint) -> bytes:
    file = io.BytesIO()
    pickler = _Pickler(file)
    nodes = list(joint.module.graph.nodes)
    texts: dict[str, str] = {}  # a text that is one object is written once
    pickler.dump((len(nodes), joint.num_fwd_outputs, list(joint.static_inputs)))
    for number, node in enumerate(nodes):
        kept = ("val", "desc", *CHECKPOINT_KEYS)
        meta = {key: node.meta[key] for key in kept if key in node.meta}
        if trace := node.meta.get("stack_trace"):
            meta["stack_trace"] = texts.setdefault(trace, trace)
        if source := _source(node):
            meta["nn_module_stack"] = {"": (texts.setdefault(source, source), "")}
        constant = getattr(joint.module, str(node.target)) if node.op == "get_attr" else None
        pickler.dump((node.op, node.target, node.args, node.kwargs, node.name, meta, constant))
        pickler.numbers[node] = number
    return file.getvalue()


def _loads(record: bytes, mode: FakeTensorMode) -> Joint:
    unpickler = _Unpickler(io.BytesIO(record), mode)
    count, num_fwd_outputs, static_inputs = unpickler.load()
    graph, root = fx.Graph(), torch.nn.Module()
    for _ in range(count):
        op, target, args, kwargs, name, meta, constant = unpickler.load()
        if constant is not None:
            setattr(root, target, constant)
        node = graph.create_node(op, target, args, kwargs, name)
        node.meta = meta
        unpickler.nodes.append(node)
    return Joint(interpreted_module(root, graph), num_fwd_outputs, static_inputs)
