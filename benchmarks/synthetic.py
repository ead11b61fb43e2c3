"""Deep GPT training steps and iterations of any length, op by op, with costs from a roofline."""

from typing import Any

from coop_plan.schemas import Graph, Op, Tensor, Variant, parse_graph

FLOPS_PER_US, BYTES_PER_US = 150e6, 1.2e6
"""About what an A100 reaches in bf16."""

HOST_BYTES_PER_US = 100e3
"""Half of what eight channels of DDR4-3200 have (25.6 GB/s each): one socket of its host."""


class Builder:
    """Collects tensors and ops; costs are the larger of compute and traffic."""

    def __init__(self) -> None:
        self.tensors: list[dict[str, Any]] = []
        self.ops: list[dict[str, Any]] = []
        self.phase = "forward"

    def tensor(self, size: int, kind: str = "activation") -> int:
        self.tensors.append({"id": len(self.tensors), "bytes": size, "kind": kind})
        return len(self.tensors) - 1

    def op(
        self, name: str, inputs: list[int], *sizes: int, flops: float = 0.0, **fields: Any
    ) -> list[int]:
        """Append an op that makes tensors of these sizes (bytes); returns their ids."""
        kind = fields.pop("kind", "activation")
        inplace = fields.pop("inplace", False)
        outputs = [self.tensor(size, kind) for size in sizes]
        traffic = sum(self.tensors[t]["bytes"] for t in {*inputs, *outputs})
        cost = max(flops / FLOPS_PER_US, traffic / BYTES_PER_US)
        if inplace:
            fields["inplace"] = [[outputs[0], inputs[0]]]
        about = {"id": len(self.ops), "name": name, "phase": self.phase, "cost_us": cost}
        self.ops.append({**about, "inputs": inputs, "outputs": outputs, **fields})
        return outputs


