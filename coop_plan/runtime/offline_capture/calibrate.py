"""A device file from measurements: what a dozen ops reach on a device that is here.

The ops are measured as captures measure them (`profile.py`). Of each type, the highest rate of any
op is the device's peak; the share of a class is what the op in its middle reaches of it. So
bandwidth and its share follow from ops that move bytes alone, and an op on one element is a launch.
"""

import os
import platform
import statistics
from functools import partial
from typing import Any

import torch

from coop_plan.runtime.offline_capture.devices import DeviceSpec
from coop_plan.runtime.capture.profiler import profile
from coop_plan.runtime.offline_capture.roofline import Work, work_of
from coop_plan.runtime.device import cuda
from coop_plan.runtime.device.copy_engines import measured_link
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.torch_internals.fakes import FakeTensorMode
from coop_plan.runtime.torch_internals.ops import FLASH, FLASH_ON_CPU, OpOverload

aten = torch.ops.aten

Measured = list[tuple[Work, float]]
"""What ops have to do, and the µs that they took."""

LARGE = 1 << 24
"""Elements that no cache holds, of float32."""


SIZES = {
    "cpu": ((256, 512, 1024), (1024,), 8),
    "cuda": ((1024, 2048, 4096), (2048, 4096, 8192), 64),
}
"""Sides of matrix products in float32 and in bfloat16, and images, that fill a device: a GPU
reaches a third of its peak at 1024."""


def calibrate(kind: str, name: str = "") -> DeviceSpec:
    """A device file's content for the CPU or the current CUDA device; takes about ten seconds.

    Raises:
        CaptureError: no such device is here.
    """
    if kind == "cuda" and not torch.cuda.is_available():
        raise CaptureError("there is no CUDA device here to calibrate: --device cpu")
    with FakeTensorMode() as fakes, torch.device(kind):
        calls = _calls()
    measured: Measured = []
    for target, args in calls:
        with fakes:
            result = target(*args)
            work = work_of(target, args, {}, result)
        measured.append((work, profile(target, args, {}).cost_us))
    peaks: dict[str, float] = {}
    for work, cost_us in measured:
        if work.operations:
            dtype = str(work.dtype).removeprefix("torch.")
            peaks[dtype] = max(peaks.get(dtype, 0.0), work.operations / cost_us * 1e6)
    moving = [w.bytes / cost_us * 1e6 for w, cost_us in measured if _moves(w)]
    link: dict[str, float] = {}
    if kind == "cuda":
        here = torch.cuda.current_device()
        link = measured_link(torch.device(kind, here), partial(cuda.device_us, here))
    return DeviceSpec(
        name=name or _name(kind),
        kind="cuda" if kind == "cuda" else "cpu",
        source=f"measured by coop-plan calibrate with PyTorch {torch.__version__},"
        f" {torch.get_num_threads()} threads",
        memory_bytes=_memory_bytes(kind),
        flops={dtype: round(rate) for dtype, rate in peaks.items()},
        bytes_per_s=round(max(moving)),
        link_bytes_per_s=min(link.get("h2d_bytes_per_s", 0.0), link.get("d2h_bytes_per_s", 0.0)),
        launch_us=statistics.median(us for w, us in measured if not w.operations and not _moves(w)),
        matmul_share=_share(measured, "matmul", peaks),
        convolution_share=_share(measured, "convolution", peaks),
        attention_share=_share(measured, "attention", peaks),
        memory_share=round(statistics.median(moving) / max(moving), 3),
        **({} if kind == "cuda" else {"matmul_workspace_bytes": 0}),
    )


def _moves(work: Work) -> bool:
    return not work.operations and work.bytes > LARGE


def _share(measured: Measured, kind: str, peaks: dict[str, float]) -> float:
    rates = [
        work.operations / cost_us * 1e6 / peaks[str(work.dtype).removeprefix("torch.")]
        for work, cost_us in measured
        if work.kind == kind
    ]
    return round(min(1.0, statistics.median(rates)), 3)


def _calls() -> list[tuple[OpOverload, tuple[Any, ...]]]:
    """Ops and their arguments, on the default device."""

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    half = torch.bfloat16
    kind = made(1).device.type
    sides, half_sides, images = SIZES[kind]
    image, kernel, narrow = made(images, 64, 56, 56), made(64, 64, 3, 3), made(128, 64, 1, 1)
    options = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    closed = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    back = ([0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    heads = [made(2, 8, 512, 64) for _ in range(3)]
    large, row = made(LARGE), made(1024, LARGE // 1024)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        *((aten.mm.default, (made(n, n), made(n, n))) for n in sides),
        (aten.bmm.default, (made(16, 256, 64), made(16, 64, 256))),
        *((aten.mm.default, (made(n, n, dtype=half), made(n, n, dtype=half))) for n in half_sides),
        (aten.convolution.default, (image, kernel, *options)),
        (aten.convolution.default, (image, narrow, *closed)),
        (aten.convolution_backward.default, (image, image, kernel, *back)),
        (aten.add.Tensor, (large, large)),
        (aten.relu.default, (large,)),
        (aten.gelu.default, (large,)),
        (aten.sum.dim_IntList, (row, [0])),
        (aten.add.Tensor, (made(1), made(1))),
        (aten.relu.default, (made(1),)),
    ]
    if kind == "cpu":
        calls.append((FLASH_ON_CPU.default, tuple(heads)))
    else:
        narrowed = tuple(head.to(half) for head in heads)
        calls.append((FLASH.default, narrowed))
    return calls


def _name(kind: str) -> str:
    if kind == "cuda":
        return str(torch.cuda.get_device_name())
    return platform.processor() or platform.machine()


def _memory_bytes(kind: str) -> int:
    if kind == "cuda":
        return int(torch.cuda.get_device_properties("cuda").total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
