"""Calibration: measures a dozen ops on a local device, and makes a device file from them.

The ops are measured as in a capture (`capture/profiler.py`). The peak of a dtype is the highest
rate of any op, and the share of a class is the median rate of its ops, relative to that peak.
Bandwidth and its share follow from memory-bound ops, the launch time from ops on one element.
"""

import os
import platform
import statistics
from functools import partial
from typing import Any

import torch

from coop_plan.planner.progress import counted
from coop_plan.runtime.capture.profiler import profile_op
from coop_plan.runtime.device import cuda
from coop_plan.runtime.device.copy_engines import measure_link
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.offline_capture.devices import DeviceSpec
from coop_plan.runtime.offline_capture.roofline import OpWork, work_of
from coop_plan.runtime.torch_internals.fakes import FakeTensorMode
from coop_plan.runtime.torch_internals.ops import FLASH, FLASH_ON_CPU, OpOverload

aten = torch.ops.aten

Measured = list[tuple[OpWork, float]]
"""Work of ops, and their measured time, µs."""

LARGE_ELEMENTS = 1 << 24
"""Number of float32 elements that exceeds every cache."""


BENCHMARK_SIZES = {
    "cpu": ((256, 512, 1024), (1024,), 8),
    "cuda": ((1024, 2048, 4096), (2048, 4096, 8192), 64),
}
"""Sides of matrix products in float32 and in bfloat16, and images, that saturate a device. At 1024
a GPU reaches a third of its peak."""


def calibrate(kind: str, name: str = "") -> DeviceSpec:
    """The device spec of the CPU or the current CUDA device, measured in about ten seconds.

    Raises:
        CaptureError: this machine has no CUDA device.
    """
    if kind == "cuda" and not torch.cuda.is_available():
        raise CaptureError("this machine has no CUDA device to calibrate: use --device cpu")
    with FakeTensorMode() as fakes, torch.device(kind):
        calls = _benchmark_calls()
    measured: Measured = []
    for target, args in counted(calls, len(calls), "measuring"):
        with fakes:
            result = target(*args)
            work = work_of(target, args, {}, result)
        measured.append((work, profile_op(target, args, {}).cost_us))
    peaks: dict[str, float] = {}
    for work, cost_us in measured:
        if work.operations:
            dtype = str(work.dtype).removeprefix("torch.")
            peaks[dtype] = max(peaks.get(dtype, 0.0), work.operations / cost_us * 1e6)
    moving = [w.bytes / cost_us * 1e6 for w, cost_us in measured if _is_memory_bound(w)]
    link: dict[str, float] = {}
    if kind == "cuda":
        current = torch.cuda.current_device()
        link = measure_link(torch.device(kind, current), partial(cuda.device_us, current))
    return DeviceSpec(
        name=name or _name(kind),
        kind="cuda" if kind == "cuda" else "cpu",
        source=f"measured by coop-plan calibrate with PyTorch {torch.__version__},"
        f" {torch.get_num_threads()} threads",
        memory_bytes=_memory_bytes(kind),
        flops={dtype: round(rate) for dtype, rate in peaks.items()},
        bytes_per_s=round(max(moving)),
        link_bytes_per_s=min(link.get("h2d_bytes_per_s", 0.0), link.get("d2h_bytes_per_s", 0.0)),
        launch_us=statistics.median(
            us for w, us in measured if not w.operations and not _is_memory_bound(w)
        ),
        matmul_share=_share(measured, "matmul", peaks),
        convolution_share=_share(measured, "convolution", peaks),
        attention_share=_share(measured, "attention", peaks),
        memory_share=round(statistics.median(moving) / max(moving), 3),
        **({} if kind == "cuda" else {"matmul_workspace_bytes": 0}),
    )


def _is_memory_bound(work: OpWork) -> bool:
    return not work.operations and work.bytes > LARGE_ELEMENTS


def _share(measured: Measured, kind: str, peaks: dict[str, float]) -> float:
    rates = [
        work.operations / cost_us * 1e6 / peaks[str(work.dtype).removeprefix("torch.")]
        for work, cost_us in measured
        if work.kind == kind
    ]
    return round(min(1.0, statistics.median(rates)), 3)


def _benchmark_calls() -> list[tuple[OpOverload, tuple[Any, ...]]]:
    """Ops to measure, and their arguments on the default device."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    half = torch.bfloat16
    kind = empty(1).device.type
    sides, half_sides, images = BENCHMARK_SIZES[kind]
    image, kernel, pointwise_kernel = (
        empty(images, 64, 56, 56),
        empty(64, 64, 3, 3),
        empty(128, 64, 1, 1),
    )
    options = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    pointwise_options = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    backward_options = ([0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    heads = [empty(2, 8, 512, 64) for _ in range(3)]
    large, row = empty(LARGE_ELEMENTS), empty(1024, LARGE_ELEMENTS // 1024)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        *((aten.mm.default, (empty(n, n), empty(n, n))) for n in sides),
        (aten.bmm.default, (empty(16, 256, 64), empty(16, 64, 256))),
        *(
            (aten.mm.default, (empty(n, n, dtype=half), empty(n, n, dtype=half)))
            for n in half_sides
        ),
        (aten.convolution.default, (image, kernel, *options)),
        (aten.convolution.default, (image, pointwise_kernel, *pointwise_options)),
        (aten.convolution_backward.default, (image, image, kernel, *backward_options)),
        (aten.add.Tensor, (large, large)),
        (aten.relu.default, (large,)),
        (aten.gelu.default, (large,)),
        (aten.sum.dim_IntList, (row, [0])),
        (aten.add.Tensor, (empty(1), empty(1))),
        (aten.relu.default, (empty(1),)),
    ]
    if kind == "cpu":
        calls.append((FLASH_ON_CPU.default, tuple(heads)))
    else:
        half_heads = tuple(head.to(half) for head in heads)
        calls.append((FLASH.default, half_heads))
    return calls


def _name(kind: str) -> str:
    if kind == "cuda":
        return str(torch.cuda.get_device_name())
    return platform.processor() or platform.machine()


def _memory_bytes(kind: str) -> int:
    if kind == "cuda":
        return int(torch.cuda.get_device_properties("cuda").total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
