"""Contract of `coop-plan/graph/1`: the profiled graph of one training step.

Sizes are bytes, costs µs. Ids are any distinct integers from 0; edges refer to them. `parse_graph`
and `load_graph` raise `InvalidInputError` with the JSON pointer of the first fault.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from coop_plan.schemas import _parse
from coop_plan.schemas._parse import INT64_MAX, Model
from coop_plan.schemas.errors import InvalidInputError

MAX_MICROS = 1e15
"""Upper limit of an op's cost, thirty years: float sums of costs stay exact enough to compare."""

MAX_TOTAL = 1 << 60
"""Upper limit of the sum of all sizes: rounded up and added by searches it fits into int64."""

FUSED_NAME = "coop_plan.fused_"
"""Beginning of an op's name that is a fused region; a digest of its code and layouts follows."""

Id = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Bytes = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Micros = Annotated[float, Meta(ge=0, le=MAX_MICROS)]
Rate = Annotated[float, Meta(ge=0, le=1e30)]

TensorKind = Literal["parameter", "buffer", "input", "constant", "activation", "output"]
RESIDENT: frozenset[str] = frozenset({"parameter", "buffer", "input", "constant"})
"""Kinds of tensors that exist before the step and occupy memory, unmoved, throughout it."""


class Device(Model, frozen=True):
    """The device that the graph was profiled on.

    Bandwidths are bytes per second; 0 means no copy engine in that direction, hence no transfers.
    Every copy takes `copy_latency_us` in addition to its bytes over the bandwidth. The host
    launches ops and copies one after another, an op in `launch_us`, a copy or an update on the host
    in `copy_launch_us`.
    """

    kind: str = "cpu"
    name: str = ""
    memory_bytes: Bytes = 0
    h2d_bytes_per_s: Rate = 0.0
    d2h_bytes_per_s: Rate = 0.0
    copy_latency_us: Micros = 0.0
    launch_us: Micros = 0.0
    copy_launch_us: Micros = 0.0

    @property
    def is_host(self) -> bool:
        """True if the device is the host's processor: it launches nothing while it computes."""
        return self.kind == "cpu"

    @property
    def launch_ahead_us(self) -> float:
        """Time in which the host launches an op ahead of the device, µs; 0 if it cannot."""
        return 0.0 if self.is_host else self.launch_us

    def run_us(self, cost_us: float) -> float:
        """Time of a run of this cost on the device, µs: on the host's processor with its launch."""
        return cost_us + self.launch_us if cost_us and self.is_host else cost_us

    @property
    def linked(self) -> bool:
        """True if there are copy engines in both directions."""
        return self.d2h_bytes_per_s > 0 and self.h2d_bytes_per_s > 0

    def with_link(self, bytes_per_s: float | None) -> "Device":
        """The device with this bandwidth in both directions; unchanged for None."""
        if bytes_per_s is None:
            return self
        rate = float(bytes_per_s)
        return self.model_copy(update={"h2d_bytes_per_s": rate, "d2h_bytes_per_s": rate})


class Tensor(Model, frozen=True, kw_only=True):
    """One storage (an allocation), never a view; `bytes` is its exact size.

    A resident tensor with `movable` may be on the host between its uses.
    """

    id: Id
    name: str = ""
    bytes: Bytes
    kind: TensorKind
    movable: bool = False

    @property
    def resident(self) -> bool:
        """True if the tensor exists before the step and is never moved."""
        return self.kind in RESIDENT


Pairs = list[Annotated[list[Id], Meta(min_length=2, max_length=2)]]


class Variant(Model, frozen=True, kw_only=True):
    """Another implementation of an op (MONeT, ICLR 2021, section 4.2).

    It has its own inputs, outputs, cost, workspace and in-place pairs. It may produce tensors that
    only variants of other ops read, and omit tensors that only default variants read. A tensor has
    the same size in all variants that produce it; a result of another size is another tensor. Its
    results are bitwise equal to the default variant's unless it is `approximate`.

    A variant on the engine "host" is an update that the host's processor computes: it reads copies
    and residents on the host, overwrites residents there, and has no outputs and no workspace. The
    residents that it uses are movable.
    """

    name: str
    cost_us: Micros
    workspace_bytes: Bytes = 0
    inputs: list[Id]
    outputs: list[Id]
    inplace: Pairs = []
    approximate: bool = False
    engine: Literal["device", "host"] = "device"


