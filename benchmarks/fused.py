"""Step time and memory with eager kernels, with fused ones, and with Inductor, on the CPU.

    python -m benchmarks.fused [--model llama-2 ...] [--rounds 7] [--csv FILE]

Each mode trains in a process of its own, and one process runs at a time: three steps a turn, the
first not counted. Times are CPU times of forward and backward, as ratios to eager's of the same
turn; medians over the turns. Both kinds of kernels get the same bytes: 100 % and 60 % of what
keep-everything takes with eager kernels. Keep-everything and smallest budgets are those of each
kind, parameters included. Exits 1 if a step exceeds its budget or allocates outside its plan.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import models, runtime_peers
from benchmarks.report import Column, Report, parser, scaled
from coop_plan.runtime import reports

STEPS = 3
KINDS = ("eager", "fused")
SHARES = (100, 60)


def unet() -> models.Built:
    """U-Net of width 16, batch 4 of 64 x 64 pixels."""
    labels = torch.randint(0, 5, (4, 64, 64))
    pixels = torch.randn(4, 3, 64, 64)
    return models.UNet(16), models.own_loss, {"pixels": pixels, "labels": labels}


def resnet() -> models.Built:
    """Bottleneck ResNet of widths 64 to 256, batch 8 of 64 x 64 pixels."""
    batch = {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.arange(8)}
    stages = {"hidden_sizes": [64, 128, 256], "depths": [2, 2, 2], "embedding_size": 32}
    kind = {"num_labels": 10, "problem_type": "single_label_classification"}
    return models.of("ResNet", "ForImageClassification", batch, **stages, **kind)


def vit() -> models.Built:
    """ViT of 6 layers of width 192, batch 8 of 128 x 128 pixels in patches of 8 x 8."""
    batch = {"pixel_values": torch.randn(8, 3, 128, 128), "labels": torch.arange(8)}
    sizes = {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 3}
    sizes |= {"intermediate_size": 768, "image_size": 128, "patch_size": 8}
    kind = {"num_labels": 10, "problem_type": "single_label_classification"}
    return models.of("ViT", "ForImageClassification", batch, **sizes, **kind)


def moe() -> models.Built:
    """Mixtral of 2 layers of width 256 with 4 experts, 4 x 256 tokens."""
    ids = torch.randint(0, 2000, (4, 256))
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 4}
    sizes |= {"vocab_size": 2000, "max_position_embeddings": 256, "use_cache": False}
    return models.of("Mixtral", "ForCausalLM", {"input_ids": ids, "labels": ids}, **sizes)


MODELS: dict[str, Callable[[], Any]] = {
    "llama-2": lambda: runtime_peers.llama(2),
    "llama-8": lambda: runtime_peers.llama(8),
    "gpt2-2": lambda: runtime_peers.gpt2(2),
    "unet": unet,
    "resnet": resnet,
    "vit": vit,
    "moe": moe,
}


def serve(name: str, mode: str, budget: str) -> None:
    """Train in this process, in a mode: "torch", "inductor", or a kind of kernels.

    A line of input starts a turn, and a line of JSON has its figures.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss_of, batch = MODELS[name]()
    step = loss_of(model)
    if mode == "inductor":
        step = torch.compile(step, dynamic=False)
    elif mode != "torch":
        options = {"budget": int(budget) if budget.isdigit() else budget, "kernels": mode}
        step = torch.compile(step, backend="coop", dynamic=False, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in sys.stdin:
        seconds = []
        for _ in range(STEPS):
            began = time.process_time()
            step(batch).backward()
            seconds.append(time.process_time() - began)
            optimizer.step()
            optimizer.zero_grad()
        turn: dict[str, Any] = {"seconds": statistics.mean(seconds[1:])}
        if reports():
            report = reports()[0]
            names = ("budget_bytes", "measured_peak_bytes", "outside_bytes", "kernels")
            turn |= {name: getattr(report, name) for name in names}
        print(json.dumps(turn), flush=True)


class Worker:
    """A mode in a process of its own, which `module` serves."""

    def __init__(
        self, model: str, mode: str, budget: object = "", module: str = "benchmarks.fused"
    ) -> None:
        command = [sys.executable, "-m", module, "--serve", model, mode, str(budget)]
        root = Path(__file__).parents[1]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, text=True)
        self.seconds: list[float] = []
        self.turn()  # compiles
        self.seconds.clear()

    def turn(self) -> dict[str, Any]:
        """Run some steps; returns their figures."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.last: dict[str, Any] = json.loads(self._process.stdout.readline())
        self.seconds.append(self.last["seconds"])
        return self.last

    def end(self) -> dict[str, Any]:
        """End the process; returns the figures of its last turn."""
        self._process.communicate()
        return self.last


def measure(model: str, rounds: int) -> list[dict[str, Any]]:
    """Rows of a model, one for each budget."""
    found = {
        (kind, budget): Worker(model, kind, budget).end()["budget_bytes"]
        for kind in KINDS
        for budget in ("100%", "min")
    }
    budgets = {share: found["eager", "100%"] * share // 100 for share in SHARES}
    workers = {mode: Worker(model, mode) for mode in ("torch", "inductor")}
    for kind in KINDS:
        for share, budget in budgets.items():
            workers[f"{kind} {share}"] = Worker(model, kind, budget)
    for _ in range(rounds):
        for worker in workers.values():
            worker.turn()
    ended = {mode: worker.end() for mode, worker in workers.items()}

    def ratio(mode: str) -> float:
        pairs = zip(workers[mode].seconds, workers["torch"].seconds, strict=True)
        return statistics.median(own / base for own, base in pairs)

    rows = []
    for share, budget in budgets.items():
        plans = [ended[f"{kind} {share}"] for kind in KINDS]
        within = all(
            plan["measured_peak_bytes"] <= budget and not plan["outside_bytes"] for plan in plans
        )
        rows.append(
            {
                "model": model,
                "budget": f"{share} %",
                "bytes": budget,
                "torch": statistics.median(workers["torch"].seconds),
                "inductor": ratio("inductor"),
                "eager": ratio(f"eager {share}"),
                "fused": ratio(f"fused {share}"),
                "kernels": plans[1]["kernels"],
                **{f"{kind}_all": found[kind, "100%"] for kind in KINDS},
                **{f"{kind}_least": found[kind, "min"] for kind in KINDS},
                "held": within,
            }
        )
    return rows


MB = scaled(1e-6, ".1f")
COLUMNS = (
    *("model", "budget", Column("bytes", "MB", MB), Column("torch", "eager s", ".3f")),
    Column("inductor", "Inductor ÷ eager", ".3f"),
    Column("eager", "eager kernels ÷ eager", ".3f"),
    Column("fused", "fused ÷ eager", ".3f"),
    Column("kernels", "plan taken"),
    Column("eager_all", "keep all MB", MB),
    Column("fused_all", "fused", MB),
    Column("eager_least", "smallest MB", MB),
    Column("fused_least", "fused", MB),
    Column("held", form=lambda held: "within" if held else "BEYOND"),
)


def arguments(
    command: argparse.ArgumentParser, serve: Callable[[str, str, str], None]
) -> argparse.Namespace | None:
    """Arguments of a command; None in the process of a `Worker`, after it has served."""
    command.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    asked = command.parse_args()
    if not asked.serve:
        return asked
    serve(*asked.serve)
    return None


def main() -> int:
    """Returns 1 unless every step held."""
    command = parser(__doc__)
    command.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    command.add_argument("--rounds", type=int, default=7)
    asked = arguments(command, serve)
    if asked is None:
        return 0
    report = Report(*COLUMNS, progress=True)
    for name in asked.model:
        for row in measure(name, asked.rounds):
            report.add(**row)
    report.finish(asked.csv)
    return int(not all(row["held"] for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
