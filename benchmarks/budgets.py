"""Budget asked, budget got: peaks and step times of all means to limit memory, on the CPU.

    python -m benchmarks.budgets [--model llama-2 ...] [--share 0.5 ...] [--mode coop-fused ...]
        [--rounds 3] [--csv FILE] [--output docs]

Each mode trains in a process of its own and takes turns with a process of eager steps. Ratios are
of CPU times of forward and backward of one turn, medians over the turns. A peak is counted from
outside, between the start of a forward and the end of its backward; parameters, buffers and batch
are included.

Bytes asked for with a share s are R + s (P - R). P is the peak of Inductor's default, R are the
bytes of parameters, buffers and batch. `activation_memory_budget` gets s, all that take bytes get
these. Checkpoints cannot be asked for bytes. With --output the page budgets.md and its plot
budgets.svg are written to a folder. Exits 1 if a mode that takes bytes exceeds them.
"""

import datetime
import json
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from benchmarks import fused, models
from benchmarks.report import Column, Report, parser, scaled, table
from coop_plan.runtime.device.arena import process_bytes, reset_peak
from coop_plan.runtime.execute.arena_pool import release
from coop_plan.runtime.inductor_budget.budget import TOLERANCE, InductorBudget

SHARES = (1.0, 0.5, 0.3, 0.1)
FIXED = ("eager", "checkpoint", "selective")
SHARED = ("inductor-dp", "inductor-greedy")
IN_BYTES = ("coop-eager", "coop-fused", "InductorBudget")

LAYERS = ("LlamaDecoderLayer", "MixtralDecoderLayer", "GPT2Block", "ResNetBottleNeckLayer")
"""Classes of the layers that are checkpointed; of a network without them, its `Sequential`s."""

SAVED = ("mm", "addmm", "bmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu")
"""Ops whose results selective checkpoints save."""


class Small(nn.Module):
    """Two layers for tests."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]
        self.layers = nn.ModuleList(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def small() -> models.Built:
    return Small(), models.own_loss, {"x": torch.randn(512, 64)}


DEFAULT = ("unet", "resnet", "llama-2", "moe", "gpt2-2")
MODELS: dict[str, Callable[[], Any]] = {
    **{name: fused.MODELS[name] for name in DEFAULT},
    "small": small,
}


def checkpointed(model: nn.Module, *, selective: bool) -> None:
    """Recompute layers in the backward, but for results of `SAVED` if selective."""
    ops = [getattr(torch.ops.aten, name).default for name in SAVED]

    def policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    given = {"context_fn": contexts} if selective else {}
    layers = [part for part in model.modules() if type(part).__name__ in LAYERS]
    for layer in layers or [part for part in model.modules() if isinstance(part, nn.Sequential)]:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **given)


def compiled(step: Callable[..., Any], mode: str, asked: str) -> Callable[..., Any]:
    """A step in a mode; `asked` is a share or bytes."""
    if mode in SHARED:
        torch._functorch.config.activation_memory_budget = float(asked)
        torch._functorch.config.activation_memory_budget_solver = mode.removeprefix("inductor-")
        return torch.compile(step, dynamic=False)
    if mode == "InductorBudget":
        options: dict[str, Any] = {"custom_partitioner_fn": InductorBudget(int(asked))}
        return torch.compile(step, dynamic=False, options=options)
    if mode in IN_BYTES:
        options = {"budget": int(asked), "kernels": mode.removeprefix("coop-")}
        return torch.compile(step, backend="coop", dynamic=False, options=options)
    return step


def serve(name: str, mode: str, asked: str) -> None:
    """Train in this process. A line of input starts a turn, a line of JSON has its figures."""
    torch.set_num_threads(1)
    process_bytes()  # from here on every allocation is counted
    torch.manual_seed(0)
    model, loss_of, batch = MODELS[name]()
    if mode in FIXED[1:]:
        checkpointed(model, selective=mode == "selective")
    step = compiled(loss_of(model), mode, asked)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    inputs = batch.values() if isinstance(batch, dict) else [batch]
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for value in (*model.parameters(), *model.buffers(), *inputs)
    }
    resident, peak = sum(storages.values()), 0
    for turn, _ in enumerate(sys.stdin):
        seconds = []
        for number in range(fused.STEPS):
            release()  # a resting arena is memory
            before = process_bytes()[0]
            reset_peak()
            began = time.process_time()
            try:
                step(batch).backward()
            except Exception as error:
                print(json.dumps({"seconds": 0.0, "refused": True, "enough": enough(error)}))
                return
            seconds.append(time.process_time() - began)
            if turn or number:  # after the first step, which compiles
                peak = max(peak, process_bytes()[1] - before + resident)
            optimizer.step()
            optimizer.zero_grad()
        figures = {"seconds": statistics.mean(seconds[1:]), "peak": peak, "resident": resident}
        print(json.dumps(figures), flush=True)


def enough(error: BaseException) -> int:
    """Bytes that would be enough, as an error or one of its causes names them."""
    named = re.search(r"(?:least budget is|it meets) (\d+) bytes", str(error))
    if named:
        return int(named[1])
    behind = error.__cause__ or error.__context__
    if behind is None:
        raise error
    return enough(behind)


def measure(
    model: str, modes: Iterable[str], shares: Iterable[float], rounds: int
) -> Iterable[dict[str, Any]]:
    """Rows of a model."""
    worker = partial(fused.Worker, model, module="benchmarks.budgets")
    top = worker("inductor-dp", 1.0).end()
    eager = worker("eager", "-")

    def row(mode: str, share: float | None) -> dict[str, Any]:
        asked = None
        if share is not None:
            asked = round(top["resident"] + share * (top["peak"] - top["resident"]))
        given = asked if mode in IN_BYTES else share if mode in SHARED else "-"
        other = worker(mode, given)
        made = {"model": model, "mode": mode, "share": share, "asked": asked}
        if other.last.get("refused"):
            return made | {"enough": other.end()["enough"], "held": True}
        ratios = [other.turn()["seconds"] / eager.turn()["seconds"] for _ in range(rounds)]
        got = other.end()["peak"]
        held = mode not in IN_BYTES or asked is None or got <= asked + TOLERANCE
        return made | {"got": got, "ratio": statistics.median(ratios), "held": held}

    for mode in modes:
        for share in shares if mode in SHARED + IN_BYTES else (None,):
            yield row(mode, share)
    eager.end()


MB = scaled(1e-6, ".1f")
COLUMNS = (
    *("model", "mode", Column("share", form=".1f"), Column("asked", "asked MB", MB)),
    Column("got", "got MB", MB),
    Column("ratio", "CPU ÷ eager", ".3f"),
    Column("enough", "refused, enough MB", MB),
    Column("held", form=lambda held: "" if held else "BEYOND"),
)

PAGE = """# Budget asked, budget got

