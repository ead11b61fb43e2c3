"""Reader of the nodes of PyTorch's execution traces (`torch.profiler.ExecutionTraceObserver`).

The format is in `torch/csrc/profiler/standalone/execution_trace_observer.cpp`. A node is one scope
of `RecordFunction`: an operator, or a frame around operators. Ids ascend by start, so that of a
parent is smaller. From schema 1.0.2-chakra on, values and shapes are in one object and small fields
in `attrs`; before, they are fields of the node.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from coop_plan.schemas.errors import InvalidInputError


@dataclass(frozen=True)
class Ref:
    """A tensor argument or result; `extent` is the end of the tensor in its storage, bytes."""

    tensor: int
    storage: tuple[str, int]
    """Device and number; numbers stand for addresses, which later storages use again."""
    extent: int
    numel: int
    begin: int
    itemsize: int

    @property
    def device(self) -> str:
        return self.storage[0]

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Node:
    """One record of the trace; `inputs[i]` are the tensors in argument i."""

    id: int
    name: str
    parent: int
    inputs: list[list[Ref]]
    outputs: list[Ref]
    schema: str
    record: int
    """The profiler's number (`rf_id`), which a Kineto trace of the same run has as well."""
    place: str
    """JSON pointer of the record."""


def read_nodes(document: Any) -> list[Node]:
    """Nodes of a decoded trace in program order; raises `InvalidInputError` with the bad node."""
    if not isinstance(document, dict) or not isinstance(document.get("nodes"), list):
        raise InvalidInputError(
            "not an execution trace: there is no list `nodes`; record one with"
            " torch.profiler.ExecutionTraceObserver",
            "/nodes",
        )
    nodes: dict[int, Node] = {}
    for position, raw in enumerate(document["nodes"]):
        node = _node(raw, f"/nodes/{position}")
        if node.id in nodes:
            raise InvalidInputError(f"two nodes have the id {node.id}", f"{node.place}/id")
        nodes[node.id] = node
    found = [nodes[number] for number in sorted(nodes)]
    for node in found[1:]:  # the first node, the process, is its own parent
        if node.parent == node.id:
            raise InvalidInputError(f"node {node.id} is its own parent", f"{node.place}/ctrl_deps")
    return found


def _node(raw: Any, place: str) -> Node:
    if not isinstance(raw, dict):
        raise InvalidInputError("a node must be an object", place)
    fields = dict(raw)
    attributes = raw.get("attrs", [])
    if not isinstance(attributes, list):
        raise InvalidInputError("attrs must be a list", f"{place}/attrs")
    for number, attribute in enumerate(attributes):
        if not isinstance(attribute, dict) or "name" not in attribute:
            raise InvalidInputError(
                "an attribute must be an object with a name", f"{place}/attrs/{number}"
            )
        fields.setdefault(str(attribute["name"]), attribute.get("value"))
    name = fields.get("name")
    if not isinstance(name, str) or not _is_text(name):
        raise InvalidInputError("a node must have a name, a text in UTF-8", f"{place}/name")
    own = _number(fields, "id", place)
    parent = _number(fields, "ctrl_deps" if "ctrl_deps" in fields else "parent", place)
    if parent > own:
        message = f"node {own} ({name[:60]}) has the parent {parent}, which starts later"
        raise InvalidInputError(message, f"{place}/ctrl_deps")
    inputs = list(_arguments(fields, "input", own, place))
    outputs = [ref for refs in _arguments(fields, "output", own, place) for ref in refs]
    return Node(
        id=own,
        name=name,
        parent=parent,
        inputs=inputs,
        outputs=outputs,
        schema=str(fields.get("op_schema") or ""),
        record=_number(fields, "rf_id", place, 0),
        place=place,
    )


def _is_text(name: str) -> bool:
    """True if the text can be encoded; JSON can contain unpaired surrogates, which cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number(fields: dict[str, Any], name: str, place: str, default: int | None = None) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidInputError(
            f"{name} must be an integer of at least 0, not {json.dumps(value)}", f"{place}/{name}"
        )
    return value


def _arguments(fields: dict[str, Any], which: str, own: int, place: str) -> Iterator[list[Ref]]:
    """The tensors in each argument or result."""
    at = f"{place}/{which}s"
    found = fields.get(f"{which}s", [])
    if isinstance(found, dict):
        values, types = found.get("values"), found.get("types")
        shapes, strides = found.get("shapes"), found.get("strides")
        at += "/values"
    else:
        values, types = found, fields.get(f"{which}_types")
        shapes, strides = fields.get(f"{which}_shapes"), None
    if not isinstance(values, list) or not isinstance(types, list) or len(values) != len(types):
        raise InvalidInputError(f"node {own}: its {which}s must have as many values as types", at)
    for index, (value, kind) in enumerate(zip(values, types, strict=True)):
        layout = (_item(shapes, index), _item(strides, index))
        if "Tensor(" not in str(kind):
            yield []
        elif str(kind).startswith("Tensor("):
            yield list(_ref(value, layout, own, f"{at}/{index}"))
        elif isinstance(value, list):
            yield [
                ref
                for number, item in enumerate(value)
                if isinstance(item, list)
                for ref in _ref(
                    item,
                    (_item(layout[0], number), _item(layout[1], number)),
                    own,
                    f"{at}/{index}/{number}",
                )
            ]
        else:
            raise InvalidInputError(f"node {own}: a {kind} must be a list", f"{at}/{index}")


def _item(values: Any, index: int) -> Any:
    return values[index] if isinstance(values, list) and index < len(values) else None


def _ref(value: Any, layout: tuple[Any, Any], own: int, place: str) -> Iterator[Ref]:
    """The tensor; none for undefined and empty ones, which all have the address 0.

    `value` is [tensor id, storage id, offset, number of elements, bytes of one, device]; `layout`
    is its shape and strides, if recorded.
    """
    numbers = value[:5] if isinstance(value, list) and len(value) == 6 else []
    integers = all(type(number) is int and number >= 0 for number in numbers)
    if not numbers or not integers or not isinstance(value[5], str):
        message = (
            f"node {own}: a tensor must be [tensor id, storage id, offset, elements, bytes of one,"
            f" device], not {json.dumps(value)[:80]}"
        )
        raise InvalidInputError(message, place)
    tensor, storage, offset, numel, itemsize = numbers
    if storage == 0 or numel == 0 or itemsize == 0:
        return
    if not re.fullmatch(r"[a-z_]+(:\d+)?", value[5]):
        raise InvalidInputError(
            f"node {own}: not a device: {json.dumps(value[5])[:80]}", f"{place}/5"
        )
    extent = (offset + _span(layout[0], layout[1], numel)) * itemsize
    most = 1 << 60  # as of the sum of a graph's sizes
    if extent < 0 or max(extent, numel * itemsize) >= most:
        message = f"node {own}: its offset, shape and strides exceed {most} bytes"
        raise InvalidInputError(message, place)
    yield Ref(
        tensor=tensor,
        storage=(value[5], storage),
        extent=extent,
        numel=numel,
        begin=offset,
        itemsize=itemsize,
    )


def _span(shape: Any, strides: Any, numel: int) -> int:
    """Elements of storage from a tensor's first to its last; fewer than `numel` if expanded."""
    if not isinstance(shape, list) or not isinstance(strides, list) or len(shape) != len(strides):
        return numel
    if not all(type(number) is int for number in (*shape, *strides)):
        return numel
    steps = zip(shape, strides, strict=True)
    return 1 + sum(int((size - 1) * max(0, stride)) for size, stride in steps)
