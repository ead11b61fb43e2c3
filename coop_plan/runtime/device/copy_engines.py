"""Copy engines: transfers between arena and host while the step computes.

There is one engine per direction, which executes its copies in order, and one host slab per arena
memory. A copy begins after all work of the step that was submitted before it
(`planner.core.timeline`). The memory that it writes is not in use then: all its users precede the
copy in the plan.
"""

import atexit
import functools
import itertools
import os
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from coop_plan.runtime.device import build
from coop_plan.runtime.device.arena import Memory
from coop_plan.runtime.device.cuda import capturing
from coop_plan.runtime.errors import RuntimeRefusalError
from coop_plan.runtime.torch_internals.cuda import address_on_device, cuda_function
from coop_plan.runtime.torch_internals.fakes import unset_fake_temporarily

TO_HOST, FROM_HOST = range(2)
"""Directions of copies."""

Timer = Callable[[Callable[[], object]], float]
"""Function that measures work on the device, µs."""

PROBE_BYTES = 16 << 20
"""Size of the copies that measure a bandwidth."""

PROBES = 5
"""Number of timed copies; the shortest counts."""


CopyHandle = Any
"""Identifier of a submitted copy, unique among those that are not waited for yet."""


class CopyTiming(NamedTuple):
    """Timing of a finished copy, µs: time waited for it, its begin and its end.

    The first is without waits for a processor that another process has.
    """

    waited_us: float
    begin_us: float
    end_us: float


class CopyEngines:
    """Host slab of one arena memory, and its engines; one run at a time uses them."""

    def __init__(self) -> None:
        self._slab: torch.Tensor | None = None
        self._submitted: dict[CopyHandle, object] = {}

    def __del__(self) -> None:
        self.finish()

    def reserve(self, size: int) -> torch.Tensor:
        """A slab of at least `size` bytes."""
        if self._slab is None or self._slab.numel() < size:
            self._slab = None
            self._slab = self._new_slab(size)
        return self._slab

    def copy(
        self, direction: int, address: int, host: int, size: int, min_us: float, kept: object
    ) -> CopyHandle:
        """Submit a copy of `size` bytes between two addresses, the second one in a slab.

        On the CPU it takes at least `min_us`. What has the memory is `kept` alive until `wait`.
        """
        target, source = (host, address) if direction == TO_HOST else (address, host)
        handle = self._begin(direction, target, source, size, min_us)
        self._submitted[handle] = kept
        return handle

    def wait(self, handle: CopyHandle) -> CopyTiming | None:
        """Order later work of this thread after the copy; returns its timing, if the CPU waited.

        Raises:
            RuntimeError: the copy failed.
        """
        timing = self._wait(handle)
        self._submitted.pop(handle, None)
        return timing

    def wait_on_host(self, handle: CopyHandle) -> Callable[[], CopyTiming]:
        """A wait of another thread for a copy, which this thread waits for as well."""
        raise NotImplementedError

    def finish(self) -> None:
        """Order later work after all copies that were not waited for."""
        if self._submitted:
            self._finish()
            self._submitted.clear()

    def forget(self) -> None:
        """Forget copies that a CUDA graph was to have, and that never ran."""
        self._submitted.clear()

    def _new_slab(self, size: int) -> torch.Tensor:
        raise NotImplementedError

    def _begin(
        self, direction: int, target: int, source: int, size: int, min_us: float
    ) -> CopyHandle:
        """Submit a copy between two addresses."""
        raise NotImplementedError

    def _wait(self, handle: CopyHandle) -> CopyTiming | None:
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError


