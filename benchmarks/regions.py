"""Step times of blocks that are compiled one by one, compared with one graph and with eager.

    python -m benchmarks.regions [--model gpt2 residual] [--budget 100%] [--turns 8]

The three train one model alternately, six steps a turn. The first two steps of a turn are not
counted: they map the arena's pages again. A figure is the median of ratios of steps at the same
position of a turn. Exits 1 if gradients differ from eager's in a bit, or a measured peak exceeds
the budget.
"""

import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.loops import Block
from benchmarks.report import Column, Report, parser
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
    """Run one step and return its seconds."""
    begin = time.perf_counter()
    model.zero_grad()
    called(x).square().mean().backward()
    return time.perf_counter() - begin


def measure(name: str, budget: str, turns: int) -> dict[str, Any]:
    """Returns the row of a model."""
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
    for turn in range(1 + turns):  # the first turn plans and re-plans
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

    def ratio(way: str, to: str) -> float:
        return statistics.median(a / b for a, b in zip(times[way], times[to], strict=True))

    figures = {"whole": ratio("one graph", "eager"), "blocks": ratio("by blocks", "eager")}
    figures["blocks_to_whole"] = ratio("by blocks", "one graph")
    return dict(model=name, budget=budget, gradients=equal, peaks=within, **figures)


COLUMNS = (
    *("model", "budget", Column("whole", "one graph ÷ eager", ".3f")),
    Column("blocks", "by blocks ÷ eager", ".3f"),
    Column("blocks_to_whole", "by blocks ÷ one graph", ".3f"),
    Column("gradients", form=lambda equal: "equal" if equal else "DIFFERENT"),
    Column("peaks", form=lambda within: "within" if within else "BEYOND"),
)


def main() -> int:
    """Returns 1 unless every model held."""
    command = parser(__doc__)
    command.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    command.add_argument("--budget", default="100%")
    command.add_argument("--turns", type=int, default=8)
    asked = command.parse_args()
    report = Report(*COLUMNS, progress=True)
    for name in asked.model:
        report.add(**measure(name, asked.budget, asked.turns))
    report.finish(asked.csv)
    return int(not all(row["gradients"] and row["peaks"] for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