class Op(Model, frozen=True, kw_only=True):
    """One operator; `name` is its target, for example `aten.addmm.default`.

    `inputs` and `outputs` are tensor ids in the order of the target's arguments and results.
    `mutates` lists inputs that the op overwrites, `inplace` the [output, input] pairs that may
    share one address. An op that is not `recomputable` runs exactly once; `rng` marks one that
    draws random numbers. `source` is for people: module path and `file:line` of the op's origin.
    """

    id: Id
    name: str
    phase: Literal["forward", "backward", "optimizer"] = "forward"
    inputs: list[Id]
    outputs: list[Id]
    cost_us: Micros
    workspace_bytes: Bytes = 0
    recomputable: bool = True
    rng: bool = False
    mutates: list[Id] = []
    inplace: Pairs = []
    variants: list[Variant] = []
    source: str = ""


class Graph(Model, frozen=True, kw_only=True):
    """A profiled training step. `ops` are in program order, a topological order."""

    schema_: Literal["coop-plan/graph/1"] = field(name="schema")
    name: str = ""
    device: Device = Device()
    tensors: list[Tensor]
    ops: list[Op]

    def __post_init__(self) -> None:
        """Raise `InvalidInputError` if ids, edges and the order of ops are inconsistent."""
        _check_structure(self)


def parse_graph(document: str | bytes | dict[str, Any], source: str = "") -> Graph:
    """Graph from JSON text or a decoded object.

    Raises:
        InvalidInputError: the first fault and its JSON pointer.
    """
    return _parse.parse(Graph, document, source)


def load_graph(path: Path | str) -> Graph:
    """Graph from a file; raises `InvalidInputError` as `parse_graph` does."""
    return _parse.read(Graph, path)


def _check_structure(graph: Graph) -> None:
    tensors: dict[int, Tensor] = {}
    for position, tensor in enumerate(graph.tensors):
        if tensor.id in tensors:
            raise InvalidInputError(f"duplicate tensor id {tensor.id}", f"/tensors/{position}/id")
        tensors[tensor.id] = tensor
    op_ids: set[int] = set()
    producer: dict[int, int] = {}
    for position, op in enumerate(graph.ops):
        at = f"/ops/{position}"
        if op.id in op_ids:
            raise InvalidInputError(f"duplicate op id {op.id}", f"{at}/id")
        op_ids.add(op.id)
        _check_ids(op, at, tensors)
        for index, tensor_id in enumerate(op.outputs):
            place = f"{at}/outputs/{index}"
            if tensors[tensor_id].resident:
                kind = tensors[tensor_id].kind
                article = "an" if kind == "input" else "a"
                raise InvalidInputError(
                    f"op {op.id} produces tensor {tensor_id}, {article} {kind}, which exists before"
                    " the step (list it in `mutates` if it is overwritten)",
                    place,
                )
            if tensor_id in producer:
                first = graph.ops[producer[tensor_id]].id
                raise InvalidInputError(
                    f"tensor {tensor_id} is produced twice, by op {first} and op {op.id}", place
                )
            producer[tensor_id] = position
    _check_order(graph, tensors, producer)
    _check_variants(graph, tensors, producer)
    for position, tensor in enumerate(graph.tensors):
        if tensor.kind == "output" and tensor.id not in producer:
            raise InvalidInputError(
                f"output tensor {tensor.id} is produced by no op", f"/tensors/{position}"
            )
    total = sum(tensor.bytes for tensor in graph.tensors)
    for op in graph.ops:
        total += max(op.workspace_bytes, *(v.workspace_bytes for v in op.variants), 0)
    if total > MAX_TOTAL:
        message = f"the sizes add up to more than {MAX_TOTAL} bytes (1 EiB)"
        raise InvalidInputError(message, "/tensors")


def _check_ids(op: Op, at: str, tensors: dict[int, Tensor]) -> None:
    inputs, outputs = set(op.inputs), set(op.outputs)
    if not (op.mutates or op.inplace or op.variants) and tensors.keys() >= inputs | outputs:
        return  # the fast path of most ops
    lists = [("inputs", op.inputs), ("outputs", op.outputs), ("mutates", op.mutates)]
    for number, variant in enumerate(op.variants):
        lists.append((f"variants/{number}/inputs", variant.inputs))
        lists.append((f"variants/{number}/outputs", variant.outputs))
        for index, pair in enumerate(variant.inplace):
            lists.append((f"variants/{number}/inplace/{index}", pair))
    for number, pair in enumerate(op.inplace):
        lists.append((f"inplace/{number}", pair))
    for field_name, ids in lists:
        for index, tensor_id in enumerate(ids):
            if tensor_id not in tensors:
                raise InvalidInputError(
                    f"op {op.id} refers to the unknown tensor {tensor_id}: list it in `tensors`",
                    f"{at}/{field_name}/{index}",
                )
    for index, tensor_id in enumerate(op.mutates):
        if tensor_id not in inputs:
            raise InvalidInputError(
                f"op {op.id} mutates tensor {tensor_id}, which is not among its inputs",
                f"{at}/mutates/{index}",
            )
    variants: list[tuple[str, Op | Variant]] = [(at, op)]
    variants += [(f"{at}/variants/{number}", v) for number, v in enumerate(op.variants)]
    for place, owner in variants:
        reads, makes = set(owner.inputs), set(owner.outputs)
        for index, (output, source) in enumerate(owner.inplace):
            if output not in makes or source not in reads:
                raise InvalidInputError(
                    f"op {op.id}: an in-place pair is [output, input] of the op itself, not"
                    f" [{output}, {source}]",
                    f"{place}/inplace/{index}",
                )


