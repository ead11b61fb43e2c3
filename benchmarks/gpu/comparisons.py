"""Comparisons of a device with the papers and with our models: methods, sizes, links, times."""

import copy
import fcntl
import gc
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from benchmarks.gpu.tasks import TASKS, llama_of
from benchmarks.gpu.training import (
    MEGA,
    Result,
    Row,
    fresh,
    held,
    memory,
    reported,
    train,
    within,
)
from coop_plan.runtime import reports
from coop_plan.runtime.device.arena import Memory
from coop_plan.runtime.offline_capture.calibrate import calibrate
from coop_plan.runtime.offline_capture.roofline import Roofline
from coop_plan.runtime.offline_capture.target import capture


def methods(device: str, small: bool) -> Result:
    """Coop's comparison (its section 5) in seconds: BERT-Large at half of its peak."""
    torch.manual_seed(0)
    task, steps = TASKS["bert-large"](small), 4 if small else 7
    rows, faults = [train(device, task, "eager", steps)], []
    for method in ("coop-offline", "coop", "dte", "dtr"):
        row = within(device, task, f"{method} 50%", steps, budget="50%", method=method)
        # The first plan's numbers are compared with the joint graph's by the check of the model.
        references = [each for each in rows if "numbers" in each]
        faults += [] if "note" in row else held(row, *references)
        rows.append(row)
    return rows, faults


def roofline(device: str, small: bool) -> Result:
    """Op times modelled with a device file of `calibrate`, compared with measured ones."""
    spec = calibrate(device)
    rows: list[Row] = [{"mode": "device file", "note": msgspec.json.encode(spec).decode()}]
    for name in TASKS:
        if name == "gpt2-fp32":
            continue
        torch.manual_seed(0)
        network, loss, batch = TASKS[name](small)
        network.to(device)

        def step(batch: torch.Tensor, model: Any = network, loss: Any = loss) -> torch.Tensor:
            made: torch.Tensor = loss(model, batch)
            return made

        given = (batch.to(device),)
        measured, modelled = capture(step, given), capture(step, given, model=Roofline(spec))
        pairs = [
            (model.cost_us, real.cost_us, real.name)
            for model, real in zip(modelled.ops, measured.ops, strict=True)
            if real.cost_us > spec.launch_us and model.cost_us
        ]
        ratios = sorted(max(model / real, real / model) for model, real, _ in pairs)
        total = sum(model for model, *_ in pairs) / sum(real for _, real, _ in pairs)
        far = sorted(set(pairs), key=lambda pair: -abs(pair[0] - pair[1]))[:10]
        listed = ", ".join(f"{name} {model:.0f} for {real:.0f}" for model, real, name in far)
        note = (
            f"{len(ratios)} ops; modelled and measured times differ by a factor of"
            f" {statistics.median(ratios):.2f} (median), {ratios[len(ratios) * 9 // 10]:.2f}"
            f" (90th percentile); sum of all modelled / measured {total:.2f};"
            f" farthest, us: {listed}"
        )
        rows.append({"mode": name, "note": note})
        del network, measured, modelled
        gc.collect()
    return rows, []


LAYERS = 72
"""Depth of the Llama that `fit` finds for an H100: peaks of 22.2 and 28.8 GiB with 8 and 16 layers,
by recomputation alone, and 2 GiB for the context and for rounding."""


def largest_step(device: str, small: bool, layers: int, steps: int, **compiled: Any) -> Row:
    """Train where the model is: no copy of it fits. `peak` is what PyTorch reserved."""
    fresh(device)
    torch.manual_seed(0)
    with torch.device(device):
        model, loss, batch = llama_of(layers, small)

    def step(batch: torch.Tensor) -> torch.Tensor:
        return loss(model, batch)

    run: Any = torch.compile(step, dynamic=False, fullgraph=True, **compiled) if compiled else step
    torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    for _ in range(steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        value = run(batch)
        value.backward()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=-1e-3)
                parameter.grad = None
        losses.append(value.item())
        del value
    parameters = sum(p.numel() for p in model.parameters()) / 1e9
    return {
        "seconds": statistics.median(seconds[1:]),
        "peak": torch.cuda.max_memory_allocated(),
        "layers": layers,
        "billions": parameters,
        "finite": all(map(math.isfinite, losses)),
        **reported(),
    }