Bytes that a training step takes, and the bytes that were asked for. This page is of {date},
{machine}, one thread, PyTorch {version}, by

    {command}

It has {ran} of the {all} models of `make budgets`. Each mode ran in a process of its own, in turns
with eager steps. MB count parameters, buffers and the batch; the peak lies between the start of a
forward and the end of its backward. Times are CPU times of forward and backward ÷ eager's.

![Bytes asked, bytes got, and step time](budgets.svg)

- **asked**: R + s (P - R) for a share s. P is the peak of Inductor's default, R are the bytes of
  parameters, buffers and batch. Modes that take bytes get these bytes.
- **inductor-dp**, **inductor-greedy**: `torch.compile` with `activation_memory_budget = s` and this
  solver. PyTorch documents no bytes for s. The solver `ilp` needs SciPy and is left out.
- **coop-eager**, **coop-fused**: `backend="coop"` with [eager's or fused kernels](fused.md).
- **InductorBudget**: [our saved set](inductor-budget.md), Inductor's kernels.
- **checkpoint**: `torch.utils.checkpoint` on every layer. **selective**: the same, but results of
  products, convolutions and attention are saved. Neither can be asked for bytes.
- "refused": the mode raised an error, which names these bytes as enough.
- Hooks that offload to the host are left out: on a CPU the host's memory is the device's.

{measured}

## Published

{published}

The four sources were read on 29 November 2026. They are of GPUs and of other networks, so only the
distance between asked and got compares.
"""

PUBLISHED = (
    (
        "[Rockmate, issue 4](https://github.com/topal-team/rockmate/issues/4)",
        "GPT-2 medium, a tenth of 10.21 GB",
        "1.01 GB expected",
        "5.07 GB",
    ),
    (
        "[MegEngine, issue 482](https://github.com/MegEngine/MegEngine/issues/482)",
        "DTR's eviction threshold, ResNet-50",
        "2.5 GB",
        "about 6 GB",
    ),
    (
        "[torchtitan, pull request 4636](https://github.com/pytorch/torchtitan/pull/4636)",
        "greedy policy",
        "69 GiB",
        "68.86 GiB",
    ),
    (
        "[PyTorch, issue 197838](https://github.com/pytorch/pytorch/issues/197838)",
        "`activation_memory_budget`, Llama",
        "0.05 instead of 0.15",
        "870.6 MB more",
    ),
)


def write(folder: Path, rows: list[dict[str, Any]], command: str) -> None:
    """Write the page and its plot."""
    columns = [column for column in map(_column, COLUMNS) if column.field != "held"]
    heads = [column.title for column in columns]
    text = PAGE.format(
        command=command,
        date=f"{datetime.datetime.now(datetime.UTC):%d %B %Y}",
        machine=_machine(),
        ran=len({row["model"] for row in rows} & set(DEFAULT)),
        all=len(DEFAULT),
        version=torch.__version__,
        measured=table(heads, [[column.cell(row) for column in columns] for row in rows]),
        published=table(("source", "of", "asked", "got"), PUBLISHED),
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "budgets.md").write_text(text)
    draw(folder / "budgets.svg", rows)
    print(f"written: {folder / 'budgets.md'}, {folder / 'budgets.svg'}")


def _column(column: Column | str) -> Column:
    return Column(column) if isinstance(column, str) else column


def _machine() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return f"{len(names)} cores of {names[0]}" if names else platform.machine()


MARKS = dict(zip(SHARED + IN_BYTES, "o^sDP", strict=True))
LINES = dict(zip(FIXED, ("-", "--", ":"), strict=True))


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Bytes asked and got by model; the colour is the step's time ÷ eager's."""
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    matplotlib.rcParams["svg.hashsalt"] = "budgets"
    names = list(dict.fromkeys(row["model"] for row in rows))
    shades = ScalarMappable(Normalize(0.7, 1.6), "viridis_r")
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 3).flat
    for name, axis in zip(names, axes, strict=False):
        points = [row for row in rows if row["model"] == name and row.get("got") is not None]
        asked = [row for row in points if row["asked"] is not None]
        limits = [row["asked"] / 1e6 for row in asked] or [0.0]
        axis.axline((limits[0], limits[0]), slope=1, color="grey", linewidth=0.8)
        for row in asked:
            drawn = {"marker": MARKS[row["mode"]], "s": 45, "zorder": 2}
            color = shades.to_rgba(row["ratio"])
            axis.scatter(row["asked"] / 1e6, row["got"] / 1e6, color=color, **drawn)
        for row in points:
            if row["mode"] in LINES:
                axis.axhline(row["got"] / 1e6, color="tan", linestyle=LINES[row["mode"]])
        axis.set(title=name, xlabel="MB asked", ylabel="MB got")
    for axis in axes:  # those without a model
        axis.axis("off")
    style: dict[str, Any] = {"color": "grey", "linestyle": ""}
    entries = [Line2D([], [], marker=mark, label=mode, **style) for mode, mark in MARKS.items()]
    entries += [Line2D([], [], color="tan", linestyle=k, label=mode) for mode, k in LINES.items()]
    figure.axes[-1].legend(handles=entries, loc="center", frameon=False)
    figure.colorbar(shades, ax=figure.axes, label="CPU time ÷ eager", shrink=0.6)
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Returns 1 unless every mode that takes bytes held them."""
    command = parser(__doc__)
    command.add_argument("--model", choices=MODELS, nargs="+", default=list(DEFAULT))
    modes = FIXED + SHARED + IN_BYTES
    command.add_argument("--mode", choices=modes, nargs="+", default=list(modes))
    command.add_argument("--share", type=float, nargs="+", default=list(SHARES))
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--output", type=Path, help="folder for the page and its plot")
    asked = fused.arguments(command, serve)
    if asked is None:
        return 0
    report = Report(*COLUMNS, progress=True)
    for name in asked.model:
        for row in measure(name, asked.mode, asked.share, asked.rounds):
            report.add(**row)
        if asked.output:  # after each model: a run takes an hour
            write(
                asked.output, report.rows, " ".join(["python -m benchmarks.budgets", *sys.argv[1:]])
            )
    report.finish(asked.csv)
    return int(not all(row["held"] for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
