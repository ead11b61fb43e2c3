"""Training a task in a mode: what it came to, what it took, and whether that is as promised."""

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
"""Figures ready for JSON but for `numbers`, one row a mode; and what did not hold, in words."""

TURNS = "COOP_GPU_TURNS"
"""Environment variable with a folder by which checks side by side take turns."""


@contextlib.contextmanager
def turn(name: str, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold what is called so alone, or with others (`LOCK_SH`)."""
    folder = os.environ.get(TURNS)
    if folder is None:
        yield
        return
    with Path(folder, name).open("w") as file:
        fcntl.flock(file, how)
        yield


def alone() -> contextlib.AbstractContextManager[None]:
    """The device for oneself: checks plan side by side, and nothing disturbs what one times."""
    return turn("device")


def memory(how: int) -> contextlib.AbstractContextManager[None]:
    """The device's memory: every check shares it; who needs all of it has it alone."""
    return turn("memory", how)


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


def fresh(device: str) -> None:
    """Nothing of the mode before is left, its arena neither."""
    clear_reports()
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def train(device: str, task: Task, mode: str, steps: int, micro: int = 1, **compiled: Any) -> Row:
    """As `_train`, with deterministic kernels; where there are none, with others from here on."""
    try:
        return _train(device, task, mode, steps, micro, **compiled)
    except RuntimeError as error:
        if "deterministic implementation" not in str(error):
            raise
        torch.use_deterministic_algorithms(True, warn_only=True)
        print(f"{mode}: {str(error).split('.')[0]}", flush=True)
    return _train(device, task, mode, steps, micro, **compiled)


def _train(device: str, task: Task, mode: str, steps: int, micro: int = 1, **compiled: Any) -> Row:
    """Train a copy of the model by SGD: the row of a mode, and the numbers it came to.

    `micro` backwards go into each step of the optimizer. `host` is the time until everything was
    handed to the device.
    """
    fresh(device)
    model, batch = copy.deepcopy(task[0]).to(device), task[2].to(device)
    resident = sum(t.nbytes for t in {*model.parameters(), *model.buffers(), batch})

    def step(batch: torch.Tensor) -> torch.Tensor:
        return task[1](model, batch)

    # A code object of its own: Dynamo would take what another mode compiled.
    step.__code__ = step.__code__.replace(co_name=f"step_{time.monotonic_ns()}")
    run: Any = torch.compile(step, dynamic=False, fullgraph=True, **compiled) if compiled else step
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    losses, seconds, host, peaks = [], [], [], []
    for number in range(steps):
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
    """What the step says of itself, if it is one of ours."""
    report = reports()[0] if reports() else None
    if report is None:
        return {}
    return {
        "budget": report.budget_bytes,
        "arena": report.measured_arena_bytes,
        "planned": report.planned_overhead,
        "in_step": report.measured_overhead,
        "outside": report.outside_bytes,
        "outside_plan": report.outside_plan,
        "own_peak": report.measured_peak_bytes,
        "arena_as_planned": report.measured_arena_bytes == report.planned_arena_bytes,
        "recomputed": report.plan.recomputed_ops,
        "swapped": report.plan.swapped_bytes,
        "copies": sum(step.do in ("offload", "prefetch") for step in report.plan.steps),
        "ops": len(report.graph.ops),
        "profiled_s": report.profile_seconds,
        "planned_s": report.plan_seconds,
        "compiled_s": report.compile_seconds,
    }


def difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """The largest, relative to its tensor's largest number or 1; 0: equal to the last bit."""
    apart = [(a.double(), b.double()) for a, b in zip(one, other, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in apart)


def held(row: Row, *references: Row, tolerance: float = TOLERANCE) -> list[str]:
    """What of a step's promises did not hold; its numbers must be those of one reference."""
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
    """`train` under a budget; where it cannot be met, a row that says so."""
    try:
        return train(device, task, mode, steps, micro, backend="coop", options=options)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, InfeasibleBudgetError):
            raise
        return {"mode": mode, "said": str(error.inner_exception).splitlines()[0]}
