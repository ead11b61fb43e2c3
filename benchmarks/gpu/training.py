"""Training of a task in a mode: its numbers, its cost, and the check of our guarantees."""

import contextlib
import copy
import fcntl
import gc
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.tasks import Task
from coop_plan.planner import InfeasibleBudgetError
from coop_plan.runtime import clear_reports, reports
from coop_plan.runtime.device.arena import process_bytes, reset_peak

TOLERANCE = 1e-6
MEGA = 1e6

Row = dict[str, Any]
Result = tuple[list[Row], list[str]]
"""Rows, one a mode, ready for JSON except `numbers`; and descriptions of the faults."""

TURNS = "COOP_GPU_TURNS"
"""Environment variable with the folder of the locks that parallel checks share."""


@contextlib.contextmanager
def turn(name: str, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold the lock of this name, exclusively or shared (`LOCK_SH`)."""
    folder = os.environ.get(TURNS)
    if folder is None:
        yield
        return
    with Path(folder, name).open("w") as file:
        fcntl.flock(file, how)
        yield


def alone() -> contextlib.AbstractContextManager[None]:
    """Exclusive use of the device, so that nothing disturbs timed steps."""
    return turn("device")


def memory(how: int) -> contextlib.AbstractContextManager[None]:
    """Lock of the device's memory: shared by checks, exclusive for one that needs all of it."""
    return turn("memory", how)


def bytes_and_peak(device: str) -> tuple[int, int]:
    """Requested bytes on the device: now, and the peak since the last reset."""
    if device == "cpu":
        return process_bytes()
    stats = torch.cuda.memory_stats()
    return stats["requested_bytes.all.current"], stats["requested_bytes.all.peak"]


def now(device: str) -> float:
    """Seconds, once the device is idle."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def fresh(device: str) -> None:
    """Release everything of the mode before, its arena included."""
    clear_reports()
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def train(device: str, task: Task, mode: str, steps: int, micro: int = 1, **compiled: Any) -> Row:
    """As `_train` with deterministic kernels; if there are none, with others from then on."""
    try:
        return _train(device, task, mode, steps, micro, **compiled)
    except RuntimeError as error:
        if "deterministic implementation" not in str(error):
            raise
        torch.use_deterministic_algorithms(True, warn_only=True)
        print(f"{mode}: {str(error).split('.')[0]}", flush=True)
    return _train(device, task, mode, steps, micro, **compiled)


def _train(device: str, task: Task, mode: str, steps: int, micro: int = 1, **compiled: Any) -> Row:
    """Train a copy of the model by SGD; returns the row of the mode with its numbers.

    `micro` backwards go into each step of the optimizer. `host` is the time until all work
    is queued on the device.
    """
    fresh(device)
    model, batch = copy.deepcopy(task[0]).to(device), task[2].to(device)
    resident = sum(t.nbytes for t in {*model.parameters(), *model.buffers(), batch})

    def step(batch: torch.Tensor) -> torch.Tensor:
        return task[1](model, batch)

    # Its own code object: otherwise Dynamo reuses the code compiled for another mode.
    step.__code__ = step.__code__.replace(co_name=f"step_{time.monotonic_ns()}")
    run: Any = torch.compile(step, dynamic=False, fullgraph=True, **compiled) if compiled else step
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    losses, seconds, host, peaks = [], [], [], []
    for number in range(steps):
        if number < 2:  # later, CUDA graphs have memory of the step's, too
            arena = reports()[0].planned_arena_bytes if reports() else 0
            before = bytes_and_peak(device)[0] - arena
        reset_peak() if device == "cpu" else torch.cuda.reset_peak_memory_stats()
        with alone() if number else contextlib.nullcontext():  # the first one compiles
            began = now(device)
            for _ in range(micro):
                loss = run(batch)
                loss.backward()
            host.append(time.perf_counter() - began)
            seconds.append(now(device) - began)
        peaks.append(resident + bytes_and_peak(device)[1] - before)
        losses.append(loss.detach().cpu())
        del loss
        optimizer.step()
        optimizer.zero_grad()
    numbers = [*losses, *(value.cpu() for value in model.state_dict().values())]
    row = {"mode": mode, "numbers": numbers, "seconds": statistics.median(seconds[2:])}
    row |= {"host": statistics.median(host[2:]), "peak": peaks[-1], "first_peak": peaks[0]}
    return row | reported()


def reported() -> Row:
    """Figures of the step's report; empty if the step is not planned."""
    report = reports()[0] if reports() else None
    if report is None:
        return {}
    fields = {"budget": "budget_bytes", "arena": "measured_arena_bytes"}
    fields |= {"planned": "planned_overhead", "in_step": "measured_overhead"}
    fields |= {"outside": "outside_bytes", "outside_plan": "outside_plan"}
    fields |= {"own_peak": "measured_peak_bytes", "profiled_s": "profile_seconds"}
    fields |= {"planned_s": "plan_seconds", "compiled_s": "compile_seconds"}
    return {name: getattr(report, field) for name, field in fields.items()} | {
        "arena_as_planned": report.measured_arena_bytes == report.planned_arena_bytes,
        "replayed": report.replayed_steps,
        "recomputed": report.plan.recomputed_ops,
        "swapped": report.plan.swapped_bytes,
        "copies": sum(step.do in ("offload", "prefetch") for step in report.plan.steps),
        "ops": len(report.graph.ops),
    }


def difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Largest difference relative to its tensor's largest number or 1; 0: equal to the last bit."""
    apart = [(a.double(), b.double()) for a, b in zip(one, other, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in apart)


def held(row: Row, *references: Row, tolerance: float = TOLERANCE) -> list[str]:
    """Returns the broken guarantees of a step; its numbers must equal one reference's."""
    row["difference"] = min(difference(row["numbers"], one["numbers"]) for one in references)
    promises = {
        "numbers": row["difference"] <= tolerance,
        "arena": row["arena_as_planned"],
        "outside": row["outside"] == 0,
        "peak by our counters": row["own_peak"] <= row["budget"],
        "peak by PyTorch's": row["peak"] <= row["budget"],
    }
    faults = [f"{row['mode']}: {what}" for what, holds in promises.items() if not holds]
    if row["outside"] and row["outside_plan"]:
        faults.append(f"{row['mode']}: {row['outside_plan']}")
    return faults


def within(device: str, task: Task, mode: str, steps: int, micro: int = 1, **options: Any) -> Row:
    """`train` under a budget; a row with a note if it cannot be met."""
    try:
        return train(device, task, mode, steps, micro, backend="coop", options=options)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, InfeasibleBudgetError):
            raise
        return {"mode": mode, "note": str(error.inner_exception).splitlines()[0]}
