"""More of what `benchmarks.gpu_step` checks: loops, settings, methods, sizes, modelled times."""

import copy
import fcntl
import gc
import itertools
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from benchmarks.gpu_checks import (
    CHECKS,
    MEGA,
    ROOM,
    SLACK_BYTES,
    TASKS,
    TINY,
    Result,
    Row,
    causal,
    difference,
    gpt2,
    held,
    run,
    sizes,
    train,
)
from coop_plan.runtime import clear_reports, reports
from coop_plan.runtime.capture.calibrate import calibrated
from coop_plan.runtime.capture.roofline import Roofline
from coop_plan.runtime.capture.target import capture
from coop_plan.runtime.device.arena import Memory


def methods(device: str, small: bool) -> Result:
    """Coop's comparison (its section 5) in seconds: BERT-Large at half of its peak."""
    torch.manual_seed(0)
    task, steps = TASKS["bert-large"](small), 4 if small else 7
    rows, faults = [train(device, task, "eager", steps)], []
    for method in ("coop-offline", "coop", "dte", "dtr"):
        mode, options = f"{method} 50%", {"budget": "50%", "method": method}
        try:
            row = train(device, task, mode, steps, backend="coop", options=options)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            rows.append({"mode": mode, "said": str(error.inner_exception).splitlines()[0]})
            continue
        # The first plan's numbers are compared with the joint graph's by the check of the model.
        faults += held(row, *(each for each in rows if "numbers" in each))
        rows.append(row)
    for row in rows:
        row.pop("numbers", None)
    return rows, faults


def roofline(device: str, small: bool) -> Result:
    """What a device file made by `calibrate` says of op times, beside the measured ones."""
    spec = calibrated(device)
    rows: list[Row] = [{"mode": "device file", "said": msgspec.json.encode(spec).decode()}]
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
            (said.cost_us, took.cost_us, took.name)
            for said, took in zip(modelled.ops, measured.ops, strict=True)
            if took.cost_us > spec.launch_us and said.cost_us
        ]
        ratios = sorted(max(said / took, took / said) for said, took, _ in pairs)
        total = sum(said for said, *_ in pairs) / sum(took for _, took, _ in pairs)
        far = sorted(set(pairs), key=lambda pair: -abs(pair[0] - pair[1]))[:10]
        listed = ", ".join(f"{name} {said:.0f} for {took:.0f}" for said, took, name in far)
        said = (
            f"{len(ratios)} ops; modelled and measured times differ by a factor of"
            f" {statistics.median(ratios):.2f} (median), {ratios[len(ratios) * 9 // 10]:.2f}"
            f" (90th percentile); sum of all modelled / measured {total:.2f};"
            f" farthest, us: {listed}"
        )
        rows.append({"mode": name, "said": said})
        del network, measured, modelled
        gc.collect()
    return rows, []


LAYERS = 72
"""Of a Llama, so many are planned without the device to need the memory of an H100: peaks of 22.2
and 28.8 GiB with 8 and 16 layers, recomputed alone, and 2 GiB for the context and for rounding."""


def llama_of(layers: int, small: bool) -> tuple[nn.Module, Callable[..., torch.Tensor], Any]:
    """The sizes of Llama-3-8B but for its depth, bf16, one sequence of 8192 tokens; made there."""
    from transformers import LlamaConfig

    given = TINY if small else sizes(4096, 14336, layers, 32, 128_256)
    given = given | {"num_hidden_layers": layers}
    config = LlamaConfig(use_cache=False, num_key_value_heads=2 if small else 8, **given)
    torch.set_default_dtype(torch.bfloat16)
    try:
        return causal("LlamaForCausalLM", config, 1, 64 if small else 8192)
    finally:
        torch.set_default_dtype(torch.float32)


