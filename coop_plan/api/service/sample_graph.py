"""Sample graph of the service's page: the training step of a perceptron, with round figures."""

from typing import Any

LAYERS = 12
WEIGHT_BYTES, ACTIVATION_BYTES = 4 << 20, 16 << 20
PRODUCT_US, POINTWISE_US = 900.0, 90.0

Document = dict[str, Any]


def sample_graph() -> Document:
    """The step of `LAYERS` linear layers with ReLU, on a device with a link to the host."""
    tensors: list[Document] = []
    ops: list[Document] = []

    def tensor(name: str, size: int, kind: str = "activation") -> int:
        tensors.append({"id": len(tensors), "name": name, "bytes": size, "kind": kind})
        return len(tensors) - 1

    def op(name: str, layer: int, phase: str, inputs: list[int], output: int, cost: float) -> None:
        here = {"id": len(ops), "name": name, "phase": phase, "source": f"model.{layer}"}
        ops.append(here | {"inputs": inputs, "outputs": [output], "cost_us": cost})

    hidden = tensor("x", ACTIVATION_BYTES, "input")
    weights, read, active = [], [], []
    for layer in range(LAYERS):
        weights.append(tensor(f"weight_{layer}", WEIGHT_BYTES, "parameter"))
        read.append(hidden)
        product = tensor(f"product_{layer}", ACTIVATION_BYTES)
        op("aten.mm", layer, "forward", [hidden, weights[layer]], product, PRODUCT_US)
        hidden = tensor(f"hidden_{layer}", ACTIVATION_BYTES)
        op("aten.relu", layer, "forward", [product], hidden, POINTWISE_US)
        active.append(hidden)
    loss = tensor("loss", 4, "output")
    op("aten.mean", LAYERS, "forward", [hidden], loss, POINTWISE_US)
    grad = tensor("grad", ACTIVATION_BYTES)
    op("aten.expand", LAYERS, "backward", [loss], grad, POINTWISE_US)
    for layer in reversed(range(LAYERS)):
        masked = tensor(f"grad_product_{layer}", ACTIVATION_BYTES)
        op(
            "aten.threshold_backward",
            layer,
            "backward",
            [grad, active[layer]],
            masked,
            POINTWISE_US,
        )
        of_weight = tensor(f"grad_weight_{layer}", WEIGHT_BYTES, "output")
        op("aten.mm", layer, "backward", [masked, read[layer]], of_weight, PRODUCT_US)
        if layer:
            grad = tensor(f"grad_{layer}", ACTIVATION_BYTES)
            op("aten.mm", layer, "backward", [masked, weights[layer]], grad, PRODUCT_US)
    return {
        "schema": "coop-plan/graph/1",
        "name": f"perceptron of {LAYERS} layers",
        "device": {"name": "sample", "h2d_bytes_per_s": 25e9, "d2h_bytes_per_s": 25e9},
        "tensors": tensors,
        "ops": ops,
    }
