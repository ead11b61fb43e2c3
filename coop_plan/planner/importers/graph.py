"""
Importer of execution traces: the graph of a step, with the tensors that each op reads and writes.

A storage's number stands for an address, which later storages use again. A storage begins at an
allocation, or at an op that returns it without having it as an argument. A storage read before it
was written is resident. A value written in place is a new tensor that may take over the old one's
address.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from coop_plan.planner.importers.kineto import KinetoTimes, Measured
from coop_plan.planner.importers.nodes import Node, Ref, read_nodes
from coop_plan.planner.importers.operators import (
    ALLOCATIONS,
    Call,
    Storage,
    base_name,
    is_collective,
    is_random,
    last_step,
    main_device,
    mutated,
    operators,
    outermost,
    reads_shape_only,
    set_phases,
)
from coop_plan.schemas import Graph, parse_graph
from coop_plan.schemas.errors import InvalidInputError


@dataclass(frozen=True)
class Imported:
    """A graph and the measured times of its ops."""

    graph: Graph
    times: Measured
    steps: int
    """Steps in the trace; the graph is that of the last complete one."""

    @property
    def timed(self) -> int:
        """Number of ops with a measured time."""
        return sum(micros is not None for micros in self.times.micros)


@dataclass
class StorageState:
    """Current state of a storage."""

    bytes: int
    itemsize: int
    tensor: int | None = None
    """Id of the tensor that it contains; None until it is written."""
    resident: bool = False


def import_trace(document: Any, kineto: Any = None, name: str = "") -> Imported:
    """The graph of a decoded execution trace of one training step.

    Costs in µs are those of the decoded `kineto` trace. An op without an event there, or without a
    kernel if there are any, costs its input and output bytes at a terabyte per second. Accumulated
    gradients and the loss that the backward starts from are the outputs of the step.

    Raises:
        InvalidInputError: the first fault and its JSON pointer in `document`; for a fault of
            `kineto`, `source` is "kineto".
    """
    nodes = read_nodes(document)
    device = main_device(nodes)
    calls, steps = last_step(operators(nodes, device))
    set_phases(calls)
    order = outermost(calls)
    ops = [call for call in order if call.is_op]
    if not ops:
        raise InvalidInputError(f"the last step has no operator on {device}", "/nodes")
    times = Measured([None] * len(ops))
    if kineto is not None:
        try:
            times = KinetoTimes(kineto).of(calls, ops, device)
        except InvalidInputError as error:
            raise InvalidInputError(error.message, error.pointer, "kineto") from None
    cost = {call.node.id: micros for call, micros in zip(ops, times.micros, strict=True)}
    builder = _Builder(device, lambda call: cost[call.node.id])
    for call in order:
        builder.visit(call)
    graph = {
        "schema": "coop-plan/graph/1",
        "name": name,
        "device": {"kind": device.split(":")[0], "name": device},
        "tensors": builder.finished_tensors(),
        "ops": builder.ops,
    }
    try:
        return Imported(parse_graph(graph), times, steps)
    except InvalidInputError as error:  # its pointer is into the graph, not into the trace
        message = f"the trace does not give a valid graph: {error.message}"
        raise InvalidInputError(message, "/nodes") from None


@dataclass
class _Builder:
    """Builder of ops and tensors; tracks the storages through the calls in program order."""

    device: str
    cost: Callable[[Call], float | None]
    tensors: list[dict[str, Any]] = field(default_factory=list)
    ops: list[dict[str, Any]] = field(default_factory=list)
    storages: dict[Storage, StorageState] = field(default_factory=dict)
    expanded: set[int] = field(default_factory=set)
    """Ids of expanded tensors, whose extent says nothing of their storage."""
    gradients: list[StorageState] = field(default_factory=list)
    loss: StorageState | None = None
    accumulating: set[int] = field(default_factory=set)
    """Ids of the nodes at and below `AccumulateGrad`."""

    def visit(self, call: Call) -> None:
        node = call.node
        if node.parent in self.accumulating or node.name == "torch::autograd::AccumulateGrad":
            self.accumulating.add(node.id)
        if call.is_op:
            self._op(call)
        elif base_name(node.name) in ALLOCATIONS:
            for ref in self._on_device(node.outputs):
                self.storages[ref.storage] = StorageState(ref.extent, ref.itemsize)
        elif base_name(node.name) == "resize_":
            for ref in self._on_device(node.outputs):
                new = StorageState(ref.extent, ref.itemsize)
                state = self.storages.setdefault(ref.storage, new)
                if state.tensor is None:
                    state.bytes = ref.extent
        if base_name(node.name).startswith(("expand", "broadcast_to")):
            self.expanded.update(ref.tensor for ref in node.outputs)
        if node.name == "aten::ones_like" and call.phase == "forward":
            inputs = [ref for refs in node.inputs for ref in self._on_device(refs)]
            self.loss = self.storages.get(inputs[0].storage) if inputs else self.loss
        if node.id in self.accumulating and (call.is_op or node.name == "aten::detach"):
            self.gradients += [
                self.storages[ref.storage]
                for ref in self._on_device(node.outputs)
                if ref.storage in self.storages
            ]

    def finished_tensors(self) -> list[dict[str, Any]]:
        """All tensors; the last tensors of the gradients and the loss become outputs."""
        for state in (*self.gradients, *([self.loss] if self.loss is not None else [])):
            if state.tensor is not None and not state.resident:
                self.tensors[state.tensor]["kind"] = "output"
        return self.tensors

    def _on_device(self, refs: list[Ref]) -> list[Ref]:
        return [ref for ref in refs if ref.device == self.device]

    def _op(self, call: Call) -> None:
        node = call.node
        inputs = [ref for refs in node.inputs for ref in self._on_device(refs)]
        read_storages = {ref.storage for ref in inputs}
        changed = {ref.storage: ref for ref in self._on_device(mutated(node))}
        reads: list[int] = []
        for ref in inputs:
            if reads_shape_only(node.name) or (
                ref.storage in changed and self._overwritten(node, ref)
            ):
                continue
            reads.append(self._read(ref, node))
        scratch = self._scratch(call, read_storages)
        mutates: list[int] = []
        outputs: list[int] = []
        pairs: list[list[int]] = []
        for ref in changed.values():
            state = self._state(ref, node)
            if state.resident:
                assert state.tensor is not None
                reads.append(state.tensor)
                mutates.append(state.tensor)
                continue
            before = state.tensor
            state.tensor = self._tensor(state.bytes, "activation", node.name)
            outputs.append(state.tensor)
            if before is not None and before in reads:
                pairs.append([state.tensor, before])
        for ref in self._on_device(node.outputs):
            old = self.storages.get(ref.storage)
            if ref.storage in read_storages or (old is not None and old.tensor in outputs):
                continue
            bytes_ = max(ref.extent, scratch.get(ref.storage, 0))
            tensor = self._tensor(bytes_, "activation", node.name)
            self.storages[ref.storage] = StorageState(bytes_, ref.itemsize, tensor)
            outputs.append(tensor)
            scratch.pop(ref.storage, None)
        reads = list(dict.fromkeys(reads))
        measured = self.cost(call)
        moved = sum(self.tensors[tensor]["bytes"] for tensor in (*reads, *outputs))
        from_host = any(ref.device != self.device for refs in node.inputs for ref in refs)
        collective = is_collective(node.name)
        self.ops.append(
            {
                "id": len(self.ops),
                "name": node.name,
                "phase": call.phase,
                "inputs": reads,
                "outputs": outputs,
                "cost_us": moved / 1e6 if measured is None else measured,  # a terabyte per second
                "workspace_bytes": sum(scratch.values()),
                "recomputable": not (collective or (from_host and base_name(node.name) == "copy_")),
                "rng": is_random(node.name),
                "mutates": list(dict.fromkeys(mutates)),
                "inplace": pairs,
                "source": f"{call.scope}, node {node.id}",
            }
        )

    def _overwritten(self, node: Node, ref: Ref) -> bool:
        """True if an op overwrites all of a storage without reading it."""
        fills = base_name(node.name) in ("zero_", "fill_", "copy_") or is_random(node.name)
        if not fills or ref is not mutated(node)[0]:
            return False
        state = self.storages.get(ref.storage)
        return state is not None and ref.begin == 0 and ref.bytes >= state.bytes

    def _scratch(self, call: Call, read_storages: set[Storage]) -> dict[Storage, int]:
        """Bytes allocated below an op, by storage; each address counts once."""
        found: dict[Storage, int] = {}
        for inner in call.subtree[1:]:
            if base_name(inner.node.name) not in (*ALLOCATIONS, "resize_"):
                continue
            for ref in self._on_device(inner.node.outputs):
                if ref.storage not in read_storages:
                    found[ref.storage] = max(found.get(ref.storage, 0), ref.extent)
                    self.storages[ref.storage] = StorageState(found[ref.storage], ref.itemsize)
        return found

    def _state(self, ref: Ref, node: Node) -> StorageState:
        """State of a tensor's storage; one that no node allocated is a resident tensor."""
        state = self.storages.get(ref.storage)
        # Python scalars become tensors without an allocation, at addresses of earlier storages.
        scalar = ref.numel == 1 and state is not None and ref.itemsize != state.itemsize
        if state is None or scalar:
            tensor = self._tensor(ref.extent, "parameter", f"s{ref.storage[1]} of node {node.id}")
            state = StorageState(ref.extent, ref.itemsize, tensor, resident=True)
            self.storages[ref.storage] = state
        elif state.resident and ref.tensor not in self.expanded and ref.extent > state.bytes:
            assert state.tensor is not None
            state.bytes = ref.extent
            self.tensors[state.tensor]["bytes"] = ref.extent
        return state

    def _read(self, ref: Ref, node: Node) -> int:
        state = self._state(ref, node)
        if state.tensor is None:  # allocated, and read before all of it was written
            state.tensor = self._tensor(state.bytes, "activation", "aten::empty")
            self.ops.append(
                {
                    "id": len(self.ops),
                    "name": "aten::empty",
                    "inputs": [],
                    "outputs": [state.tensor],
                    "cost_us": 0.0,
                    "recomputable": False,  # its writer is not in the trace
                    "source": f"before node {node.id}",
                }
            )
        return state.tensor

    def _tensor(self, bytes_: int, kind: str, name: str) -> int:
        self.tensors.append({"id": len(self.tensors), "name": name, "bytes": bytes_, "kind": kind})
        return len(self.tensors) - 1
