"""The arena: the memory that a step runs in, and the step's slots in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coop_plan.runtime.device.build import arena as extension
from coop_plan.runtime.device.cuda import Block
from coop_plan.runtime.errors import CudaGraphError

SERVED_OUTSIDE = -1
"""Offset of a slot that PyTorch's allocator serves: an output that leaves the step."""

Slots = Sequence[tuple[int, int]]
"""Of one op occurrence: (bytes, offset in the arena or `SERVED_OUTSIDE`) per allocation."""


@dataclass(frozen=True)
class Counters:
    """What was measured since the step began, in bytes and µs.

    How far the arena was used; planned allocations not served as planned; what the process had at
    its highest beyond what it had before, the arena counted whole; time in first computations and
    in recomputations.
    """

    high_water_bytes: int
    outside_bytes: int
    process_bytes: int
    first_us: float
    again_us: float


class Memory:
    """Bytes at one address, on the CPU or a CUDA device, for one run at a time.

    They are taken when first needed. `kept` are the ranges, ascending (begin, end), of what the
    last run in it left to the user.
    """

    def __init__(self) -> None:
        self._ext: Any = extension()
        self._handle = 0
        self._block: Block | None = None
        self.bytes = 0
        self.kept: Sequence[tuple[int, int]] = ()

    def __del__(self) -> None:
        if getattr(self, "_handle", 0):
            self._retire()

    @property
    def fixed(self) -> bool:
        """Whether a CUDA graph holds its addresses."""
        return self._block is not None and self._block.captured

    @property
    def live(self) -> int:
        """Allocations in it that are not freed yet."""
        count: int = self._ext.memory_live(self._handle) if self._handle else 0
        return count

    def reserve(self, size: int, device: int | None = None) -> int:
        """The handle of at least `size` bytes; nothing may be live if it has to grow.

        On a CUDA device, what the current stream does next comes after what used them before.

        Raises:
            MemoryError, torch.OutOfMemoryError: there is not as much.
            CudaGraphError: it would have to grow, and a CUDA graph holds its addresses.
        """
        there = None if self._block is None else self._block.device
        if self._handle and (self.bytes < size or there != device):
            if self._block is not None and self._block.captured:
                raise CudaGraphError(
                    f"a CUDA graph was captured in an arena of {self.bytes} bytes, and another"
                    f" step of the same function needs {size}: run the largest step before the"
                    " capture, or give it a torch.compile of its own"
                )
            self._retire()
        if not self._handle:
            if device is None:
                self._handle = self._ext.memory_create(size)
            else:
                self._block = Block(size, device)
                self._handle = self._ext.memory_adopt(device, self._block.address, size)
            self.bytes = size
        if self._block is not None:
            self._block.use()
        return self._handle

    def _retire(self) -> None:
        """Give it back, at once or, on the CPU, when nothing lives in it any more."""
        if self._block is not None and self.live:
            _left.append(self._block)  # never met: who holds a tensor of a step holds the step
        self._ext.memory_retire(self._handle)
        self._handle, self._block = 0, None

    def part(self) -> None:
        """Leave the pages of what the last run left to whoever holds some of it.

        On the CPU all other pages go back to the system now, these when the last such tensor is
        freed; the next `reserve` maps anew. On CUDA nothing of a run outlives it.
        """
        if self.live and self._block is None:
            ranges = np.array(self.kept, dtype=np.int64).reshape(-1)
            self._ext.memory_part(self._handle, ranges.tobytes())
            self._handle = 0
        self.kept = ()


_left: list[Block] = []


class Arena:
    """The slots of each op occurrence of a step, in `size` bytes.

    `device` is the number of a CUDA device, None for the CPU.
    """

    def __init__(
        self,
        size: int,
        program: Sequence[Slots],
        again: Sequence[bool],
        device: int | None = None,
    ) -> None:
        self._ext: Any = extension()
        self.size = size
        self.device = device
        first = np.zeros(len(program) + 1, dtype=np.int64)
        np.cumsum([len(slots) for slots in program], out=first[1:])
        flat = np.array([slot for slots in program for slot in slots], dtype=np.int64)
        flat = flat.reshape(-1, 2)
        self.handle: int = self._ext.program_create(
            first.tobytes(),
            np.ascontiguousarray(flat[:, 0]).tobytes(),
            np.ascontiguousarray(flat[:, 1]).tobytes(),
            bytes(int(flag) for flag in again),
        )
        self.enter = self._ext.enter
        self.pause = self._ext.pause
        self.leave = self._ext.leave

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._ext.program_destroy(self.handle)


class Run:
    """One call of a step, in a memory that may be another one for each part of it."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._ext: Any = extension()
        self._handle: int = self._ext.run_create(arena.handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._ext.run_destroy(self._handle)

    def begin(self, memory: Memory, *, fresh: bool) -> None:
        """Run this thread's ops in `memory` until `leave`; `fresh` starts the counters anew."""
        reserved = memory.reserve(self.arena.size, self.arena.device)
        self._ext.begin(self._handle, reserved, fresh)

    def counters(self) -> Counters:
        """What was measured since the last fresh `begin`."""
        return Counters(*self._ext.counters(self._handle))


def process_bytes() -> tuple[int, int]:
    """Bytes now allocated by PyTorch on the CPU, arenas included, and their peak."""
    current, peak = extension().process_bytes()
    return current, peak


def reset_peak() -> None:
    """Start a new peak for `process_bytes`."""
    extension().reset_peak()
