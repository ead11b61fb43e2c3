"""What two graphs share: the structural fingerprint, and apart from it the cost signature."""

import hashlib
import json
import math

from coop_plan.schemas.graph import Graph, Op, Tensor, Variant


def fingerprint(graph: Graph) -> str:
    """
    `sha256:…` over the structure: op targets, edges, sizes, kinds, flags.

    Ids are replaced by the order of first appearance; tensor names, the graph's name, the device
    and the costs do not enter, so every rank of one job gets the same value.
    """
    by_id = {tensor.id: tensor for tensor in graph.tensors}
    number = {t: position for position, t in enumerate(tensor_order(graph))}

    def shape(tensor: Tensor) -> list[object]:
        return [tensor.kind, tensor.bytes, *(["movable"] if tensor.movable else [])]

    def pairs(form: Op | Variant) -> list[list[int]]:
        return sorted([number[a], number[b]] for a, b in form.inplace)

    ops = [
        [
            op.name,
            op.phase,
            [number[t] for t in op.inputs],
            [number[t] for t in op.outputs],
            op.workspace_bytes,
            op.recomputable,
            op.rng,
            sorted(number[t] for t in op.mutates),
            pairs(op),
            [
                [
                    v.name,
                    v.workspace_bytes,
                    v.approximate,
                    pairs(v),
                    [number[t] for t in v.inputs],
                    [number[t] for t in v.outputs],
                ]
                for v in op.variants
            ],
        ]
        for op in graph.ops
    ]
    untouched = sorted(shape(t) for t in graph.tensors if t.id not in number)
    return _digest([graph.schema_, ops, [shape(by_id[t]) for t in number], untouched])


def tensor_order(graph: Graph) -> list[int]:
    """Ids of the tensors that ops name, in the order of first appearance."""
    order: dict[int, None] = {}
    for op in graph.ops:
        order.update(dict.fromkeys(op.inputs))
        order.update(dict.fromkeys(op.outputs))
        for variant in op.variants:
            order.update(dict.fromkeys(variant.inputs))
            order.update(dict.fromkeys(variant.outputs))
    return list(order)


def cost_signature(graph: Graph) -> str:
    """
    `sha256:…` over the op costs, each rounded to the nearest power of two µs, and the bandwidths.

    Two measurements of the same machine mostly agree in it; it tells whether a cached plan's cost
    figures were made with costs like these. It is no part of a plan's validity.
    """
    costs = [
        [
            round(math.log2(c)) if c > 0 else None
            for c in (op.cost_us, *(v.cost_us for v in op.variants))
        ]
        for op in graph.ops
    ]
    device = graph.device
    rates = [device.d2h_bytes_per_s, device.h2d_bytes_per_s] if device.linked else []
    return _digest([costs, *(round(math.log2(rate)) for rate in rates)])


def _digest(document: object) -> str:
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