def _check_order(graph: Graph, tensors: dict[int, Tensor], producer: dict[int, int]) -> None:
    resident = {tensor.id for tensor in tensors.values() if tensor.resident}
    for position, op in enumerate(graph.ops):
        for index, tensor_id in enumerate(op.inputs):
            made = producer.get(tensor_id)
            if tensor_id in resident or (made is not None and made < position):
                continue
            place = f"/ops/{position}/inputs/{index}"
            if made is None:
                raise InvalidInputError(
                    f"op {op.id} reads tensor {tensor_id}, which no op produces", place
                )
            later = graph.ops[made].id
            if made == position or _reaches(graph, producer, position, made):
                raise InvalidInputError(
                    f"a cycle: op {op.id} reads tensor {tensor_id} of op {later},"
                    f" which depends on op {op.id}",
                    place,
                )
            raise InvalidInputError(
                f"op {op.id} reads tensor {tensor_id} before op {later} produces it"
                " (ops must be in program order)",
                place,
            )


def _check_variants(graph: Graph, tensors: dict[int, Tensor], producer: dict[int, int]) -> None:
    """Check that variants read tensors of earlier ops and produce tensors of their own op alone."""
    variant_producer: dict[int, int] = {}
    for position, op in enumerate(graph.ops):
        names: set[str] = set()
        for number, variant in enumerate(op.variants):
            at = f"/ops/{position}/variants/{number}"
            if variant.name in names:
                raise InvalidInputError(
                    f"op {op.id} has two variants named '{variant.name}'", f"{at}/name"
                )
            names.add(variant.name)
            for index, tensor_id in enumerate(variant.inputs):
                made = producer.get(tensor_id, variant_producer.get(tensor_id, position))
                if made >= position and not tensors[tensor_id].resident:
                    raise InvalidInputError(
                        f"variant '{variant.name}' of op {op.id} reads tensor {tensor_id}, which"
                        " no earlier op produces",
                        f"{at}/inputs/{index}",
                    )
            own: set[int] = set()
            for index, tensor_id in enumerate(variant.outputs):
                owner = producer.get(tensor_id, variant_producer.get(tensor_id, position))
                if tensors[tensor_id].resident or owner != position:
                    raise InvalidInputError(
                        f"variant '{variant.name}' of op {op.id} produces tensor {tensor_id},"
                        " which is resident or another op's",
                        f"{at}/outputs/{index}",
                    )
                if tensor_id in own:
                    raise InvalidInputError(
                        f"variant '{variant.name}' of op {op.id} produces tensor {tensor_id} twice",
                        f"{at}/outputs/{index}",
                    )
                own.add(tensor_id)
            if variant.engine == "host":
                _check_host_variant(op, variant, at, tensors)
        for variant in op.variants:
            for tensor_id in variant.outputs:
                variant_producer.setdefault(tensor_id, position)


def _check_host_variant(op: Op, variant: Variant, at: str, tensors: dict[int, Tensor]) -> None:
    """Check that a variant on the host needs no memory of the device."""
    name = f"variant '{variant.name}' of op {op.id} is on the host"
    if op.outputs or variant.outputs:
        raise InvalidInputError(f"{name}, where an op has no outputs", f"{at}/outputs")
    if variant.workspace_bytes:
        raise InvalidInputError(f"{name}: it has no workspace_bytes", f"{at}/workspace_bytes")
    for index, tensor_id in enumerate(variant.inputs):
        tensor = tensors[tensor_id]
        fixed = tensor.resident and not tensor.movable
        if fixed or (tensor_id in op.mutates and not tensor.resident):
            message = f"{name} and uses tensor {tensor_id}, which is no movable resident"
            raise InvalidInputError(message, f"{at}/inputs/{index}")


def _reaches(graph: Graph, producer: dict[int, int], start: int, goal: int) -> bool:
    """True if the op at `goal` depends on the op at `start`; the order of ops is ignored."""
    seen = {goal}
    stack = [goal]
    while stack:
        for tensor_id in graph.ops[stack.pop()].inputs:
            made = producer.get(tensor_id)
            if made == start:
                return True
            if made is not None and made not in seen:
                seen.add(made)
                stack.append(made)
    return False