def largest_step(device: str, small: bool, layers: int, steps: int, **compiled: Any) -> Row:
    """Train where the model is: no copy of it fits. `peak` is what PyTorch reserved."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    gc.collect()
    clear_reports()
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
    row = {"seconds": statistics.median(seconds[1:]), "peak": torch.cuda.max_memory_allocated()}
    row |= {"host": None, "first_peak": None, "layers": layers, "billions": parameters}
    report = reports()[0] if reports() else None
    if report is not None:
        row |= {"budget": report.budget_bytes, "arena": report.measured_arena_bytes}
        row |= {"planned": report.planned_overhead, "in_step": report.measured_overhead}
        row |= {"own_peak": report.measured_peak_bytes}
    finite = all(map(torch.isfinite, map(torch.tensor, losses)))
    return {**row, "finite": bool(finite)}


def largest(device: str, small: bool) -> Result:
    """The deepest Llama that trains in the device's memory, without and with us.

    Without: from the peaks of two shallow ones, and one layer more at a time until it is too much.
    With: what `fit` found for the device without it (`LAYERS`).
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
    reserve = Memory.reserve
    room = Path(os.environ.get(ROOM, os.devnull)).open("w")  # noqa: SIM115 - to the end

    def reserve_last(memory: Memory, *given: Any) -> int:
        fcntl.flock(room, fcntl.LOCK_EX)
        return reserve(memory, *given)

    Memory.reserve = reserve_last  # type: ignore[method-assign]
    for mode, layers, given in tries:
        try:
            row = largest_step(device, small, layers, 3, **given)
        except torch.OutOfMemoryError as error:
            said = f"{layers} layers: out of memory ({str(error).splitlines()[0][:60]})"
            rows.append({"mode": mode, "said": said})
            faults += ["coop: out of memory"] if given else []
            continue
        except torch._dynamo.exc.BackendCompilerFailed as error:
            said = f"{layers} layers: {str(error.inner_exception).splitlines()[0]}"
            rows.append({"mode": mode, "said": said})
            faults.append(f"{mode}: {layers} layers do not fit")
            continue
        said = (
            f"{layers} layers, {row['billions']:.2f} G parameters, {row['seconds']:.2f} s a step,"
            f" peak {row['peak'] / 2**30:.2f} GiB"
        )
        rows += [{"mode": mode, **row}, {"mode": mode, "said": said}]
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
        options: dict[str, Any] = {"budget": str(budget)}
        options |= {} if host is None else {"host_budget": 0}
        try:
            row = train(device, (model, loss, batch), mode, 6, backend="coop", options=options)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            rows.append({"mode": mode, "said": str(error.inner_exception).splitlines()[0]})
            continue
        plan = reports()[0].plan
        each = row["seconds"] / times / rows[0]["seconds"]
        said = f"{plan.swapped_bytes / MEGA:.0f} MB moved; {each:.3f} x eager's time an image"
        rows += [row, {"mode": mode, "said": said}]
    for row in rows:
        row.pop("numbers", None)
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
        mode, options = f"coop {budget}", {"budget": budget}
        recomputed = {"budget": budget, "host_budget": 0}
        rows.append(
            train(device, task, f"{mode}, recomputed", 6, backend="coop", options=recomputed)
        )
        row = train(device, task, mode, 6, backend="coop", options=options)
        faults += held(row, eager, joint)
        report = reports()[0]
        plan, link = report.plan, report.graph.device
        makespan = report.measured_makespan_us or 0.0
        away, back = (link.d2h_bytes_per_s or 0) / 1e9, (link.h2d_bytes_per_s or 0) / 1e9
        said = (
            f"link {away:.1f} and {back:.1f} GB/s; {plan.swapped_bytes / MEGA:.0f} MB moved;"
            f" makespan planned {plan.cost_us / 1e3:.2f} ms, measured {makespan / 1e3:.2f}"
            f" ({makespan / plan.cost_us - 1:+.1%}), waits"
            f" {report.measured_offload_stall_us / 1e3:.2f}"
            f" + {report.measured_prefetch_stall_us / 1e3:.2f} ms"
        )
        rows += [row, {"mode": mode, "said": said}]
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
    said = f"{len(copies)} copies, {copied / 1e3:.2f} ms, {both / max(copied, 1e-9):.0%} beside ops"
    rows.append({"mode": "coop 55%, profiled", "said": said})
    for row in rows:
        row.pop("numbers", None)
    return rows, faults


