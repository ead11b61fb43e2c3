"""The CUDA side of the runtime: PyTorch's allocator, streams, times, and CUDA graphs.

Nothing here is imported or called before a graph with CUDA tensors is captured.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from coop_plan.runtime.device.build import arena as extension
from coop_plan.runtime.errors import BuildError, CudaGraphError
from coop_plan.runtime.locks import fork_safe_lock
from coop_plan.runtime.options import CUDA_ALIGNMENT
from coop_plan.runtime.torch_internals.cuda import cuda_allocator, keep_busy
from coop_plan.runtime.torch_internals.fakes import unset_fake_temporarily

log = logging.getLogger("coop-plan")

FIRST, AGAIN, NEITHER, AWAY, BACK = range(5)
"""Kinds of time that `Clock` tells apart: first computations, recomputations, and the rest; waits
for copies to the host, and back."""

BUSY_CYCLES = 400_000
"""Of the device's clock, about 200 µs: it works so long while Python starts the op to be timed."""


@functools.cache
def take_over() -> None:
    """Put the arena in front of PyTorch's CUDA allocator, and see that it is.

    Raises:
        BuildError: this PyTorch's allocator is not one we know how to reach.
    """
    ext: Any = extension()
    fault = f"the CUDA allocator of PyTorch {torch.__version__} could not be taken over: "
    try:
        address = cuda_allocator()
    except (OSError, ValueError) as error:
        raise BuildError(f"{fault}{error}") from None
    if not address or not ext.install_cuda(address):
        raise BuildError(f"{fault}it is not laid out as expected")
    with unset_fake_temporarily():
        served = _is_served(ext)
    if not served:
        raise BuildError(f"{fault}it does not ask for memory where expected")


def _is_served(ext: Any) -> bool:
    """Whether a tensor made in an op of a program lies where the program says."""
    device = torch.cuda.current_device()
    block = Block(2 * CUDA_ALIGNMENT, device)
    memory = ext.memory_adopt(device, block.address, block.size)
    first, size, offset = (
        b"".join(value.to_bytes(8, "little") for value in values)
        for values in ((0, 1), (CUDA_ALIGNMENT,), (CUDA_ALIGNMENT,))
    )
    program = ext.program_create(first, size, offset, b"\0")
    run = ext.run_create(program)
    ext.begin(run, memory, block.size, True, False)
    ext.enter(0)
    try:
        there = torch.empty(CUDA_ALIGNMENT, dtype=torch.uint8, device=f"cuda:{device}")
    finally:
        ext.leave()
    served: bool = (
        there.data_ptr() == block.address + CUDA_ALIGNMENT and len(ext.memory_there(memory)) == 1
    )
    del there
    served = served and not ext.memory_there(memory)
    ext.run_destroy(run)
    ext.program_destroy(program)
    ext.memory_retire(memory)
    return served


class Block:
    """Memory of an arena on a CUDA device, ordered between the streams that use it.

    The CPU starts the steps one after the other; a stream that is not the last step's waits for it.
    A CUDA graph captured in a block holds its addresses: the block is then kept for ever, since
    nothing tells when the graph is gone.
    """

    def __init__(self, size: int, device: int) -> None:
        self.size = size
        self.device = device
        self.captured = False
        self._tensor = torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
        self._stream = torch.cuda.current_stream(device)

    @property
    def address(self) -> int:
        """Where it begins."""
        return self._tensor.data_ptr()

    def use(self) -> None:
        """What this thread's stream does from now on comes after what used the block before."""
        if capturing():  # torch.cuda.graph has waited for everything; the user orders the replays
            if not self.captured:
                self.captured = True
                _captured.append(self)
            return
        stream = torch.cuda.current_stream(self.device)
        if stream != self._stream:
            stream.wait_stream(self._stream)
            self._tensor.record_stream(stream)
            self._stream = stream


_captured: list[Block] = []


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


_tried = fork_safe_lock()
_untried = 0
_wanted = False


@contextmanager
def kernels_untried() -> Iterator[None]:
    """While this lasts, cuDNN goes by its heuristics, whatever `cudnn.benchmark` says.

    What it finds by trying, it finds for each thread anew, backward threads too, and not always the
    same: other workspaces than were planned, and recomputed results that are not those of before.
    """
    global _untried, _wanted
    backend: Any = torch.backends.cudnn
    with _tried:
        if _untried == 0:
            _wanted = backend.benchmark
            if _wanted:
                warn_of_benchmark()
            backend.benchmark = False
        _untried += 1
    try:
        yield
    finally:
        with _tried:
            _untried -= 1
            if _untried == 0:
                backend.benchmark = _wanted


@functools.cache
def warn_of_benchmark() -> None:
    """Say once that steps run without it."""
    log.warning(
        "planned steps run as without torch.backends.cudnn.benchmark: it tries kernels in each"
        " thread anew, with other workspaces than were planned"
    )


def refuse_capture_of(names: Sequence[str]) -> None:
    """Refuse to capture the recomputation of random ops.

    Raises:
        CudaGraphError: there are some, and a CUDA graph is being captured.
    """
    if names and capturing():
        kinds = ", ".join(sorted(set(names)))
        raise CudaGraphError(
            f"this plan recomputes {len(names)} random ops ({kinds}), and PyTorch does not let the"
            " generator be set while a CUDA graph is captured: give it a budget at which they are"
            " kept, or no dropout"
        )


def device_us(device: int, run: Callable[[], object]) -> float:
    """Time of one run on the device's current stream, µs, the time to start it left out."""
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
"""So many steps are timed to begin with, and then one in so many."""


class Clock:
    """Time of steps on the device in first computations and in recomputations, by events.

    A step is read when the device is through with it; the CPU never waits. To record events takes
    the CPU some time in steps of many copies, so not every step is timed.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._steps = 0
        self._timed = True
        self._spare: list[torch.cuda.Event] = []
        self._marks: list[tuple[Any, int]] = []
        self._done: list[list[tuple[Any, int]]] = []
        self.stall_us = [0.0, 0.0]
        """Of the step read last, what it waited for copies away, and back."""

    def begin(self) -> None:
        """A step begins; what the one before left unfinished is dropped."""
        self._marks = []
        self._timed = self._steps < TIMED_FIRST or self._steps % TIMED_EVERY == 0
        self._steps += 1

    def mark(self, kind: int) -> None:
        """What the current stream does from here on is of this kind."""
        if self._timed and not capturing():
            event = self._spare.pop() if self._spare else _event()
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append((event, kind))

    @contextmanager
    def waiting(self, direction: int) -> Iterator[None]:
        """The current stream waits for a copy in that direction (0: to the host)."""
        if not self._timed:
            yield
            return
        before = self._marks[-1][1] if self._marks else NEITHER
        self.mark(AWAY + direction)
        yield
        self.mark(before)

    def end(self) -> None:
        """The step is over."""
        if self._marks:
            self._done.append(self._marks)
        self._marks = []

    def read(self) -> tuple[float, float] | None:
        """The two times, µs, of the last step that the device has finished since it was asked."""
        found = None
        if capturing():  # CUDA forbids the question
            return None
        while self._done and self._done[0][-1][0].query():
            marks = self._done.pop(0)
            times = [0.0] * 5
            for (event, kind), (following, _) in itertools.pairwise(marks):
                times[kind] += event.elapsed_time(following) * 1e3
            found = times[FIRST], times[AGAIN]
            self.stall_us = times[AWAY:]
            self._spare += [event for event, _ in marks]
        return found
