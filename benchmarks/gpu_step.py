"""The checks of the runtime on a CUDA device, in one command and under five minutes on an H200.

    python -m benchmarks.gpu_step [--checks gpt2-fp32,gpt2-bf16,resnet50,graph]

GPT-2 (12 layers, width 768, batch 8 x 512, dropout 0.1; fp32 and bf16 autocast) and ResNet-50
(batch 64 of 224 x 224) train in eager, as AOTAutograd's joint graph op by op, and under budgets. A
step of ours must give the joint graph's losses and parameters: to the last bit, or, where PyTorch
has no deterministic kernel, within 1e-6, and the table says where; its arena must be the planned
one and nothing lie outside; its peak, by our counters and by PyTorch's, be within the budget.
`graph` compares a step's numbers with those of its replay as a CUDA graph.

Exits 1 when something did not hold, 2 without a CUDA device.
"""

import argparse
import copy
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts

import torch
from rich.console import Console
from rich.table import Table

from coop_plan.planner import InfeasibleBudgetError
from coop_plan.runtime import clear_reports, reports
from coop_plan.runtime.device.arena import process_bytes, reset_peak

TOLERANCE = 1e-6

Task = tuple[torch.nn.Module, Callable[[torch.nn.Module, torch.Tensor], torch.Tensor], torch.Tensor]
"""A model, the loss of a batch, a batch; on the CPU."""


def gpt2(device: str, small: bool, bf16: bool = False, dropout: float = 0.1) -> Task:
    from transformers import GPT2Config, GPT2LMHeadModel

    given: dict[str, Any] = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    given |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    given |= {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100} if small else {}
    config = GPT2Config(**given)

    def loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            logits = model(ids).logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:].flatten())

    ids = torch.randint(0, config.vocab_size, (4, 64) if small else (8, 512))
    return GPT2LMHeadModel(config).train(), loss, ids