def largest(device: str, small: bool) -> Result:
    """The deepest Llama that trains in the device's memory, in eager and planned.

    Eager's depth is extrapolated from two shallow models; the planned one is `LAYERS`.
    """
    rows: list[Row] = []
    faults: list[str] = []
    few = (2, 4)
    one, other = (largest_step(device, small, layers, 2)["peak"] for layers in few)
    each = (other - one) / (few[1] - few[0])
    total = torch.cuda.get_device_properties(0).total_memory
    deepest = few[0] + int((total - (1 << 30) - one) / each)
    budget = {"backend": "coop", "options": {"budget": total - min(2 << 30, total // 4)}}
    # Its ops are measured with two layers; the others have the device until all memory is needed.
    largest_step(device, small, few[0], 2, **budget)
    tries: list[tuple[str, int, dict[str, Any]]] = [
        ("coop", LAYERS, budget),
        ("eager", deepest, {}),
        ("eager", deepest + 2, {}),
    ]
    reserve, whole = Memory.reserve, memory(fcntl.LOCK_EX)
    entered: list[None] = []

    def reserve_last(arena: Memory, *given: Any) -> int:
        if not entered:  # to the end of this process
            entered.append(whole.__enter__())
        return reserve(arena, *given)

    Memory.reserve = reserve_last  # type: ignore[method-assign]
    for mode, layers, given in tries:
        try:
            row = largest_step(device, small, layers, 3, **given)
        except torch.OutOfMemoryError as error:
            note = f"{layers} layers: out of memory ({str(error).splitlines()[0][:60]})"
            rows.append({"mode": mode, "note": note})
            faults += ["coop: out of memory"] if given else []
            continue
        except torch._dynamo.exc.BackendCompilerFailed as error:
            note = f"{layers} layers: {str(error.inner_exception).splitlines()[0]}"
            rows.append({"mode": mode, "note": note})
            faults.append(f"{mode}: {layers} layers do not fit")
            continue
        note = (
            f"{layers} layers, {row['billions']:.2f} G parameters, {row['seconds']:.2f} s a step,"
            f" peak {row['peak'] / 2**30:.2f} GiB"
        )
        rows += [{"mode": mode, **row}, {"mode": mode, "note": note}]
        faults += [] if row["finite"] else [f"{mode}: a loss is not finite"]
        print(rows[-1], flush=True)
    return rows, faults


def batches(device: str, small: bool) -> Result:
    """DELTA's figure: larger batches of ResNet-50 in the memory of one, by transfers as well."""
    torch.manual_seed(0)
    model, loss, images = TASKS["resnet50"](small)
    rows = [train(device, (model, loss, images), f"eager, batch {len(images)}", 6)]
    budget = rows[0]["peak"]
    for times, host in itertools.product((2, 3), (None, 0)):
        batch = torch.cat([images] * times)
        layout = torch.contiguous_format if small else torch.channels_last
        batch = batch.contiguous(memory_format=layout)
        mode = f"batch {len(batch)}{', recomputed alone' if host == 0 else ''}"
        options: dict[str, Any] = {} if host is None else {"host_budget": 0}
        row = within(device, (model, loss, batch), mode, 6, budget=str(budget), **options)
        rows.append(row)
        if "note" not in row:
            each = row["seconds"] / times / rows[0]["seconds"]
            note = f"{row['swapped'] / MEGA:.0f} MB moved; {each:.3f} x eager's time an image"
            rows.append({"mode": mode, "note": note})
    return rows, []


def swap(device: str, small: bool) -> Result:
    """Transfers beside ops: the makespan as planned, and copies that run beside kernels."""
    from torch.profiler import ProfilerActivity, profile

    torch.manual_seed(0)
    task = TASKS["gpt2-bf16"](small)
    eager = train(device, task, "eager", 6)
    joint = train(device, task, "joint", 6, backend="aot_eager")
    rows, faults = [eager, joint], []
    for budget in ("70%", "55%"):
        mode = f"coop {budget}"
        rows.append(within(device, task, f"{mode}, recomputed", 6, budget=budget, host_budget=0))
        row = within(device, task, mode, 6, budget=budget)
        if "note" in row:
            rows.append(row)
            continue
        faults += held(row, eager, joint)
        report = reports()[0]
        plan, link = report.plan, report.graph.device
        makespan = report.measured_makespan_us or 0.0
        away, back = (link.d2h_bytes_per_s or 0) / 1e9, (link.h2d_bytes_per_s or 0) / 1e9
        note = (
            f"link {away:.1f} and {back:.1f} GB/s; {plan.swapped_bytes / MEGA:.0f} MB moved;"
            f" makespan planned {plan.cost_us / 1e3:.2f} ms, measured {makespan / 1e3:.2f}"
            f" ({makespan / plan.cost_us - 1:+.1%}), waits"
            f" {report.measured_offload_stall_us / 1e3:.2f}"
            f" + {report.measured_prefetch_stall_us / 1e3:.2f} ms"
        )
        rows += [row, {"mode": mode, "note": note}]
    model, batch = copy.deepcopy(task[0]).to(device), task[2].to(device)

    def step(batch: torch.Tensor) -> torch.Tensor:
        return task[1](model, batch)

    run: Any = torch.compile(step, backend="coop", dynamic=False, options={"budget": "55%"})
    for _ in range(3):
        run(batch).backward()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        run(batch).backward()
        torch.cuda.synchronize()
    copies, kernels = [], []
    for event in seen.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            span = (event.time_range.start, event.time_range.end)
            (copies if "Memcpy" in event.name and "D2D" not in event.name else kernels).append(span)
    copied = sum(end - begin for begin, end in copies)
    both = sum(_within(span, kernels) for span in copies)
    note = f"{len(copies)} copies, {copied / 1e3:.2f} ms, {both / max(copied, 1e-9):.0%} beside ops"
    rows.append({"mode": "coop 55%, profiled", "note": note})
    return rows, faults


def _within(span: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """Length of the part of a span that overlaps with `others`, which are disjoint."""
    return sum(max(0.0, min(span[1], end) - max(span[0], begin)) for begin, end in others)


COMPARISONS: dict[str, Callable[[str, bool], Result]] = {
    "methods": methods,
    "roofline": roofline,
    "largest": largest,
    "batches": batches,
    "swap": swap,
}
