"""The CUDA side of the runtime: PyTorch's allocator, streams, timing, and CUDA graphs."""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from coop_plan.runtime.device.build import arena as extension
from coop_plan.runtime.errors import BuildError, CudaGraphError
from coop_plan.runtime.locks import fork_safe_lock
from coop_plan.runtime.options import CUDA_ALIGNMENT
from coop_plan.runtime.torch_internals.cuda import cuda_allocator, keep_busy
from coop_plan.runtime.torch_internals.fakes import unset_fake_temporarily
from coop_plan.runtime.torch_internals.ops import storage_object

log = logging.getLogger("coop-plan")

COMPUTE, RECOMPUTE, OTHER, WAIT_TO_HOST, WAIT_FROM_HOST = range(5)
"""Kinds of time of `Clock`: first computations, recomputations, other work, and waits for copies in
each direction."""

BUSY_CYCLES = 400_000
"""Device cycles (about 200 µs) that occupy the stream while Python launches the op to be timed."""


@functools.cache
def install_allocator() -> None:
    """Put the arena in front of PyTorch's CUDA allocator, and check that it serves.

    Raises:
        BuildError: the allocator of this PyTorch cannot be hooked.
    """
    ext: Any = extension()
    failure = f"the CUDA allocator of PyTorch {torch.__version__} could not be hooked: "
    try:
        address = cuda_allocator()
    except (OSError, ValueError) as error:
        raise BuildError(f"{failure}{error}") from None
    if not address or not ext.install_cuda(address):
        raise BuildError(f"{failure}it is not laid out as expected")
    with unset_fake_temporarily():
        served = _serves_from_arena(ext)
    if not served:
        raise BuildError(f"{failure}it does not ask for memory where expected")


def _serves_from_arena(ext: Any) -> bool:
    """True if a tensor allocated in an op of a program gets the program's address."""
    device = torch.cuda.current_device()
    block = Block(2 * CUDA_ALIGNMENT, device)
    memory = ext.memory_adopt(device, block.address, block.size)
    first, size, offset = (
        b"".join(value.to_bytes(8, "little") for value in values)
        for values in ((0, 1), (CUDA_ALIGNMENT,), (CUDA_ALIGNMENT,))
    )
    program = ext.program_create(first, size, offset, b"\0", False)
    run = ext.run_create(program)
    ext.begin(run, memory, block.size, True, False)
    ext.enter(0)
    try:
        tensor = torch.empty(CUDA_ALIGNMENT, dtype=torch.uint8, device=f"cuda:{device}")
    finally:
        ext.leave()
    served: bool = (
        tensor.data_ptr() == block.address + CUDA_ALIGNMENT and len(ext.memory_there(memory)) == 1
    )
    del tensor
    served = served and not ext.memory_there(memory)
    ext.run_destroy(run)
    ext.program_destroy(program)
    ext.memory_retire(memory)
    return served


class Block:
    """Memory of an arena on a CUDA device, with ordering between the streams that use it.

    The CPU launches steps one after the other. If a step's stream differs from the last step's, it
    waits for that. A block in which a CUDA graph was captured is never freed: the graph holds its
    addresses, and PyTorch does not report the end of a graph.
    """

    def __init__(self, size: int, device: int) -> None:
        self.size = size
        self.device = device
        self.captured = False
        self._tensor = torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
        self._stream = torch.cuda.current_stream(device)

    @property
    def address(self) -> int:
        """Address of its first byte."""
        return self._tensor.data_ptr()

    def use(self) -> None:
        """Make the current stream wait for the last stream that used the block."""
        if capturing():  # torch.cuda.graph has synchronized; the user orders replays
            if not self.captured:
                self.captured = True
                _captured.append(self)
            return
        stream = torch.cuda.current_stream(self.device)
        if stream != self._stream:
            stream.wait_stream(self._stream)
            self._tensor.record_stream(stream)
            self._stream = stream

    def move(self, begin: int, to: int, size: int) -> None:
        """Copy `size` bytes from offset `begin` to the lower `to`, in parts if they overlap."""
        gap = begin - to
        for done in range(0, size, gap):
            count = min(gap, size - done)
            source = self._tensor.narrow(0, begin + done, count)
            self._tensor.narrow(0, to + done, count).copy_(source)


_captured: list[Block] = []


@contextmanager
def moved_out(storages: Sequence[torch.UntypedStorage], device: int | None) -> Iterator[None]:
    """Move storages to memory of PyTorch's allocator, so that their own is free in this context.

    They wait on the host meanwhile: an arena is freed before they take other memory.
    """
    empty = partial(torch.empty, 0, dtype=torch.uint8, device=f"cuda:{device}")
    on_host = []
    for storage in storages:
        on_host.append(bytes_of(storage).cpu())
        exchange_memory(storage, empty().untyped_storage())
    try:
        yield
    finally:
        if storages:
            torch.cuda.empty_cache()  # an arena that was freed may be of use as a whole only
        for storage, values in zip(storages, on_host, strict=True):
            exchange_memory(storage, values.to(f"cuda:{device}").untyped_storage())


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The bytes of a storage, as a tensor of it."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def copy_out(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Move a storage to memory of PyTorch's allocator on the same device.

    Returns:
        A storage with the memory that it had.
    """
    before = bytes_of(storage).clone().untyped_storage()
    exchange_memory(storage, before)
    return before


def exchange_memory(first: torch.UntypedStorage, second: torch.UntypedStorage) -> None:
    """Exchange the memory of two storages of equal size, of which one may have none."""
    ext: Any = extension()
    ext.exchange_memory(storage_object(first), storage_object(second))


def part_of(slab: torch.Tensor, offset: int, size: int, device: torch.device) -> torch.Tensor:
    """Bytes of a slab on the host as a tensor of a device, which keeps the slab alive."""
    ext: Any = extension()
    part = torch.empty(0, dtype=torch.uint8, device=device)
    storage = part.untyped_storage()
    ext.lay_over(storage_object(storage), slab.data_ptr() + offset, size, slab)
    return part.set_(storage, 0, (size,), (1,))


def take_over(storage: torch.UntypedStorage) -> bool:
    """Let a storage whose memory was read from a file be resizable; False if it is of another kind.

    Its memory must be that of one tensor, since an array may have been made of others.
    """
    ext: Any = extension()
    part = torch.empty(1, dtype=torch.uint8, device="cpu").untyped_storage()[:]
    return bool(ext.take_over(storage_object(storage), storage_object(part)))


def refuse_capture_of_gradients() -> None:
    """Raise if a step with gradients in its arena is captured into a CUDA graph.

    Raises:
        CudaGraphError: each replay would overwrite what a step between replays left in the arena.
    """
    if capturing():
        raise CudaGraphError(
            'a CUDA graph keeps its gradients, which outputs="gradients" places in the arena that'
            ' other steps use: capture it with outputs="outside"'
        )


def capturing() -> bool:
    """True if the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


