"""Links to the host: what copies tensors there and back while the step computes.

An engine a direction takes its copies in order, from and to a slab on the host of its own for every
memory that steps run in. A copy begins after all that the step has done when it is asked for
(`planner.core.timeline`): the memory it writes is out of use by then, because whatever used it lies
before it in the plan.
"""

import atexit
import functools
import os
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from coop_plan.runtime.device import build
from coop_plan.runtime.device.arena import Memory
from coop_plan.runtime.device.cuda import capturing
from coop_plan.runtime.torch_internals.cuda import cuda_function
from coop_plan.runtime.torch_internals.fakes import unset_fake_temporarily

AWAY, BACK = range(2)
"""Directions: to the host, from the host."""

Timer = Callable[[Callable[[], object]], float]
"""Times work on the device, µs."""

PROBE_BYTES = 16 << 20
"""What is copied to measure a bandwidth."""

PROBES = 5
"""Copies that are timed; the shortest counts."""


class Ticket(NamedTuple):
    """A copy that was asked for: its direction, and what its engine knows it by."""

    direction: int
    name: Any


class Over(NamedTuple):
    """A copy that was waited for, where the CPU can tell: µs waited, and its begin and end, µs."""

    waited_us: float
    begin_us: float
    end_us: float


class Links:
    """The slab of one memory, and the engines; runs in the memory are one at a time."""

    def __init__(self) -> None:
        self._slab: torch.Tensor | None = None
        self._held: dict[Ticket, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def __del__(self) -> None:
        self.settle()

    def reserve(self, size: int) -> None:
        """Have a slab of at least `size` bytes."""
        if self._slab is None or self._slab.numel() < size:
            self._slab = None
            self._slab = self._new_slab(size)

    def copy(
        self, direction: int, storage: torch.UntypedStorage, offset: int, least_us: float
    ) -> Ticket:
        """Copy all bytes of a tensor's memory to, or from, that offset of the slab.

        On the CPU it takes at least so many µs. Both ends are kept until it is over.
        """
        assert self._slab is not None
        here, there = storage.data_ptr(), self._slab.data_ptr() + offset
        target, source = (there, here) if direction == AWAY else (here, there)
        name = self._begin(direction, target, source, storage.nbytes(), least_us)
        ticket = Ticket(direction, name)
        self._held[ticket] = storage, self._slab
        return ticket

    def wait(self, ticket: Ticket) -> Over | None:
        """What this thread does next comes after the copy; what is known of it.

        Raises:
            RuntimeError: the copy failed.
        """
        over = self._wait(ticket)
        self._held.pop(ticket, None)
        return over

    def settle(self) -> None:
        """All copies not waited for are over, or come before whatever else is done."""
        if self._held:
            self._settle()
            self._held.clear()

    def _new_slab(self, size: int) -> torch.Tensor:
        raise NotImplementedError

    def _begin(self, direction: int, target: int, source: int, size: int, least_us: float) -> Any:
        """Copy `size` bytes from address to address; what the copy is known by."""
        raise NotImplementedError

    def _wait(self, ticket: Ticket) -> Over | None:
        raise NotImplementedError

    def _settle(self) -> None:
        raise NotImplementedError


class CpuLinks(Links):
    """Threads that copy in memory, as slowly as they are told: a device's engines, pretended."""

    def _new_slab(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def _begin(
        self, direction: int, target: int, source: int, size: int, least_us: float
    ) -> tuple[int, int]:
        engine = cpu_engines()[direction]
        return engine, build.links().ask(engine, target, source, size, least_us)

    def _wait(self, ticket: Ticket) -> Over:
        engine, number = ticket.name
        if engine not in cpu_engines():
            raise RuntimeError("it was begun before this process was forked")
        return Over(*build.links().wait(engine, number))

    def _settle(self) -> None:
        for ticket in self._held:
            engine, number = ticket.name
            if engine in cpu_engines():
                build.links().finish(engine, number)


@functools.cache
def cpu_engines() -> tuple[int, int]:
    """The threads of this process, one a direction; a forked child has its own."""
    ext: Any = build.links()
    engines = ext.open(), ext.open()
    for engine in engines:
        atexit.register(ext.settle, engine)
    return engines


os.register_at_fork(after_in_child=cpu_engines.cache_clear)


class CudaLinks(Links):
    """
    A stream each way, and pinned memory on the host. The CPU never waits.

    A CUDA graph holds the addresses of the slab it was captured with: that one is kept for ever.
    """

    def __init__(self, device: int) -> None:
        super().__init__()
        self._captured: torch.Tensor | None = None
        self._device = device

    def __del__(self) -> None:
        super().__del__()
        self._quiet()

    def reserve(self, size: int) -> None:
        if self._slab is None or self._slab.numel() < size:
            self._quiet()
        super().reserve(size)

    def _quiet(self) -> None:
        """The slab is out of use: PyTorch's cache of pinned memory does not know of our copies."""
        if self._slab is not None and self._captured is not self._slab:
            for stream in cuda_streams(self._device):
                stream.synchronize()

    def _new_slab(self, size: int) -> torch.Tensor:
        return pinned(size)

    def _begin(self, direction: int, target: int, source: int, size: int, least_us: float) -> int:
        if capturing() and self._captured is not self._slab:
            assert self._slab is not None
            self._captured = self._slab
            _captured.append(self._slab)
        event = _event(self._device)
        streams = self._current(), cuda_streams(self._device)[direction].cuda_stream
        _cuda_calls().cuda_copy(target, source, size, *streams, event)
        return event

    def _current(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def _wait(self, ticket: Ticket) -> None:
        _cuda_calls().cuda_wait(self._current(), ticket.name)
        _spare_events(self._device).append(ticket.name)  # what it waits for is settled

    def _settle(self) -> None:
        for ticket in self._held:
            self._wait(ticket)


CALLS = ("cudaEventCreateWithFlags", "cudaEventRecord", "cudaStreamWaitEvent", "cudaMemcpyAsync")
"""What copies ask of the CUDA runtime."""


@functools.cache
def _cuda_calls() -> Any:
    """The extension module, bound to the CUDA runtime that PyTorch uses."""
    ext: Any = build.links()
    ext.cuda_bind(*map(cuda_function, CALLS))
    return ext


@functools.cache
def _spare_events(device: int) -> list[int]:
    """Events of a device that no copy has: there are as many as were ever in flight at once."""
    return []


def _event(device: int) -> int:
    try:
        return _spare_events(device).pop()  # another thread may have taken the last one
    except IndexError:
        with torch.cuda.device(device):
            return int(_cuda_calls().cuda_event())


@functools.cache
def cuda_streams(device: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The streams of a device's copies, one a direction."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


_captured: list[torch.Tensor] = []


def pinned(size: int) -> torch.Tensor:
    """Memory of the host that a device copies to and from by itself."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


_links: "weakref.WeakKeyDictionary[Memory, Links]" = weakref.WeakKeyDictionary()


def links_of(memory: Memory, device: torch.device) -> Links:
    """The links of a memory."""
    found = _links.get(memory)
    if found is None:
        found = CpuLinks() if device.type == "cpu" else CudaLinks(device.index)
        _links[memory] = found
    return found


def measured_link(device: torch.device, time_us: Timer) -> dict[str, float]:
    """Bandwidths of a CUDA device's copies, bytes/s, and the µs that each takes beside them."""
    with unset_fake_temporarily():
        here = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
        there = pinned(PROBE_BYTES)

        def shortest(target: torch.Tensor, source: torch.Tensor) -> float:
            return min(
                time_us(lambda: target.copy_(source, non_blocking=True)) for _ in range(PROBES)
            )

        latency = min(shortest(there[:1], here[:1]), shortest(here[:1], there[:1]))
        rates = []
        for target, source in ((there, here), (here, there)):
            took = max(shortest(target, source) - latency, 1e-3)
            rates.append(PROBE_BYTES / took * 1e6)
    return {
        "d2h_bytes_per_s": rates[AWAY],
        "h2d_bytes_per_s": rates[BACK],
        "copy_latency_us": latency,
    }
