"""Largest contexts of fine-tuning: published ones of unsloth against plans of `coop-plan fit`.

    python -m benchmarks.contexts [--memory GB ...] [--csv FILE]

The step is that of unsloth's table: Llama 3.1 8B, LoRA of rank 32 on all linear layers over 4-bit
weights, one text, AdamW in 8 bits. "Unsloth" is the largest context with its kernels and offload,
"checkpoints" that of a checkpoint a layer in transformers. Ours is the plan over eager's kernels
without transfers at unsloth's context, within the memory less a context of CUDA, by the costs of an
A100. Exits 1 if a context does not fit.
"""

import sys
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.fit_models import FourBitLinear, RMSNorm
from benchmarks.report import Column, Report, parser, scaled
from coop_plan.planner.fit import Budgeting
from coop_plan.runtime.offline_capture.devices import device
from coop_plan.runtime.offline_capture.fake_device import CaptureRequest, OfflineCapture
from coop_plan.runtime.offline_capture.optimizer_spec import OptimizerSpec

PUBLISHED = {
    8: (2972, None),
    12: (21848, 932),
    16: (40724, 2551),
    24: (78475, 5789),
    40: (153977, 12264),
    48: (191728, 15502),
    80: (342733, 28454),
}
"""By memory in GB: contexts of unsloth, and of checkpoints (github.com/unslothai/unsloth)."""

VOCABULARY, LAYERS, WIDTH, HEADS, KEYS, HIDDEN = 128256, 32, 4096, 32, 8, 14336
RANK = 32


class LoraLinear(nn.Module):
    """A frozen linear layer of 4-bit weights, and a product of two trained matrices beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = FourBitLinear(nn.Linear(inputs, outputs, bias=False))
        self.down = nn.Parameter(torch.zeros(RANK, inputs))
        self.up = nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)  # type: ignore[no-any-return]


def plain(inputs: int, outputs: int) -> nn.Module:
    """A linear layer that is trained."""
    return nn.Linear(inputs, outputs, bias=False)


class Layer(nn.Module):
    """A layer of Llama 3 with grouped keys."""

    def __init__(self, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.norms = nn.ModuleList([RMSNorm(WIDTH), RMSNorm(WIDTH)])
        self.query, self.out = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.key, self.value = (linear(WIDTH, KEYS * size) for _ in range(2))
        self.gate, self.wide = linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN)
        self.narrow = linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norms[0](x)
        q, k, v = (
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(made.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        return x + self.narrow(F.silu(self.gate(normed)) * self.wide(normed))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Llama(nn.Module):
    """Llama 3.1 8B in bf16; returns the loss of a text. All parameters are trained."""

    def __init__(self, linear: Callable[[int, int], nn.Module] = plain) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(linear) for _ in range(LAYERS))
        self.norm = RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.to(torch.bfloat16)

    def forward(self, ids: Tensor) -> Tensor:
        size = WIDTH // HEADS
        rates = 500000 ** -(torch.arange(0, size, 2, device=ids.device) / size)
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device), rates).repeat(1, 2)
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def llama_8b(batch: int, length: int) -> Any:
    """Llama 3.1 8B with LoRA over 4-bit weights."""
    model = Llama(LoraLinear)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith((".down", ".up")))
    return model, (torch.randint(0, 100, (batch, length)),)


def whole_llama_8b(batch: int, length: int) -> Any:
    """Llama 3.1 8B, all of whose parameters are trained."""
    return Llama(), (torch.randint(0, 100, (batch, length)),)


def main() -> int:
    """Print the table; 1 if a context does not fit."""
    options = parser(__doc__)
    options.add_argument("--memory", nargs="+", type=int, choices=PUBLISHED, default=[*PUBLISHED])
    arguments = options.parse_args()
    report = Report(
        Column("memory", "GB"),
        Column("checkpoints", "checkpoints, tokens"),
        Column("unsloth", "unsloth, tokens"),
        Column("peak", "ours GB", scaled(1e-9, ".2f")),
        Column("overhead", None, ".1%"),
        title="Contexts of Llama 3.1 8B, LoRA over 4 bits",
        progress=True,
    )
    a100 = device("a100-80gb")
    with OfflineCapture() as captures:
        for memory in arguments.memory:
            unsloth, checkpoints = PUBLISHED[memory]
            spec = msgspec.structs.replace(a100, memory_bytes=memory << 30)
            request = CaptureRequest(
                target="benchmarks.contexts:llama_8b",
                spec=spec,
                batch=1,
                length=unsloth,
                optimizer=OptimizerSpec(name="adamw8bit"),
                eager=True,
                chunks=True,
            )
            found = captures.capture(request)
            assert found.eager is not None
            available = spec.memory_bytes - spec.context
            room = found.eager.step_budget(found.graph, available, rests=False)
            graph = found.graphs["chunked"]
            made = Budgeting(room, "gradients").plan(graph)
            report.add(
                memory=memory,
                checkpoints=checkpoints,
                unsloth=unsloth,
                peak=made and found.eager.with_plan(graph, made, rests=False),
                overhead=made and made.overhead,
            )
    report.finish(arguments.csv)
    return int(any(row["overhead"] is None for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