_benchmark_lock = fork_safe_lock()
_users = 0
_benchmark_setting = False


@contextmanager
def without_cudnn_benchmark() -> Iterator[None]:
    """Disable `cudnn.benchmark` in this context: cuDNN selects kernels by heuristics.

    Benchmarking runs in each thread, backward threads included, and may select different kernels:
    with other workspaces than planned, and recomputed results that differ from the first ones.
    """
    global _users, _benchmark_setting
    backend: Any = torch.backends.cudnn
    with _benchmark_lock:
        if _users == 0:
            _benchmark_setting = backend.benchmark
            if _benchmark_setting:
                warn_of_benchmark()
            backend.benchmark = False
        _users += 1
    try:
        yield
    finally:
        with _benchmark_lock:
            _users -= 1
            if _users == 0:
                backend.benchmark = _benchmark_setting


@functools.cache
def warn_of_benchmark() -> None:
    """Log once that planned steps ignore `cudnn.benchmark`."""
    log.warning(
        "planned steps run without torch.backends.cudnn.benchmark: it selects kernels in each"
        " thread, with other workspaces than planned"
    )


def reject_captured_recompute(names: Sequence[str]) -> None:
    """Raise if random ops are to be recomputed while a CUDA graph is captured.

    Raises:
        CudaGraphError: `names`, of the recomputed random ops, is not empty during a capture.
    """
    if names and capturing():
        kinds = ", ".join(sorted(set(names)))
        raise CudaGraphError(
            f"this plan recomputes {len(names)} random ops ({kinds}), and PyTorch does not let the"
            " generator be set while a CUDA graph is captured: use a larger budget, at which they"
            " are not recomputed, or no dropout"
        )


def device_us(device: int, run: Callable[[], object]) -> float:
    """Time of one run on the device's current stream, µs, without its launch."""
    begin, end = _event(), _event()
    with torch.cuda.device(device):
        keep_busy(BUSY_CYCLES)
        begin.record()
        result = run()
        end.record()
    end.synchronize()
    del result
    return float(begin.elapsed_time(end)) * 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


TIMED_FIRST, TIMED_EVERY = 8, 16
"""The first steps are all timed, then one in `TIMED_EVERY`."""


class Clock:
    """Device time of steps in first computations and recomputations, measured by events.

    A step is read after the device has finished it; the CPU never waits. Recording events costs CPU
    time in steps with many copies, so not every step is timed.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._steps = 0
        self._timed = True
        self._spare: list[torch.cuda.Event] = []
        self._marks: list[tuple[Any, int]] = []
        self._done: list[list[tuple[Any, int]]] = []
        self.stall_us = [0.0, 0.0]
        """Time that the last step read waited for copies, by direction."""

    def begin(self) -> None:
        """Begin a step, and drop the events of an unfinished one."""
        self._marks = []
        self._timed = self._steps < TIMED_FIRST or self._steps % TIMED_EVERY == 0
        self._steps += 1

    def skip(self) -> None:
        """Do not time this step: a replay has no times of first computations and others."""
        self._timed, self._marks = False, []

    def mark(self, kind: int) -> None:
        """Attribute later work of the current stream to a kind."""
        if self._timed and not capturing():
            event = self._spare.pop() if self._spare else _event()
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append((event, kind))

    @contextmanager
    def waiting(self, direction: int) -> Iterator[None]:
        """Attribute the time in this context to waiting for copies in a direction (0: to host)."""
        if not self._timed:
            yield
            return
        before = self._marks[-1][1] if self._marks else OTHER
        self.mark(WAIT_TO_HOST + direction)
        yield
        self.mark(before)

    def end(self) -> None:
        """End the step."""
        if self._marks:
            self._done.append(self._marks)
        self._marks = []

    def read(self) -> tuple[float, float] | None:
        """Compute and recompute time, µs, of the last step that finished since the last call."""
        found = None
        if capturing():  # CUDA forbids queries during a capture
            return None
        while self._done and self._done[0][-1][0].query():
            marks = self._done.pop(0)
            times = [0.0] * 5
            for (event, kind), (following, _) in itertools.pairwise(marks):
                times[kind] += event.elapsed_time(following) * 1e3
            found = times[COMPUTE], times[RECOMPUTE]
            self.stall_us = times[WAIT_TO_HOST:]
            self._spare += [event for event, _ in marks]
        return found
