"""Step times of blocks that are compiled one by one, beside one graph of all and eager.

    python -m benchmarks.regions [--model gpt2 residual] [--budget 100%] [--turns 8]

The three train one model in turns of six steps. Of each turn the first two are not counted: in them
the arena's pages come back, which the others' turn has taken. A figure is the median of ratios of
steps in the same place of a turn. Exits 1 where gradients differ from eager's in a bit, or a
measured peak is beyond the budget.
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.loops import Block
from coop_plan import runtime

UNCOUNTED, COUNTED = 2, 4
WAYS = ("eager", "one graph", "by blocks")


class Residual(nn.Module):
    """A block of two convolutions with batch norm."""

    def __init__(self, channels: int = 96) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = F.relu(self.norms[0](self.convolutions[0](x)))
        return F.relu(x + self.norms[1](self.convolutions[1](made)))


MODELS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "gpt2": (lambda: nn.Sequential(*(Block(768, 12) for _ in range(12))), (2, 256, 768)),
    "residual": (lambda: nn.Sequential(*(Residual() for _ in range(8))), (8, 96, 56, 56)),
}


def train(
    model: nn.Module, called: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> float:
    """One step; its seconds."""
    begin = time.perf_counter()
    model.zero_grad()
    called(x).square().mean().backward()
    return time.perf_counter() - begin


def measure(name: str, budget: str, turns: int) -> bool:
    """Print a model's line; whether it kept its promises."""
    make, shape = MODELS[name]
    torch._dynamo.reset()
    runtime.clear_reports()
    torch.manual_seed(0)
    made, x = make(), torch.randn(shape)
    models = {way: copy.deepcopy(made) for way in WAYS}
    options = {"budget": budget}
    called: dict[str, Callable[[torch.Tensor], torch.Tensor]] = dict(models)
    called["one graph"] = torch.compile(models["one graph"], backend="coop", options=options)
    for block in models["by blocks"]:
        block.compile(backend="coop", options=options)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(1 + turns):  # plans are made, and made anew, in the first
        for way in WAYS:
            taken = [train(models[way], called[way], x) for _ in range(UNCOUNTED + COUNTED)]
            times[way] += taken[UNCOUNTED:] if turn else []
    found = [[p.grad for p in model.parameters()] for model in models.values()]
    equal = all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )
    first, *others = runtime.reports()
    whole = [first, *(report for report in others if report.name.startswith("iteration"))]
    within = all(r.measured_peak_bytes <= r.budget_bytes for r in whole)

    def ratio(way: str, to: str) -> str:
        return f"{statistics.median(a / b for a, b in zip(times[way], times[to], strict=True)):.3f}"

    print(
        f"{name} at {budget}: one graph {ratio('one graph', 'eager')} of eager, by blocks"
        f" {ratio('by blocks', 'eager')}, by blocks {ratio('by blocks', 'one graph')} of one graph;"
        f" gradients {'equal' if equal else 'DIFFERENT'}, peaks {'within' if within else 'BEYOND'}",
        flush=True,
    )
    return equal and within


def main() -> int:
    """Measure the models that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--budget", default="100%")
    parser.add_argument("--turns", type=int, default=8)
    asked = parser.parse_args()
    kept = [measure(name, asked.budget, asked.turns) for name in asked.model]
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
