"""Peak memory of usual training loops, eager and within a budget.

    python -m benchmarks.loops [--loop NAME] [--model NAME] [--budget 60%]

Every loop runs with every model, eager and within the budget. Columns in kB: the peak of PyTorch's
CPU allocator in the first step, in the second, and in all later ones; eager's; the budgets of the
graphs, and their peaks measured between forward and backward. The model with blocks runs twice: as
one graph ("weights") at 100 % and at its smallest budget, since most loops allow no less; and
compiled block by block ("blocks"), where tensors outside the blocks are in no budget.
Exits 1 if a row exceeds its budget or differs from eager.
"""

import gc
import hashlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.report import Column, Report, parser, scaled

STEPS = 12
SLACK = 64 << 10
"""Bytes above the budget that are tolerated."""

Step = Callable[..., Any]


class Mlp(nn.Module):
    """Wide layers with biases and norms on a large batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(192, 192) for _ in range(8))
        self.norms = nn.ModuleList(nn.LayerNorm(192) for _ in range(8))
        self.head = nn.Linear(192, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.gelu(layer(norm(x)))
        out: torch.Tensor = self.head(x)
        return out


class Convolutions(nn.Module):
    """Convolutions with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(16 if i else 3, 16, 3, padding=1, bias=False) for i in range(6)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(6))
        self.head = nn.Linear(16, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.relu(norm(convolution(x)))
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


class Transformer(nn.Module):
    """Attention and dropout, a shared embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 96)
        self.norms = nn.ModuleList(nn.LayerNorm(96) for _ in range(6))
        self.mixes = nn.ModuleList(nn.Linear(96, 288) for _ in range(3))
        self.feeds = nn.ModuleList(
            nn.Sequential(nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96), nn.Dropout(0.1))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for i, (mix, feed) in enumerate(zip(self.mixes, self.feeds, strict=True)):
            parts = mix(self.norms[2 * i](h)).unflatten(-1, (3, 4, 24)).permute(2, 0, 3, 1, 4)
            h = h + F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
            h = h + feed(self.norms[2 * i + 1](h))
        return (h @ self.embedding.weight.T).flatten(0, 1)


class Block(nn.Module):
    """Transformer block as in GPT-2 and ViT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.mix(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return out


class Blocks(nn.Module):
    """More weights than activations, in blocks, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 96)
        self.blocks = nn.Sequential(*(Block(96, 4) for _ in range(4)))
        self.head = nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(self.embedding(x))).flatten(0, 1)
        return out


def _batches(name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(5)
    while True:
        if name in BLOCKS:
            x = torch.randint(0, 64, (2, 16), generator=source)
            yield x, x.flatten().roll(-1)
        elif name == "transformer":
            x = torch.randint(0, 256, (8, 64), generator=source)
            yield x, x.flatten().roll(-1)
        else:
            shape = (512, 192) if name == "mlp" else (16, 3, 32, 32)
            x = torch.randn(shape, generator=source)
            yield x, torch.randint(0, 64, (shape[0],), generator=source)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "convolutions": Convolutions,
    "transformer": Transformer,
    "blocks": Blocks,
    "weights": Blocks,
}
BLOCKS = ("blocks", "weights")


class Run:
    """A model, its compiled step and its batches, as the loops use them."""

    def __init__(self, name: str, options: dict[str, Any] | None, *, whole: bool) -> None:
        torch.manual_seed(0)
        self.model = MODELS[name]()
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.2
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.batches = _batches(name)
        self.kept: list[torch.Tensor] = []
        model = self.model

        def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(model(x), y)

        self.step: Step = loss if whole else model
        if options is not None:  # gradients outweigh activations in some of the models
            options = {"outputs": "gradients", **options}
        if options is not None and name == "blocks":
            assert isinstance(model, Blocks)
            for block in model.blocks:
                block.compile(backend="coop", fullgraph=True, options=options)
        elif options is not None:
            self.step = torch.compile(self.step, backend="coop", fullgraph=True, options=options)

    def loss(self) -> torch.Tensor:
        """The loss of the next batch."""
        found: torch.Tensor = self.step(*next(self.batches))
        return found


def zero_first(run: Run, _: int) -> None:
    run.optimizer.zero_grad()
    run.loss().backward()
    run.optimizer.step()


def zero_last(run: Run, _: int) -> None:
    run.loss().backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def zero_between(run: Run, _: int) -> None:
    loss = run.loss()
    run.optimizer.zero_grad()
    loss.backward()
    run.optimizer.step()


def zero_in_place(run: Run, _: int) -> None:
    run.optimizer.zero_grad(set_to_none=False)
    run.loss().backward()
    run.optimizer.step()


def accumulate(run: Run, i: int) -> None:
    (run.loss() / 4).backward()
    if i % 4 == 3:
        run.optimizer.step()
        run.optimizer.zero_grad()


def accumulate_zero_between(run: Run, i: int) -> None:
    loss = run.loss() / 4
    if i % 4 == 0:
        run.optimizer.zero_grad()
    loss.backward()
    if i % 4 == 3:
        run.optimizer.step()


def loss_outside(run: Run, _: int) -> None:
    x, y = next(run.batches)
    run.optimizer.zero_grad()
    F.cross_entropy(run.step(x), y).backward()
    run.optimizer.step()


def keep_one(run: Run, _: int) -> None:
    run.optimizer.zero_grad()
    run.loss().backward()
    run.optimizer.step()
    grad = list(run.model.parameters())[-1].grad
    assert grad is not None
    run.kept.append(grad)


def gradients_by_hand(run: Run, _: int) -> None:
    parameters = list(run.model.parameters())
    grads = torch.autograd.grad(run.loss(), parameters)
    with torch.no_grad():
        for p, g in zip(parameters, grads, strict=True):
            p.add_(g, alpha=-0.01)  # no temporary, which would be in no budget


def step_in_backward(run: Run, i: int) -> None:
    def update(p: torch.Tensor) -> None:
        assert p.grad is not None
        with torch.no_grad():
            p.add_(p.grad, alpha=-0.01)
        p.grad = None

    if i == 0:
        for p in run.model.parameters():
            p.register_post_accumulate_grad_hook(update)
    run.loss().backward()


LOOPS: dict[str, Callable[[Run, int], None]] = {
    loop.__name__: loop
    for loop in (
        *(zero_first, zero_last, zero_between, zero_in_place, accumulate),
        *(accumulate_zero_between, loss_outside, keep_one, gradients_by_hand, step_in_backward),
    )
}


def measure(loop: str, model: str, budget: str | None) -> dict[str, Any]:
    """Run one loop in this process; returns its bytes and hashes of its results."""
    from coop_plan.runtime import clear_reports, reports
    from coop_plan.runtime.device.arena import process_bytes, reset_peak

    torch._dynamo.reset()
    clear_reports()
    gc.collect()
    torch.empty(1 << 30, dtype=torch.uint8)  # makes idle arenas of other runs release pages
    empty = process_bytes()[0]
    run = Run(model, {"budget": budget} if budget else None, whole=loop != "loss_outside")
    peaks = []
    for i in range(STEPS):
        reset_peak()
        LOOPS[loop](run, i)
        peaks.append(process_bytes()[1] - empty)
    grads = [p.grad for p in run.model.parameters() if p.grad is not None]
    beside = 0
    if model == "blocks":
        assert isinstance(run.model, Blocks)
        parameters = list(run.model.parameters())
        beside = 2 * sum(p.nbytes for p in {*parameters} - {*run.model.blocks.parameters()})
    left = [*run.model.state_dict().values(), *grads, *run.kept]
    return {
        "first": peaks[0],
        "second": peaks[1],
        "settled": max(peaks[2:]),
        "after": process_bytes()[0] - empty,
        "kept": sum(g.untyped_storage().nbytes() for g in run.kept),
        "beside": beside,
        "budgets": [report.budget_bytes for report in reports()],
        "measured": [report.measured_peak_bytes for report in reports()],
        "numbers": [hashlib.sha256(value.numpy().tobytes()).hexdigest() for value in left],
    }


def holds(found: dict[str, Any], eager: dict[str, Any]) -> bool:
    """True if the loop stayed within its budget and eager's peak, with eager's numbers."""
    within = found["settled"] <= most(found)
    return (
        within
        and found["settled"] <= eager["settled"] + SLACK
        and found["numbers"] == eager["numbers"]
    )


def most(found: dict[str, Any]) -> int:
    """Largest allowed peak: budget, kept gradients, and tensors outside the budget."""
    bytes_: int = max(found["budgets"]) + found["kept"] + found["beside"] + SLACK
    return bytes_


KB = scaled(1e-3, ".0f")
COLUMNS = (
    *("model", "loop", "budget"),
    *(Column(name, form=KB) for name in ("first", "second", "settled", "eager")),
    Column("budgets", form=lambda sizes: " ".join(map(KB, sizes))),
    Column("measured", form=lambda sizes: " ".join(map(KB, sizes))),
    Column("equal", form=lambda equal: "equal" if equal else "NOT EQUAL"),
    Column("held", "", form=str),
)


def main() -> int:
    """Returns 1 unless every row held."""
    command = parser(__doc__)
    command.add_argument("--loop", choices=LOOPS, action="append")
    command.add_argument("--model", choices=MODELS, action="append")
    command.add_argument("--budget", action="append")
    args = command.parse_args()
    torch.set_num_threads(1)
    report = Report(*COLUMNS, progress=True)
    for model in args.model or MODELS:
        for loop in args.loop or LOOPS:
            eager = measure(loop, model, None)
            for budget in args.budget or ("100%" if model == "weights" else "60%", "min"):
                found = measure(loop, model, budget)
                found |= {"model": model, "loop": loop, "budget": budget}
                found |= {"eager": eager["settled"], "equal": found["numbers"] == eager["numbers"]}
                report.add(**found, held=holds(found, eager))
    report.finish(args.csv)
    return int(not all(row["held"] for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