def _within(span: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """How much of a span has one of the others, which do not overlap, beside it."""
    return sum(max(0.0, min(span[1], end) - max(span[0], begin)) for begin, end in others)


def scaled(device: str, small: bool) -> Result:
    """Autocast to float16 with a GradScaler whose first scales overflow."""
    found: dict[str, list[torch.Tensor]] = {}
    for mode, given in _three():
        torch.manual_seed(0)
        model, _, batch = gpt2(small)
        model, batch = model.to(device), batch.to(device)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**40, enabled=True)

        def step(batch: torch.Tensor, model: Any = model) -> torch.Tensor:
            with torch.autocast(batch.device.type, torch.float16):
                logits = model(batch).logits[:, :-1].flatten(0, 1)
            return nn.functional.cross_entropy(logits.float(), batch[:, 1:].flatten())

        run: Any = torch.compile(step, dynamic=False, **given) if given else step
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        torch.manual_seed(1)
        losses, scales = [], []
        for _ in range(8):
            loss = run(batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
            scales.append(torch.tensor(scaler.get_scale()))
            del loss
        state = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
        found[mode] = [*losses, *scales, state, *(p.detach().cpu() for p in model.parameters())]
    return _compared(found)


def _three() -> Iterator[tuple[str, dict[str, Any]]]:
    """Eager, the joint graph, and ours under little."""
    yield "eager", {}
    yield "joint", {"backend": "aot_eager"}
    yield "coop 50%", {"backend": "coop", "options": {"budget": "50%"}}


def _compared(found: dict[str, list[torch.Tensor]]) -> Result:
    ours = found["coop 50%"]
    least = min(difference(ours, found[mode]) for mode in ("eager", "joint"))
    said = f"numbers, states and scales differ from eager's or the joint graph's by {least:.1e}"
    return [{"mode": "coop 50%", "said": said}], [] if least <= 1e-6 else ["numbers"]


def loops(device: str, small: bool) -> Result:
    """Two models by turns, batches copied on a side stream, a kept gradient, the generator."""
    found: dict[str, list[torch.Tensor]] = {}
    for mode, given in _three():
        torch.manual_seed(0)
        torch.set_default_device(device)
        kept: list[Any] = []
        numbers: list[torch.Tensor] = []
        models = [gpt2(True)[0].to(device) for _ in range(2)]
        batches = [torch.randint(0, 100, (4, 64), device="cpu") for _ in range(6)]
        batches = batches if small else [batch.pin_memory() for batch in batches]

        def step(model: Any, batch: torch.Tensor) -> torch.Tensor:
            logits = model(batch).logits[:, :-1].flatten(0, 1)
            return nn.functional.cross_entropy(logits.float(), batch[:, 1:].flatten())

        run: Any = torch.compile(step, dynamic=False, **given) if given else step
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.manual_seed(1)
        for batch in batches:
            with torch.cuda.stream(side):
                there = batch.to(device, non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)
            there.record_stream(torch.cuda.current_stream())
            for model in models:
                loss = run(model, there)
                loss.backward()
                numbers.append(loss.detach().cpu())
                kept.append([(p.grad, p.grad.clone()) for p in model.parameters()])
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 1e-2 * parameter.grad
                        parameter.grad = None
        numbers += [p.detach().cpu() for model in models for p in model.parameters()]
        found[mode] = [*numbers, torch.cuda.get_rng_state()]
        torch.set_default_device("cpu")
        if not all(torch.equal(a, b) for pairs in kept for a, b in pairs):
            return [], [f"{mode}: a gradient that was kept has changed"]
    return _compared(found)


def memory(device: str, small: bool) -> Result:
    """A process limit just below and just above what a budget says, in the same process."""
    torch.manual_seed(0)
    task, total = TASKS["gpt2-bf16"](small), torch.cuda.mem_get_info()[1]
    resident = sum(t.nbytes for t in {*task[0].parameters(), *task[0].buffers()})
    first = train(device, task, "60%", 4, backend="coop", options={"budget": "60%"})
    needed = first["budget"] + resident
    rows, faults = [first], []
    options = {"budget": str(first["budget"])}
    for mode, limit in (
        ("limit 0.9 x", needed - first["budget"] // 10),
        ("limit 1.0 x", needed + SLACK_BYTES),
    ):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(limit / total)
        try:
            row = train(device, task, mode, 4, backend="coop", options=options)
            rows.append(row)
            faults += [] if mode.endswith("1.0 x") else ["trained where it should not have"]
        except torch.OutOfMemoryError as error:
            rows.append({"mode": mode, "said": str(error).splitlines()[0]})
            faults += [] if "0.9" in mode else ["out of memory where the budget fits"]
    for row in rows:
        row.pop("numbers", None)
    return rows, faults


def settings(device: str, small: bool) -> Result:
    """A small GPT-2 under other settings of PyTorch's allocator."""
    rows: list[Row] = []
    faults: list[str] = []
    for value in ("expandable_segments:True", "backend:cudaMallocAsync"):
        os.environ["PYTORCH_ALLOC_CONF"] = value
        command = [sys.executable, "-m", "benchmarks.gpu_step", "--small", "--only", "gpt2-bf16"]
        made, wrong = run(command)
        rows.append({"mode": value, "said": made[0]["said"]})
        faults += [f"{value}: {fault}" for fault in wrong]
    del os.environ["PYTORCH_ALLOC_CONF"]
    return rows, faults


def tried(device: str, small: bool) -> Result:
    """ResNet-50 where the user wants cuDNN to try its kernels."""
    torch.backends.cudnn.benchmark = True
    return CHECKS["resnet50"](device, small)


SCENARIOS: dict[str, Callable[[str, bool], Result]] = {
    "methods": methods,
    "roofline": roofline,
    "largest": largest,
    "batches": batches,
    "swap": swap,
    "scaled": scaled,
    "loops": loops,
    "memory": memory,
    "settings": settings,
    "tried": tried,
}