class CpuCopyEngines(CopyEngines):
    """Simulated copy engines: threads that copy within host memory at a given rate."""

    def _new_slab(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def _begin(
        self, direction: int, target: int, source: int, size: int, min_us: float
    ) -> tuple[int, int]:
        engine = cpu_engines()[direction]
        return engine, build.copy_engines().ask(engine, target, source, size, min_us)

    def _wait(self, handle: CopyHandle) -> CopyTiming:
        engine, number = handle
        if engine not in cpu_engines():
            raise RuntimeError("the copy was submitted before this process was forked")
        return CopyTiming(*build.copy_engines().wait(engine, number))

    def wait_on_host(self, handle: CopyHandle) -> Callable[[], CopyTiming]:
        build.copy_engines().share(*handle)
        return functools.partial(self._wait, handle)

    def _finish(self) -> None:
        for engine, number in self._submitted:
            if engine in cpu_engines():
                build.copy_engines().finish(engine, number)


@functools.cache
def cpu_engines() -> tuple[int, int]:
    """Handles of the process's engines, one per direction; a forked child has its own."""
    ext: Any = build.copy_engines()
    engines = ext.open(), ext.open()
    for engine in engines:
        atexit.register(ext.settle, engine)
    return engines


os.register_at_fork(after_in_child=cpu_engines.cache_clear)


class CudaCopyEngines(CopyEngines):
    """Copy engines of a CUDA device: a stream per direction, and pinned host memory.

    The CPU never waits. A slab that a CUDA graph has captured is never freed, because the graph
    holds its addresses.
    """

    def __init__(self, device: int) -> None:
        super().__init__()
        self._captured: torch.Tensor | None = None
        self._device = device

    def __del__(self) -> None:
        super().__del__()
        self._synchronize()

    def reserve(self, size: int) -> torch.Tensor:
        if self._slab is None or self._slab.numel() < size:
            self._synchronize()
        return super().reserve(size)

    def _synchronize(self) -> None:
        """Wait for all copies before the slab is freed: PyTorch's cache cannot see them."""
        if self._slab is not None and self._captured is not self._slab:
            for stream in cuda_streams(self._device):
                stream.synchronize()

    def _new_slab(self, size: int) -> torch.Tensor:
        return pinned(size)

    def _begin(self, direction: int, target: int, source: int, size: int, min_us: float) -> int:
        if capturing() and self._captured is not self._slab:
            assert self._slab is not None
            self._captured = self._slab
            _captured.append(self._slab)
        event = _event(self._device)
        streams = self._current(), cuda_streams(self._device)[direction].cuda_stream
        _cuda_extension().cuda_copy(target, source, size, *streams, event)
        return event

    def _current(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def _wait(self, handle: CopyHandle) -> None:
        _cuda_extension().cuda_wait(self._current(), handle)
        # Reusable: the wait refers to the last record.
        _spare_events(self._device).append(handle)

    def _finish(self) -> None:
        for handle in self._submitted:
            self._wait(handle)


CUDA_CALLS = (
    "cudaEventCreateWithFlags",
    "cudaEventRecord",
    "cudaStreamWaitEvent",
    "cudaMemcpyAsync",
)
"""Functions of the CUDA runtime that copies call."""


@functools.cache
def _cuda_extension() -> Any:
    """The extension module, bound to the CUDA runtime that PyTorch uses."""
    ext: Any = build.copy_engines()
    ext.cuda_bind(*map(cuda_function, CUDA_CALLS))
    return ext


@functools.cache
def _spare_events(device: int) -> list[int]:
    """Unused events of a device; as many exist as copies were in flight at once."""
    return []


def _event(device: int) -> int:
    try:
        return _spare_events(device).pop()  # another thread may have taken the last one
    except IndexError:
        with torch.cuda.device(device):
            return int(_cuda_extension().cuda_event())


@functools.cache
def cuda_streams(device: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The copy streams of a device, one per direction."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


_captured: list[torch.Tensor] = []


def pinned(size: int) -> torch.Tensor:
    """Pinned host memory, which a device can copy asynchronously."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


def slab_of_homes(size: int, device: torch.device) -> torch.Tensor:
    """Host memory whose parts a device's tensors may have; its kernels read them by the link.

    On CUDA it is pinned, and freed after all work on the device.

    Raises:
        RuntimeRefusalError: the device cannot read pinned memory at the host's addresses.
    """
    if device.type == "cpu":
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    slab = pinned(size)
    with torch.cuda.device(device):
        if size and address_on_device(slab.data_ptr()) != slab.data_ptr():
            raise RuntimeRefusalError(
                f"{device} cannot read pinned memory at the host's addresses, where parameters and"
                " states would lie between their uses: keep them on the device: leave link out"
            )
    weakref.finalize(slab, torch.cuda.synchronize, device).atexit = False
    return slab


_engines: "weakref.WeakKeyDictionary[Memory, CopyEngines]" = weakref.WeakKeyDictionary()


def copy_engines_of(memory: Memory, device: torch.device) -> CopyEngines:
    """The copy engines of an arena memory."""
    found = _engines.get(memory)
    if found is None:
        found = CpuCopyEngines() if device.type == "cpu" else CudaCopyEngines(device.index)
        _engines[memory] = found
    return found


def measure_link(device: torch.device, time_us: Timer) -> dict[str, float]:
    """Measured bandwidth of a CUDA device's copies in both directions, and their latency.

    Also the times in which the host launches an op, and a copy and the wait for it.
    """
    with unset_fake_temporarily():
        device_tensor = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
        host = pinned(PROBE_BYTES)

        def shortest(target: torch.Tensor, source: torch.Tensor) -> float:
            return min(
                time_us(lambda: target.copy_(source, non_blocking=True)) for _ in range(PROBES)
            )

        latency = min(shortest(host[:1], device_tensor[:1]), shortest(device_tensor[:1], host[:1]))
        rates = []
        for target, source in ((host, device_tensor), (device_tensor, host)):
            took = max(shortest(target, source) - latency, 1e-3)
            rates.append(PROBE_BYTES / took * 1e6)
        engines, own = CudaCopyEngines(device.index), device_tensor[:1]
        slab = engines.reserve(1)
        places = own.data_ptr(), slab.data_ptr()
        directions = itertools.cycle((TO_HOST, FROM_HOST))
        return {
            "d2h_bytes_per_s": rates[TO_HOST],
            "h2d_bytes_per_s": rates[FROM_HOST],
            "copy_latency_us": latency,
            "launch_us": _host_us(own.clone),
            "copy_launch_us": _host_us(
                lambda: engines.wait(engines.copy(next(directions), *places, 1, 0.0, own))
            ),
        }


def _host_us(launch: Callable[[], object]) -> float:
    """Median time of the host in a launch, µs, without the first."""
    times = []
    for _ in range(2 * PROBES + 1):
        begin = time.perf_counter_ns()
        launch()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return statistics.median(times[1:])