def resnet50(_: str, small: bool) -> Task:
    from transformers import ResNetConfig, ResNetForImageClassification

    tiny = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
    given: dict[str, Any] = {"num_labels": 100, **(tiny if small else {})}

    def loss(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
        labels = torch.arange(len(images), device=images.device)
        return torch.nn.functional.cross_entropy(model(pixel_values=images).logits, labels)

    model = ResNetForImageClassification(ResNetConfig(**given)).train()
    return model, loss, torch.randn((2, 3, 64, 64) if small else (64, 3, 224, 224))


TASKS: dict[str, Callable[[str, bool], Task]] = {
    "gpt2-fp32": gpt2,
    "gpt2-bf16": lambda device, small: gpt2(device, small, bf16=True),
    "resnet50": resnet50,
}


def bytes_and_peak(device: str) -> tuple[int, int]:
    """Bytes on the device as they were asked for, now and at the highest since it was reset."""
    if device == "cpu":
        return process_bytes()
    stats = torch.cuda.memory_stats()
    return stats["requested_bytes.all.current"], stats["requested_bytes.all.peak"]


def now(device: str) -> float:
    """Seconds, once the device is idle."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def train(device: str, task: Task, mode: str, steps: int, **compiled: Any) -> dict[str, Any]:
    """Train a copy of the model by SGD: the row of a mode, and the numbers it came to."""
    gc.collect()
    model, batch = copy.deepcopy(task[0]).to(device), task[2].to(device)
    resident = sum(t.nbytes for t in {*model.parameters(), *model.buffers(), batch})

    def step(batch: torch.Tensor) -> torch.Tensor:
        return task[1](model, batch)

    # A code object of its own: Dynamo would take what another mode compiled.
    step.__code__ = step.__code__.replace(co_name=f"step_{time.monotonic_ns()}")
    run: Any = torch.compile(step, dynamic=False, fullgraph=True, **compiled) if compiled else step
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    clear_reports()
    losses, seconds, peak = [], [], 0
    for _ in range(steps):
        arena = reports()[0].planned_arena_bytes if reports() else 0
        before = bytes_and_peak(device)[0] - arena
        reset_peak() if device == "cpu" else torch.cuda.reset_peak_memory_stats()
        began = now(device)
        loss = run(batch)
        loss.backward()
        seconds.append(now(device) - began)
        peak = resident + bytes_and_peak(device)[1] - before
        losses.append(loss.detach().cpu())
        del loss
        optimizer.step()
        optimizer.zero_grad()
    numbers = [*losses, *(value.cpu() for value in model.state_dict().values())]
    row = {"mode": mode, "numbers": numbers, "seconds": statistics.median(seconds[2:])}
    return row | {"peak": peak, "report": reports()[0] if reports() else None}


def difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """The largest, relative to its tensor's largest number or 1; 0: equal to the last bit."""
    apart = [(a.double(), b.double()) for a, b in zip(one, other, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in apart)


def check(device: str, name: str, small: bool) -> list[str]:
    """All modes of one model; what did not hold."""
    torch.manual_seed(0)
    task, steps = TASKS[name](device, small), 4 if small else 10
    eager = train(device, task, "eager", steps)
    joint = train(device, task, "joint", steps, backend="aot_eager")
    joint["difference"] = difference(joint["numbers"], eager["numbers"])  # not demanded
    rows, faults = [eager, joint], []
    for budget in ("100%", "60%", "40%", "min"):
        mode = f"coop {budget}"
        try:
            row = train(device, task, mode, steps, backend="coop", options={"budget": budget})
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, InfeasibleBudgetError):
                raise
            print(f"{name}, {mode}: {error.inner_exception}")
            continue
        report = row["report"]
        row["difference"] = difference(row["numbers"], joint["numbers"])
        held = {
            "numbers": row["difference"] <= TOLERANCE,
            "arena": report.measured_arena_bytes == report.planned_arena_bytes,
            "outside": report.outside_bytes == 0,
            "peak by our counters": report.measured_peak_bytes <= report.budget_bytes,
            "peak by PyTorch's": row["peak"] <= report.budget_bytes,
        }
        faults += [f"{name}, {mode}: {what}" for what, holds in held.items() if not holds]
        rows.append(row)
    show(name, rows)
    return faults


def capture(device: str, small: bool) -> list[str]:
    """Forward and backward of a step as a CUDA graph; what did not hold."""
    torch.manual_seed(0)
    model, loss_of, batch = gpt2(device, small, dropout=0.0)
    model, batch = model.to(device), batch.to(device)

    @torch.compile(backend="coop", dynamic=False, options={"budget": "80%"})
    def step(batch: torch.Tensor) -> Any:
        return loss_of(model, batch)

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad()
            loss = step(batch)
            loss.backward()
    torch.cuda.current_stream().wait_stream(side)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    expected = [tensor.detach().cpu() for tensor in (loss, *gradients)]
    model.zero_grad()
    del loss, gradients  # with the autograd graph, which belongs to the side stream
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(batch)
        loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    for tensor in found:
        tensor.zero_()
    began = now(device)
    for _ in range(10):
        graph.replay()
    took = (now(device) - began) * 100
    apart = difference([tensor.cpu() for tensor in found], expected)
    print(f"graph: gpt2 without dropout at 80%: a replay takes {took:.2f} ms, difference {apart}")
    return [] if apart <= TOLERANCE else ["graph: numbers of the replay"]


def show(name: str, rows: list[dict[str, Any]]) -> None:
    """The rows of one model as a table on stdout."""
    table = Table(title=f"{name}: forward and backward of one step")
    heads = ("mode", "peak MB", "budget MB", "arena MB", "step ms", "x eager", "x joint", "planned")
    for head in (*heads, "in step", "difference"):
        table.add_column(head, justify="left" if head == "mode" else "right")
    for row in rows:
        report, apart = row["report"], row.get("difference")
        sizes, overheads = ["", ""], ["", ""]
        if report is not None:
            sizes = [f"{b / 1e6:.2f}" for b in (report.budget_bytes, report.measured_arena_bytes)]
            overheads = [f"{report.planned_overhead:.1%}", f"{report.measured_overhead or 0:.1%}"]
        ratios = [f"{row['seconds'] / base['seconds']:.3f}" for base in rows[:2]]
        figures = [f"{row['peak'] / 1e6:.2f}", *sizes, f"{row['seconds'] * 1e3:.2f}", *ratios]
        told = "" if apart is None else f"{apart:.1e}" if apart else "none"
        table.add_row(row["mode"], *figures, *overheads, told)
    Console(width=130).print(table)


def main() -> int:
    """Run the checks; the exit code says whether all held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checks", default=",".join([*TASKS, "graph"]))
    parser.add_argument("--device", choices=("cuda", "cpu"), help=argparse.SUPPRESS)  # for tests
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)  # for tests
    arguments = parser.parse_args()
    checks, small = arguments.checks.split(","), arguments.small
    if unknown := set(checks) - {*TASKS, "graph"}:
        parser.error(f"no such checks: {', '.join(unknown)}")
    if arguments.device is None and not torch.cuda.is_available():
        print("no CUDA device here: nothing was checked")
        return 2
    device = arguments.device or "cuda"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    process_bytes()  # from here on every allocation on the CPU is counted
    print(torch.cuda.get_device_name() if device == "cuda" else "CPU", torch.__version__)
    began, faults = time.perf_counter(), []
    for name in checks:
        faults += capture(device, small) if name == "graph" else check(device, name, small)
    took = f"{time.perf_counter() - began:.0f} s"
    print("\n  ".join([f"{took}; NOT HELD:", *faults]) if faults else f"{took}; all held")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
