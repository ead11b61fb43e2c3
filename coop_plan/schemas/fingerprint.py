"""Structural fingerprint and cost signature of a graph, the two keys of cached plans."""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator

import msgspec

from coop_plan.schemas.graph import Graph, Op, Tensor, Variant


def digest_of(document: bytes) -> str:
    """Returns `sha256:…` of a document's bytes: the name under which a server keeps a graph."""
    return f"sha256:{hashlib.sha256(document).hexdigest()}"


def fingerprint(graph: Graph) -> str:
    """`sha256:…` of the structure: op targets, edges, sizes, kinds, flags.

    Ids are replaced by the order of first appearance. Names of tensors and of the graph, the device
    and the costs are left out, so all ranks of a job compute the same value.
    """
    by_id = {tensor.id: tensor for tensor in graph.tensors}
    number = {t: position for position, t in enumerate(tensor_order(graph))}
    numbers = number.__getitem__

    def shape(tensor: Tensor) -> list[object]:
        return [tensor.kind, tensor.bytes, *(["movable"] if tensor.movable else [])]

    def pairs(variant: Op | Variant) -> list[list[int]]:
        return sorted([number[a], number[b]] for a, b in variant.inplace)

    ops = (
        [
            op.name,
            op.phase,
            [*map(numbers, op.inputs)],
            [*map(numbers, op.outputs)],
            op.workspace_bytes,
            op.recomputable,
            op.rng,
            sorted(map(numbers, op.mutates)),
            pairs(op) if op.inplace else [],
            [
                [
                    v.name,
                    v.workspace_bytes,
                    v.approximate,
                    pairs(v),
                    [*map(numbers, v.inputs)],
                    [*map(numbers, v.outputs)],
                    *(["host"] if v.engine == "host" else []),
                ]
                for v in op.variants
            ],
        ]
        for op in graph.ops
    )
    unused = sorted(shape(t) for t in graph.tensors if t.id not in number)
    return _digest(graph.schema_, ops, (shape(by_id[t]) for t in number), unused)


def tensor_order(graph: Graph) -> list[int]:
    """Ids of the tensors that ops use, in the order of first appearance."""
    order: dict[int, None] = {}
    for op in graph.ops:
        for tensor in op.inputs:
            order[tensor] = None
        for tensor in op.outputs:
            order[tensor] = None
        for variant in op.variants:
            order.update(dict.fromkeys(variant.inputs))
            order.update(dict.fromkeys(variant.outputs))
    return list(order)


def cost_signature(graph: Graph) -> str:
    """`sha256:…` of op costs, bandwidths and launches, each rounded to the nearest power of two.

    Two measurements of one machine mostly have equal signatures. If they differ, a cached plan's
    cost figures are for other costs; the plan stays valid.
    """
    costs = (
        [
            round(math.log2(c)) if c > 0 else None
            for c in (op.cost_us, *(v.cost_us for v in op.variants))
        ]
        for op in graph.ops
    )
    device = graph.device
    rates = [device.d2h_bytes_per_s, device.h2d_bytes_per_s] if device.linked else []
    launches = [device.launch_us, *([device.copy_launch_us] if device.linked else [])]
    powers = (round(math.log2(us)) if us else None for us in launches)
    own = [device.is_host, *powers] if any(launches) else []
    return _digest(costs, *(round(math.log2(rate)) for rate in rates), *own)


_LITERAL = re.compile(rb"[ -\[\]-~]*")
"""Text that every JSON encoder writes unescaped: printable ASCII without the backslash."""


PART = 256
"""Entries of a list that are encoded at once."""


def _digest(*members: object) -> str:
    """Digest of the JSON array of `members`; iterators are lists, of which a part is in memory."""
    found = hashlib.sha256()
    for place, member in enumerate(members):
        found.update(b"," if place else b"[")
        if not isinstance(member, Iterator):
            found.update(_encoded(member))
            continue
        separator = b"["
        while part := list(itertools.islice(member, PART)):
            found.update(separator + _encoded(part)[1:-1])
            separator = b","
        found.update(b"[]" if separator == b"[" else b"]")
    found.update(b"]")
    return f"sha256:{found.hexdigest()}"


def _encoded(document: object) -> bytes:
    data = msgspec.json.encode(document)
    if not _LITERAL.fullmatch(data):  # libraries escape other characters differently
        data = json.dumps(document, separators=(",", ":"), ensure_ascii=True).encode()
    return data
