"""Training with transfers to the host: compared with eager, and planned with measured.

    python -m benchmarks.swap_runtime [--model gpt2] [--budgets 40%,min] [--link 2GB/s] [--steps 7]

Runs on the CPU, where threads copy no faster than the link. Eager and the planned step train two
copies of a model on the same batches. Ops are profiled again in each run. Times are medians over
all steps but the first: time inside ops and in waits for copies. `hidden` is the copy time of the
last step that overlapped with ops. Exits 1 if a step differs from eager in a bit, or runs at other
addresses than planned.
"""

import copy
import os
import statistics
import sys
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed

from benchmarks.demo import build_model, loss_of
from benchmarks.report import Column, Report, parser, scaled
from coop_plan.planner.core.errors import InfeasibleBudgetError
from coop_plan.runtime import clear_reports, reports
from coop_plan.runtime.reports import StepReport

Built = tuple[torch.nn.Module, Callable[[torch.nn.Module], Any], Any]


def gpt2() -> Built:
    """GPT-2 of four layers, width 256, batch 4 x 256, dropout 0.1."""
    return build_model(4, 256, 256), loss_of, torch.randint(0, 2000, (4, 256))


def unet() -> Built:
    """The U-Net of `benchmarks.papers` at a quarter of its widths, batch 8 of 128 x 128 pixels."""
    from benchmarks.papers.networks import UNET_WIDTHS, UNet

    labels = torch.randint(0, 2, (8, 128, 128))

    def loss(model: torch.nn.Module) -> Any:
        return lambda pixels: torch.nn.functional.cross_entropy(model(pixels), labels)

    return UNet(widths=tuple(w // 4 for w in UNET_WIDTHS)), loss, torch.randn(8, 3, 128, 128)


MODELS = {"gpt2": gpt2, "unet": unet}


def train(
    model: torch.nn.Module, step: Any, batch: Any, steps: int
) -> tuple[list[float], list[float]]:
    """Train by SGD; returns the losses and the makespans (µs) of planned steps."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    losses, makespans = [], []
    for _ in range(steps):
        loss = step(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        makespans += [report.measured_makespan_us or 0.0 for report in reports()]
    return losses, makespans


MS = scaled(1e-3, ".1f")
COLUMNS = (
    *("model", "budget", Column("swapped", "swapped MB", scaled(1e-6, ".1f"))),
    *("recomputed", "arena", "host_arena", "outside"),
    Column("planned_us", "planned ms", MS),
    Column("measured_us", "measured ms", MS),
    Column("planned_stall_us", "stall, planned ms", MS),
    Column("stall_us", "stall, measured ms", MS),
    Column("hidden_us", "hidden ms", MS),
    Column("equal", "as eager"),
)


def main() -> int:
    """Returns 1 unless every step held."""
    command = parser(__doc__)
    command.add_argument("--model", choices=MODELS, action="append")
    command.add_argument("--budgets", default="40%,min")
    command.add_argument("--link", default="2GB/s")
    command.add_argument("--steps", type=int, default=7)
    arguments = command.parse_args()
    torch.set_num_threads(1)
    report, held = Report(*COLUMNS), True
    with TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for name in arguments.model or list(MODELS):
            for budget in arguments.budgets.split(","):
                held &= _compare(name, budget, arguments.link, arguments.steps, report)
    report.finish(arguments.csv)
    return 0 if held else 1


def _compare(name: str, budget: str, link: str, steps: int, rows: Report) -> bool:
    torch.manual_seed(0)
    torch._dynamo.reset()
    clear_reports()
    model, loss_of, batch = MODELS[name]()
    other = copy.deepcopy(model)
    losses, _ = train(model, loss_of(model), batch, steps)
    options = {"budget": budget, "link": link}
    step = torch.compile(loss_of(other), backend="coop", fullgraph=True, options=options)
    try:
        other_losses, makespans = train(other, step, batch, steps)
    except BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, InfeasibleBudgetError):
            raise
        rows.add(model=name, budget=budget, equal="cannot be met")
        return True
    (report,) = reports()
    plan = report.plan
    same = losses == other_losses and all(map(torch.equal, model.parameters(), other.parameters()))
    exact = (
        report.measured_arena_bytes == plan.arena_bytes
        and report.measured_host_arena_bytes == plan.host_arena_bytes
        and not report.outside_bytes
    )
    rows.add(
        model=name,
        budget=budget,
        swapped=plan.swapped_bytes,
        recomputed=plan.recomputed_ops,
        arena=f"{report.measured_arena_bytes}/{plan.arena_bytes}",
        host_arena=f"{report.measured_host_arena_bytes}/{plan.host_arena_bytes}",
        outside=report.outside_bytes,
        planned_us=plan.cost_us,
        measured_us=statistics.median(makespans[1:]),
        planned_stall_us=plan.offload_stall_us + plan.prefetch_stall_us,
        stall_us=_stall_us(report),
        hidden_us=sum(span.end_us - span.begin_us for span in report.copies) - _stall_us(report),
        equal="yes" if same else "NO",
    )
    return same and exact


def _stall_us(report: StepReport) -> float:
    return report.measured_offload_stall_us + report.measured_prefetch_stall_us


if __name__ == "__main__":
    sys.exit(main())