def gpt(layers: int, tokens: int = 4096, width: int = 1024, length: int = 512) -> Graph:
    """A training step of a GPT with 16 heads in bf16: 36 ops a layer and 3 more."""
    b = Builder()
    x_bytes, weight, scores = tokens * width * 2, width * width * 2, tokens * length * 16 * 2
    stats = tokens * 8

    def matmul(name: str, inputs: list[int], size: int, k: float, **fields: Any) -> int:
        return b.op(name, inputs, size, flops=2.0 * tokens * width * width * k, **fields)[0]

    def attend(name: str, inputs: list[int], size: int) -> int:
        return b.op(name, inputs, size, flops=2.0 * tokens * length * width)[0]

    (x,) = b.op("embedding", [b.tensor(stats, "input")], x_bytes)
    saved = []
    for _ in range(layers):
        weights = [b.tensor(k * weight, "parameter") for k in (3, 1, 4, 4)]
        n1, s1 = b.op("layer_norm", [x], x_bytes, stats)
        qkv = matmul("mm", [n1, weights[0]], 3 * x_bytes, 3)
        q, k, v = (b.op("split", [qkv], x_bytes)[0] for _ in range(3))
        raw = attend("bmm", [q, k], scores)
        (p,) = b.op("softmax", [raw], scores, inplace=True)
        dropped, mask = b.op("dropout", [p], scores, scores // 2, rng=True)
        o = attend("bmm", [dropped, v], x_bytes)
        proj = matmul("mm", [o, weights[1]], x_bytes, 1)
        (x1,) = b.op("add", [proj, x], x_bytes, inplace=True)
        n2, s2 = b.op("layer_norm", [x1], x_bytes, stats)
        f1 = matmul("mm", [n2, weights[2]], 4 * x_bytes, 4)
        (g,) = b.op("gelu", [f1], 4 * x_bytes)
        f2 = matmul("mm", [g, weights[3]], x_bytes, 4)
        (x2,) = b.op("add", [f2, x1], x_bytes, inplace=True)
        saved.append((x, weights, n1, s1, q, k, v, p, dropped, mask, o, x1, n2, s2, f1, g))
        x = x2
    (d,) = b.op("loss", [x], x_bytes)
    b.phase = "backward"
    for x, weights, n1, s1, q, k, v, p, dropped, mask, o, x1, n2, s2, f1, g in reversed(saved):
        dg = matmul("mm", [d, weights[3]], 4 * x_bytes, 4)
        matmul("mm", [d, g], 4 * weight, 4, kind="output")
        (df,) = b.op("gelu_backward", [dg, f1], 4 * x_bytes, inplace=True)
        dn2 = matmul("mm", [df, weights[2]], x_bytes, 4)
        matmul("mm", [df, n2], 4 * weight, 4, kind="output")
        (dx1,) = b.op("layer_norm_backward", [dn2, x1, s2], x_bytes)
        (d1,) = b.op("add", [dx1, d], x_bytes, inplace=True)
        do = matmul("mm", [d1, weights[1]], x_bytes, 1)
        matmul("mm", [d1, o], weight, 1, kind="output")
        ddropped = attend("bmm", [do, v], scores)
        dv = attend("bmm", [dropped, do], x_bytes)
        (dp,) = b.op("dropout_backward", [ddropped, mask], scores, inplace=True)
        (draw,) = b.op("softmax_backward", [dp, p], scores, inplace=True)
        dq, dk = attend("bmm", [draw, k], x_bytes), attend("bmm", [draw, q], x_bytes)
        (dqkv,) = b.op("cat", [dq, dk, dv], 3 * x_bytes)
        dn1 = matmul("mm", [dqkv, weights[0]], x_bytes, 3)
        matmul("mm", [dqkv, n1], 3 * weight, 3, kind="output")
        (dx,) = b.op("layer_norm_backward", [dn1, x, s1], x_bytes)
        (d,) = b.op("add", [dx, d1], x_bytes, inplace=True)
    b.op("embedding_backward", [d], weight, kind="output")
    return parse_graph(
        {"schema": "coop-plan/graph/1", "name": f"gpt {layers}", "tensors": b.tensors, "ops": b.ops}
    )


def with_adamw(step: Graph, gigabytes_per_s: float) -> Graph:
    """The iteration of a GPT step with AdamW, on a device with a link of this bandwidth.

    Weights are in bf16, with masters and both moments in fp32. Each update runs as soon as its
    gradient is made, which is no output then. All of them are movable residents. An update may run
    on the host, at the memory bandwidth of that.
    """
    movable = {t.id for t in step.tensors if t.kind == "parameter"}
    tensors = {t.id: t.model_copy({"movable": t.id in movable}) for t in step.tensors}
    link = {f"{way}_bytes_per_s": gigabytes_per_s * 1e9 for way in ("h2d", "d2h")}
    device = step.device.model_copy({"kind": "cuda", "copy_latency_us": 5.0} | link)
    ops: list[Op] = []
    unused, updates = len(tensors), 0
    for op in step.ops:
        ops.append(op)
        gradient = next((t for t in op.outputs if tensors[t].kind == "output"), None)
        if gradient is None or op.name != "mm":
            continue
        # The product of the layer's input gradient reads the weight just before.
        weight = next(t for t in step.ops[len(ops) - 2 - updates].inputs if t in movable)
        size = tensors[gradient].bytes
        tensors[gradient] = tensors[gradient].model_copy({"kind": "activation"})
        states = [unused, unused + 1, unused + 2]
        for t in states:
            tensors[t] = Tensor(id=t, bytes=2 * size, kind="buffer", movable=True)
        updates, unused = updates + 1, unused + 3
        inputs, traffic = [gradient, weight, *states], 14 * size
        host_us = traffic / HOST_BYTES_PER_US
        on_host = Variant(name="host", engine="host", inputs=inputs, outputs=[], cost_us=host_us)
        ops.append(
            Op(
                id=len(step.ops) + updates,
                name="adamw",
                phase="backward",
                inputs=inputs,
                outputs=[],
                mutates=[weight, *states],
                cost_us=traffic / BYTES_PER_US,
                recomputable=False,
                variants=[on_host],
            )
        )
    made = {"tensors": list(tensors.values()), "ops": ops, "device": device}
    return step.model_copy(made | {"name": f"{step.name}, AdamW"})
