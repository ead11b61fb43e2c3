"""
A graph of an execution trace: which tensor each op reads and makes.

A storage's number stands for an address, which others get later. A storage begins where an
allocation or an op returns it that did not take it, and what was read before it was made is
resident. What is overwritten in place is a new tensor that may take the old one's address.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from coop_plan.planner.importers.kineto import Times
from coop_plan.planner.importers.nodes import Node, Ref, read_nodes
from coop_plan.planner.importers.operators import (
    ALLOCATIONS,
    COLLECTIVES,
    OVERWRITERS,
    RANDOM,
    Storage,
    Work,
    base_name,
    chosen,
    last_step,
    main_device,
    mutated,
    only_shape,
    operators,
    set_phases,
)
from coop_plan.schemas import Graph, parse_graph
from coop_plan.schemas.errors import InvalidInputError

BYTES_PER_US = 1e6
"""What an op without a time moves: a terabyte a second."""


@dataclass(frozen=True)
class Imported:
    """A graph, and how many of its ops have a measured time."""

    graph: Graph
    timed: int
    steps: int
    """Steps in the trace; the graph is of the last whole one."""


@dataclass
class Life:
    """One storage from its beginning on."""

    bytes: int
    itemsize: int
    tensor: int | None = None
    """The tensor that is in it now; None until something is written."""
    resident: bool = False


def import_trace(document: Any, kineto: Any = None, name: str = "") -> Imported:
    """
    The graph of a decoded execution trace of one training step.

    Costs in µs are those of the decoded `kineto` trace; an op that it lacks costs the bytes that it
    reads and makes at a terabyte a second. Gradients that are accumulated, and the loss that the
    backward begins with, leave the step.

    Raises:
        InvalidInputError: with the JSON pointer of the fault in `document`. A fault of `kineto`
            has `source` "kineto".
    """
    nodes = read_nodes(document)
    device = main_device(nodes)
    works, steps = last_step(operators(nodes, device))
    set_phases(works)
    order = chosen(works)
    ops = [work for work in order if work.is_op]
    if not ops:
        raise InvalidInputError(f"no operator ran on {device}", "/nodes")
    times: list[float | None] = [None] * len(ops)
    if kineto is not None:
        try:
            times = Times(kineto).of(works, ops)
            if all(micros is None for micros in times):
                raise InvalidInputError(
                    "no operator of it is one of the execution trace's: it is of another script",
                    "/traceEvents",
                )
        except InvalidInputError as error:
            raise InvalidInputError(error.message, error.pointer, "kineto") from None
    cost = {work.node.id: micros for work, micros in zip(ops, times, strict=True)}
    made = _Builder(device, lambda work: cost[work.node.id])
    for work in order:
        made.visit(work)
    graph = {
        "schema": "coop-plan/graph/1",
        "name": name,
        "device": {"kind": device.split(":")[0], "name": device},
        "tensors": made.finished_tensors(),
        "ops": made.ops,
    }
    timed = sum(micros is not None for micros in times)
    try:
        return Imported(parse_graph(graph), timed, steps)
    except InvalidInputError as error:  # its place is one of the graph, which nobody has seen
        raise InvalidInputError(f"no graph can be made of it: {error.message}", "/nodes") from None


@dataclass
class _Builder:
    """Follows the storages through the ops, in program order."""

    device: str
    cost: Callable[[Work], float | None]
    tensors: list[dict[str, Any]] = field(default_factory=list)
    ops: list[dict[str, Any]] = field(default_factory=list)
    lives: dict[Storage, Life] = field(default_factory=dict)
    expanded: set[int] = field(default_factory=set)
    leaving: list[Life] = field(default_factory=list)
    loss: Life | None = None
    accumulating: set[int] = field(default_factory=set)

    def visit(self, work: Work) -> None:
        node = work.node
        if node.parent in self.accumulating or node.name == "torch::autograd::AccumulateGrad":
            self.accumulating.add(node.id)
        if work.is_op:
            self._op(work)
        elif base_name(node.name) in ALLOCATIONS:
            for ref in self._here(node.outputs):
                self.lives[ref.storage] = Life(ref.extent, ref.itemsize)
        elif base_name(node.name) == "resize_":
            for ref in self._here(node.outputs):
                life = self.lives.setdefault(ref.storage, Life(ref.extent, ref.itemsize))
                if life.tensor is None:
                    life.bytes = ref.extent
        if base_name(node.name).startswith(("expand", "broadcast_to")):
            self.expanded.update(ref.tensor for ref in node.outputs)
        if node.name == "aten::ones_like" and work.phase == "forward":
            given = [ref for refs in node.inputs for ref in self._here(refs)]
            self.loss = self.lives.get(given[0].storage) if given else self.loss
        if node.id in self.accumulating and (work.is_op or node.name == "aten::detach"):
            self.leaving += [
                self.lives[ref.storage]
                for ref in self._here(node.outputs)
                if ref.storage in self.lives
            ]

    def finished_tensors(self) -> list[dict[str, Any]]:
        """All tensors; what leaves the step is what its storage held last."""
        for life in (*self.leaving, *([self.loss] if self.loss is not None else [])):
            if life.tensor is not None and not life.resident:
                self.tensors[life.tensor]["kind"] = "output"
        return self.tensors

    def _here(self, refs: list[Ref]) -> list[Ref]:
        return [ref for ref in refs if ref.device == self.device]

    def _op(self, work: Work) -> None:
        node = work.node
        given = [ref for refs in node.inputs for ref in self._here(refs)]
        taken = {ref.storage for ref in given}
        changed = {ref.storage: ref for ref in self._here(mutated(node))}
        reads: list[int] = []
        for ref in given:
            if only_shape(node.name) or (ref.storage in changed and self._overwritten(node, ref)):
                continue
            reads.append(self._read(ref, node))
        scratch = self._scratch(work, taken)
        mutates: list[int] = []
        outputs: list[int] = []
        pairs: list[list[int]] = []
        for ref in changed.values():
            life = self._life(ref, node)
            if life.resident:
                assert life.tensor is not None
                reads.append(life.tensor)
                mutates.append(life.tensor)
                continue
            before = life.tensor
            life.tensor = self._tensor(life.bytes, "activation", node.name)
            outputs.append(life.tensor)
            if before is not None and before in reads:
                pairs.append([life.tensor, before])
        for ref in self._here(node.outputs):
            there = self.lives.get(ref.storage)
            if ref.storage in taken or (there is not None and there.tensor in outputs):
                continue
            bytes_ = max(ref.extent, scratch.get(ref.storage, 0))
            tensor = self._tensor(bytes_, "activation", node.name)
            self.lives[ref.storage] = Life(bytes_, ref.itemsize, tensor)
            outputs.append(tensor)
            scratch.pop(ref.storage, None)
        reads = list(dict.fromkeys(reads))
        measured = self.cost(work)
        moved = sum(self.tensors[tensor]["bytes"] for tensor in (*reads, *outputs))
        from_host = any(ref.device != self.device for refs in node.inputs for ref in refs)
        collective = node.name.startswith(COLLECTIVES)
        self.ops.append(
            {
                "id": len(self.ops),
                "name": node.name,
                "phase": work.phase,
                "inputs": reads,
                "outputs": outputs,
                "cost_us": moved / BYTES_PER_US if measured is None else measured,
                "workspace_bytes": sum(scratch.values()),
                "recomputable": not (collective or (from_host and base_name(node.name) == "copy_")),
                "rng": bool(RANDOM.search(base_name(node.name))),
                "mutates": list(dict.fromkeys(mutates)),
                "inplace": pairs,
                "source": f"node {node.id}",
            }
        )

    def _overwritten(self, node: Node, ref: Ref) -> bool:
        """Whether an op writes all of a storage without reading it."""
        if base_name(node.name) not in OVERWRITERS or ref is not mutated(node)[0]:
            return False
        life = self.lives.get(ref.storage)
        return life is not None and ref.begin == 0 and ref.bytes >= life.bytes

    def _scratch(self, work: Work, taken: set[Storage]) -> dict[Storage, int]:
        """What is allocated below an op, in bytes by storage; one address counts once."""
        found: dict[Storage, int] = {}
        for inner in work.subtree[1:]:
            if base_name(inner.node.name) not in (*ALLOCATIONS, "resize_"):
                continue
            for ref in self._here(inner.node.outputs):
                if ref.storage not in taken:
                    found[ref.storage] = max(found.get(ref.storage, 0), ref.extent)
                    self.lives[ref.storage] = Life(found[ref.storage], ref.itemsize)
        return found

    def _life(self, ref: Ref, node: Node) -> Life:
        """Where a tensor lies; what nothing made was there before the step."""
        life = self.lives.get(ref.storage)
        # Numbers of Python are tensors that no allocation shows, at addresses that others had.
        number = ref.numel == 1 and life is not None and ref.itemsize != life.itemsize
        if life is None or number:
            tensor = self._tensor(ref.extent, "parameter", f"s{ref.storage[1]} of node {node.id}")
            life = self.lives[ref.storage] = Life(ref.extent, ref.itemsize, tensor, resident=True)
        elif life.resident and ref.tensor not in self.expanded and ref.extent > life.bytes:
            assert life.tensor is not None
            life.bytes = ref.extent
            self.tensors[life.tensor]["bytes"] = ref.extent
        return life

    def _read(self, ref: Ref, node: Node) -> int:
        life = self._life(ref, node)
        if life.tensor is None:  # allocated, and read before all of it was written
            life.tensor = self._tensor(life.bytes, "activation", "aten::empty")
            self.ops.append(
                {
                    "id": len(self.ops),
                    "name": "aten::empty",
                    "inputs": [],
                    "outputs": [life.tensor],
                    "cost_us": 0.0,
                    "recomputable": False,  # who wrote it is not in the trace
                    "source": f"before node {node.id}",
                }
            )
        return life.tensor

    def _tensor(self, bytes_: int, kind: str, name: str) -> int:
        self.tensors.append({"id": len(self.tensors), "name": name, "bytes": bytes_, "kind": kind})
        return len(self.tensors) - 1
