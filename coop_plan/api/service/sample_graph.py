"""Sample graph of the service's pages: the step of a perceptron, with round figures."""

from typing import Any

WEIGHT_BYTES, ACTIVATION_BYTES = 4 << 20, 16 << 20
PRODUCT_US, POINTWISE_US = 900.0, 90.0

Document = dict[str, Any]


def sample_graph(layers: int) -> Document:
    """The step of linear layers with ReLU, on a device with a link to the host."""
    tensors: list[Document] = []
    ops: list[Document] = []

    def tensor(name: str, size: int, kind: str = "activation") -> int:
        tensors.append({"id": len(tensors), "name": name, "bytes": size, "kind": kind})
        return len(tensors) - 1

    def op(layer: int, phase: str, inputs: list[int], made: str, name: str, **other: Any) -> int:
        cost = PRODUCT_US if name == "aten.mm" else POINTWISE_US
        output = tensor(made, other.get("size", ACTIVATION_BYTES), other.get("kind", "activation"))
        here = {"id": len(ops), "name": name, "phase": phase, "source": f"model.{layer}"}
        ops.append(here | {"inputs": inputs, "outputs": [output], "cost_us": cost})
        return output

    states = [tensor("x", ACTIVATION_BYTES, "input")]
    weights = [tensor(f"weight_{layer}", WEIGHT_BYTES, "parameter") for layer in range(layers)]
    for layer, weight in enumerate(weights):
        product = op(layer, "forward", [states[-1], weight], f"product_{layer}", "aten.mm")
        states.append(op(layer, "forward", [product], f"hidden_{layer}", "aten.relu"))
    loss = op(layers, "forward", [states[-1]], "loss", "aten.mean", size=4, kind="output")
    grad, here = op(layers, "backward", [loss], "grad", "aten.expand"), "backward"
    for layer, weight in reversed(list(enumerate(weights))):
        inputs = [grad, states[layer + 1]]
        masked = op(layer, here, inputs, f"grad_product_{layer}", "aten.threshold_backward")
        made, kept = f"grad_weight_{layer}", {"size": WEIGHT_BYTES, "kind": "output"}
        op(layer, here, [masked, states[layer]], made, "aten.mm", **kept)
        if layer:
            grad = op(layer, here, [masked, weight], f"grad_{layer}", "aten.mm")
    return {
        "schema": "coop-plan/graph/1",
        "name": f"perceptron of {layers} layers",
        "device": {"name": "sample", "h2d_bytes_per_s": 25e9, "d2h_bytes_per_s": 25e9},
        "tensors": tensors,
        "ops": ops,
    }
