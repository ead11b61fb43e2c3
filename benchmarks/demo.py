"""GPT-2 trained in eager and under budgets, compared.

    python -m benchmarks.demo [--layers 6] [--width 256] [--batch 4] [--length 256] [--steps 3]

Prints one row a mode and writes `report.json`, the captured graph and the plans to `build/demo`.
Exits 1 if losses or parameters differ from eager's, or an allocation missed its address.
"""

import argparse
import copy
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Column, Report, parser
from coop_plan.runtime import clear_reports, reports
from coop_plan.runtime.device.arena import process_bytes, reset_peak
from coop_plan.runtime.reports import StepReport
from coop_plan.schemas import format_bytes

REPORTED = (
    *("method", "status", "budget_bytes", "peak_bytes", "measured_peak_bytes"),
    *("planned_arena_bytes", "measured_arena_bytes", "outside_bytes"),
    *("planned_overhead", "measured_overhead", "profile_seconds", "plan_seconds"),
)
MODES = {"eager": None, "keep-all": "100%", "half": "50%", "smallest": "min"}


def build_model(layers: int, width: int, length: int) -> torch.nn.Module:
    """GPT-2 from a config: random weights, dropout 0.1, nothing downloaded."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=8,
        vocab_size=2000,
        n_positions=length,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).train()


def loss_of(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The next-token loss of a batch of token ids, shape (batch, length)."""

    def loss(ids: torch.Tensor) -> torch.Tensor:
        logits = model(ids).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return loss


@dataclass
class Trainer:
    """One mode: its own copy of the model, its optimizer, and its figures."""

    name: str
    model: torch.nn.Module
    run: Callable[[torch.Tensor], torch.Tensor]
    random_state: torch.Tensor
    losses: list[torch.Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    report: StepReport | None = None
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, ids: torch.Tensor) -> None:
        """One training step with this mode's own stream of random numbers."""
        torch.set_rng_state(self.random_state)
        began = time.perf_counter()
        loss = self.run(ids)
        loss.backward()
        self.seconds.append(time.perf_counter() - began)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())
        self.random_state = torch.get_rng_state()


def measure(arguments: argparse.Namespace) -> list[Trainer]:
    """Train all modes in lockstep and return them."""
    torch.manual_seed(0)
    origin = build_model(arguments.layers, arguments.width, arguments.length)
    ids = torch.randint(0, 2000, (arguments.batch, arguments.length))
    random_state = torch.get_rng_state()
    process_bytes()  # from here on every allocation is counted
    trainers = []
    clear_reports()
    for name, budget in MODES.items():
        gc.collect()
        before, _ = process_bytes()
        model = copy.deepcopy(origin)
        run = loss_of(model)
        if budget is not None:
            options = {"budget": budget, "method": arguments.method}
            run = torch.compile(run, backend="coop", fullgraph=True, options=options)
        trainer = Trainer(name, model, run, random_state)
        reset_peak()
        trainer.step(ids)
        if budget is None:
            # `before` was taken without the model, so the peak includes it.
            trainer.peak_bytes = process_bytes()[1] - before
        else:
            trainer.report = reports()[-1]
        trainers.append(trainer)
    for _ in range(arguments.steps - 1):
        for trainer in trainers:
            trainer.step(ids)
    return trainers


def summary(trainers: list[Trainer]) -> list[dict[str, Any]]:
    """One record per mode, figures in bytes and seconds."""
    eager, keep_all = trainers[0], trainers[1]
    base = statistics.median(keep_all.seconds[1:])
    rows = []
    for trainer in trainers:
        losses_equal = all(map(torch.equal, trainer.losses, eager.losses))
        parameters_equal = all(
            map(torch.equal, trainer.model.parameters(), eager.model.parameters())
        )
        seconds = statistics.median(trainer.seconds[1:])
        row: dict[str, Any] = {
            "mode": trainer.name,
            "step_seconds": seconds,
            "step_ratio_to_keep_all": seconds / base,
            "losses_equal": losses_equal,
            "parameters_equal": parameters_equal,
            "losses": [float(loss) for loss in trainer.losses],
        }
        if trainer.report is None:
            row["measured_peak_bytes"] = trainer.peak_bytes
        else:
            report = trainer.report
            row |= {name: getattr(report, name) for name in REPORTED}
            row["recomputed_ops"] = report.plan.recomputed_ops
            row["ops"] = len(report.graph.ops)
        rows.append(row)
    return rows


COLUMNS = (
    "mode",
    Column("budget_bytes", "budget", format_bytes),
    Column("measured_peak_bytes", "peak", format_bytes),
    Column("planned_arena_bytes", "arena", format_bytes),
    Column("measured_arena_bytes", "measured arena", format_bytes),
    Column("outside_bytes", "outside", format_bytes),
    Column("step_seconds", "step s", ".3f"),
    Column("step_ratio_to_keep_all", "x keep-all", ".3f"),
    Column("planned_overhead", form=".1%"),
    Column("measured_overhead", "in-step overhead", ".1%"),
    Column("bitwise", form=lambda equal: "equal" if equal else "DIFFERENT"),
)


def write(folder: Path, rows: list[dict[str, Any]], trainers: list[Trainer]) -> None:
    """Write `report.json`, `graph.json` and one plan a mode."""
    folder.mkdir(parents=True, exist_ok=True)
    planned = [trainer for trainer in trainers if trainer.report is not None]
    assert planned[0].report is not None
    (folder / "graph.json").write_text(planned[0].report.graph.to_json())
    for trainer in planned:
        assert trainer.report is not None
        (folder / f"plan-{trainer.name}.json").write_text(trainer.report.plan.to_json())
    (folder / "report.json").write_text(json.dumps({"rows": rows}, indent=2))


def main() -> int:
    """Returns 1 unless every mode held."""
    command = parser(__doc__)
    command.add_argument("--layers", type=int, default=6)
    command.add_argument("--width", type=int, default=256)
    command.add_argument("--batch", type=int, default=4)
    command.add_argument("--length", type=int, default=256)
    command.add_argument("--steps", type=int, default=5)
    command.add_argument("--threads", type=int, default=1, help="two contend on a shared machine")
    command.add_argument("--method", default="coop-offline")
    command.add_argument("--out", type=Path, default=Path("build/demo"))
    arguments = command.parse_args()
    if arguments.steps < 2:
        command.error("--steps must be 2 or more: the first step compiles")
    torch.set_num_threads(arguments.threads)
    trainers = measure(arguments)
    rows = summary(trainers)
    table = Report(*COLUMNS, title="GPT-2, one training step: forward and backward")
    for row in rows:
        table.add(**row, bitwise=row["losses_equal"] and row["parameters_equal"])
    table.finish(arguments.csv)
    write(arguments.out, rows, trainers)
    print(f"written: {arguments.out}/report.json, graph.json, plan-*.json")
    held = all(
        row["losses_equal"]
        and row["parameters_equal"]
        and row.get("outside_bytes", 0) == 0
        and row.get("planned_arena_bytes") == row.get("measured_arena_bytes")
        and row["measured_peak_bytes"] <= row.get("budget_bytes", math.inf)
        for row in rows
    )
    if not held:
        print("NOT HELD: see the table", file=sys.stderr)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
