"""Budgets in bytes for whole-graph Inductor, and PyTorch's shares at equal peaks, on the CPU.

    python -m benchmarks.inductor_budget [--model llama-2 ...] [--rounds 5] [--csv FILE]

A model is compiled once for each of its candidates' partitions (`coop_plan.InductorBudget`), and 20
budgets from the largest peak to the least are asked for. Trained are Inductor's own choice, the
candidates for the least budget and for the middle, `activation_memory_budget` at `--shares`, and
the candidate for the peak that each share was measured to have. Modes take turns in one process;
CPU times of forward and backward are medians, as ratios to Inductor's own choice.

Peaks are counted from outside between the start of a forward and the end of its backward,
parameters and batch included. Exits 1 if a measured peak exceeds its budget, or if plans are not
monotone in the budget.
"""

import argparse
import copy
import statistics
import sys
import time
from typing import Any

import torch

from benchmarks import fused
from benchmarks.report import Column, Report, parser, scaled
from coop_plan.runtime.device.arena import process_bytes, reset_peak
from coop_plan.runtime.inductor_budget.budget import (
    TOLERANCE,
    Candidates,
    InductorBudget,
    loosest_within,
)

BUDGETS = 20

MODELS = {name: fused.MODELS[name] for name in ("llama-2", "gpt2-2", "unet", "resnet", "moe")}


class Recorder(InductorBudget):
    """The partitioner, which keeps the peaks of all candidates and takes a chosen one."""

    def __init__(self) -> None:
        super().__init__(1)
        self.peaks: list[int] = []
        self.index = 0

    def __call__(self, gm: Any, joint_inputs: Any, **rest: Any) -> Any:
        found = Candidates(gm, joint_inputs, rest)
        self.peaks = self.peaks or [found.peak(i) for i in range(found.useful)]
        return found.modules(self.index)

    def within(self, budget: int) -> int | None:
        """The candidate for a budget."""
        return loosest_within(self.peaks.__getitem__, len(self.peaks), budget)


class Trainer:
    """A copy of a model, compiled in one mode."""

    def __init__(self, built: Any, **compiled: Any) -> None:
        origin, step_of, self.batch = built
        self.model = copy.deepcopy(origin)
        run = step_of(self.model)
        run.__code__ = run.__code__.replace(co_name=f"step_{id(self)}")
        self.run = torch.compile(run, dynamic=False, **compiled)
        held = (*self.model.parameters(), *self.model.buffers(), *_tensors(self.batch))
        storages = {value.untyped_storage().data_ptr(): value.nbytes for value in held}
        self.bytes = sum(storages.values())
        self.seconds: list[float] = []
        self.peak = 0
        for _ in range(2):
            self.step()
        self.seconds.clear()

    def step(self) -> None:
        """A forward and a backward, timed, and its peak."""
        torch.manual_seed(0)
        before = process_bytes()[0]
        reset_peak()
        began = time.process_time()
        self.run(self.batch).backward()
        self.seconds.append(time.process_time() - began)
        self.peak = process_bytes()[1] - before + self.bytes
        self.model.zero_grad()


def _tensors(batch: Any) -> list[torch.Tensor]:
    return list(batch.values()) if isinstance(batch, dict) else [batch]


def measure(name: str, rounds: int, shares: list[float]) -> tuple[list[dict[str, Any]], bool]:
    """Rows of a model, and whether its plans are monotone over the budgets."""
    torch.manual_seed(0)
    built = MODELS[name]()
    recorder = Recorder()
    options = {"custom_partitioner_fn": recorder}
    trainers: dict[str, tuple[int | None, int | None, Trainer]] = {}

    def ours(mode: str, budget: int) -> None:
        index = recorder.within(budget)
        if index is not None:
            recorder.index = index
            trainer = Trainer(built, options=options)
            trainers[mode] = budget, recorder.peaks[index], trainer

    first = Trainer(built, options=options)
    top, least = recorder.peaks[0], min(recorder.peaks[0], recorder.peaks[-1])
    trainers["Inductor's own choice"] = top, top, first
    budgets = [least + k * (top - least) // (BUDGETS - 1) for k in range(BUDGETS)]
    chosen = [recorder.within(budget) for budget in budgets]
    planned = [recorder.peaks[i] for i in chosen if i is not None]
    monotone = len(planned) == BUDGETS and planned == sorted(planned)
    within = all(peak <= budget for peak, budget in zip(planned, budgets, strict=False))
    ours("least", least)
    ours("middle", budgets[BUDGETS // 2])
    for share in shares:
        with torch._functorch.config.patch(activation_memory_budget=share):
            peer = Trainer(built)
        trainers[f"share {share}"] = None, None, peer
        ours(f"at share {share}", peer.peak)
    for _ in range(rounds):
        for _, _, trainer in trainers.values():
            trainer.step()
    rows = []
    for mode, (budget, plan, trainer) in trainers.items():
        ratios = [own / base for own, base in zip(trainer.seconds, first.seconds, strict=True)]
        rows.append(
            {
                "model": name,
                "mode": mode,
                "budget": budget,
                "planned": plan,
                "peak": trainer.peak,
                "ratio": statistics.median(ratios),
                "held": budget is None or trainer.peak <= budget + TOLERANCE,
            }
        )
    return rows, monotone and within


MB = scaled(1e-6, ".2f")
COLUMNS = (
    *("model", "mode", Column("budget", "asked MB", MB), Column("planned", "planned MB", MB)),
    Column("peak", "measured MB", MB),
    Column("ratio", "CPU ÷ own choice", ".3f"),
    Column("held", form=lambda held: "within" if held else "BEYOND"),
)


def main() -> int:
    """Returns 1 unless all budgets held and all plans are monotone."""
    command = parser(__doc__)
    command.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--shares", type=float, nargs="*", default=[0.5, 0.2])
    asked: argparse.Namespace = command.parse_args()
    torch.set_num_threads(1)
    process_bytes()  # from here on every allocation is counted
    report = Report(*COLUMNS, progress=True)
    held = True
    for name in asked.model:
        rows, monotone = measure(name, asked.rounds, asked.shares)
        print(f"{name}: {BUDGETS} budgets, {'monotone' if monotone else 'NOT MONOTONE'}")
        held &= monotone and all(row["held"] for row in rows)
        for row in rows:
            report.add(**row)
    report.finish(asked.csv)
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())
