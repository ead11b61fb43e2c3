"""Training with tensors moved to the host: eager's numbers, and what was planned beside measured.

    python -m benchmarks.swap_runtime [--model gpt2] [--budgets 40%,min] [--link 2GB/s] [--steps 7]

On the CPU, where threads copy no faster than the link. Eager and the planned step train two copies
of a model on the same batches. Ops are profiled anew, as machines are not as fast on every day.
Times are medians over the steps but the first, of time inside ops and waiting for copies; `hidden`
is the time of copies in which the ops went on, of the last step. Exits 1 when a step differs from
eager in a bit, or runs at other addresses than planned.
"""

import argparse
import copy
import os
import statistics
import sys
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._dynamo.exc import BackendCompilerFailed

from coop_plan.planner.core.errors import InfeasibleBudgetError
from coop_plan.runtime import clear_reports, reports
from coop_plan.runtime.reports import StepReport

Built = tuple[torch.nn.Module, Callable[[torch.nn.Module], Any], Any]


def gpt2() -> Built:
    """GPT-2 of four layers, width 256, batch 4 x 256, dropout 0.1."""
    from benchmarks.demo import build_model
    from benchmarks.runtime_peers import _language_loss

    return build_model(4, 256, 256), _language_loss, torch.randint(0, 2000, (4, 256))


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
    """Steps of SGD; the losses, and the makespan of each step if it is a planned one, µs."""
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


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--budgets", default="40%,min")
    parser.add_argument("--link", default="2GB/s")
    parser.add_argument("--steps", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(box=None)
    for name in ("model", "budget", "swapped", "recomputed", "arena", "host arena", "outside"):
        table.add_column(name)
    for name in ("planned ms", "measured", "stall planned", "measured", "hidden", "as eager"):
        table.add_column(name, justify="right")
    held = True
    with TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for name in arguments.model or list(MODELS):
            for budget in arguments.budgets.split(","):
                held &= _compare(name, budget, arguments.link, arguments.steps, table)
    Console(width=180).print(table)
    return 0 if held else 1


def _compare(name: str, budget: str, link: str, steps: int, table: Table) -> bool:
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
        table.add_row(name, budget, "cannot be met")
        return True
    (report,) = reports()
    plan = report.plan
    same = losses == other_losses and all(map(torch.equal, model.parameters(), other.parameters()))
    exact = (
        report.measured_arena_bytes == plan.arena_bytes
        and report.measured_host_arena_bytes == plan.host_arena_bytes
        and not report.outside_bytes
    )
    measured = statistics.median(makespans[1:])
    stalls = plan.offload_stall_us + plan.prefetch_stall_us
    table.add_row(
        *(name, budget, f"{plan.swapped_bytes / 1e6:.1f} MB", str(plan.recomputed_ops)),
        f"{report.measured_arena_bytes}/{plan.arena_bytes}",
        f"{report.measured_host_arena_bytes}/{plan.host_arena_bytes}",
        str(report.outside_bytes),
        f"{plan.cost_us / 1e3:.1f}",
        f"{measured / 1e3:.1f} ({measured / plan.cost_us - 1:+.1%})",
        f"{stalls / 1e3:.1f}",
        f"{_stall_us(report) / 1e3:.1f}",
        f"{_hidden_us(report) / 1e3:.1f}",
        "yes" if same else "NO",
    )
    return same and exact


def _stall_us(report: StepReport) -> float:
    return report.measured_offload_stall_us + report.measured_prefetch_stall_us


def _hidden_us(report: StepReport) -> float:
    return sum(span.end_us - span.begin_us for span in report.copies) - _stall_us(report)


if __name__ == "__main__":
    sys.exit(main())
