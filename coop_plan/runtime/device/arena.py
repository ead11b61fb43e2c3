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

    How far the arena was used; planned allocations not served as planned; what the step's thread
    had at its highest beyond what it had before, the arena counted whole; what the process had
    before; time in first computations and in recomputations. Of a step that was watched: how many
    allocations beside the plan there were at its highest, their bytes, the bytes of the largest and
    the line of the user's that took it. The first slot in whose place something lay that the plan
    had given up, -1 if none; the slot of that, -1 if it is none of this step's, and its bytes.
    """

    high_water_bytes: int
    outside_bytes: int
    process_bytes: int
    before_bytes: int
    first_us: float
    again_us: float
    stray_count: int
    stray_bytes: int
    largest_bytes: int
    largest_line: str
    wanted_slot: int
    kept_slot: int
    kept_bytes: int


class Memory:
    """Bytes at one address, on the CPU or a CUDA device, for one run at a time.

    They are taken when first needed. `tenant` is whose run was the last in it.
    """

    def __init__(self) -> None:
        self._ext: Any = extension()
        self._handle = 0
        self._block: Block | None = None
        self.bytes = 0
        self.tenant: object = None

    def __del__(self) -> None:
        if getattr(self, "_handle", 0):
            self._retire()

    @property
    def fixed(self) -> bool:
        """Whether a CUDA graph holds its addresses."""
        return self._block is not None and self._block.captured

    @property
    def there(self) -> list[int]:
        """Where what lives in it begins, ascending, in bytes."""
        found: list[int] = self._ext.memory_there(self._handle) if self._handle else []
        return found

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
        if self._block is not None and self.there:
            _left.append(self._block)  # never met: who holds a tensor of a step holds the step
        self._ext.memory_retire(self._handle)
        self._handle, self._block = 0, None

    def part(self) -> None:
        """Leave to whoever holds something of the last run the pages on which it lies.

        On the CPU all others go back to the system now, these when nothing lives on them any more;
        the next `reserve` maps anew. On CUDA nothing of a run outlives it.
        """
        if self._block is None and self.there:
            self._retire()

    def rest(self, ceiling: int) -> None:
        """No run is in it now: on the CPU, pages go before the process has more bytes than that."""
        if self._handle:
            self._ext.memory_rest(self._handle, ceiling)


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
        self._first = first = np.zeros(len(program) + 1, dtype=np.int64)
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

    def occurrence(self, slot: int) -> int:
        """Whose slot it is; slots are counted over all occurrences."""
        return int(np.searchsorted(self._first, slot, side="right")) - 1

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

    def begin(self, memory: Memory, *, fresh: bool, watch: bool = False) -> None:
        """Run this thread's ops in `memory` until `leave`.

        `fresh` starts the counters anew; `watch` has them tell what is taken beside the plan.
        """
        reserved = memory.reserve(self.arena.size, self.arena.device)
        self._ext.begin(self._handle, reserved, self.arena.size, fresh, watch)

    def serve_elsewhere(self, slots: Sequence[int]) -> None:
        """Let PyTorch's allocator serve these slots, whose numbers go over all occurrences."""
        self._ext.run_elsewhere(self._handle, np.array(slots, dtype=np.int64).tobytes())

    def end(self) -> None:
        """Count nothing more for it."""
        self._ext.run_end(self._handle)

    def counters(self) -> Counters:
        """What was measured since the last fresh `begin`."""
        return Counters(*self._ext.counters(self._handle))


def node_owners(node: object) -> int:
    """How many owners a node of autograd has, itself written in C++; `node` is one of them."""
    count: int = extension().node_owners(node)
    return count


def process_bytes() -> tuple[int, int]:
    """Bytes now allocated by PyTorch on the CPU, arenas included, and their peak."""
    current, peak = extension().process_bytes()
    return current, peak


def reset_peak() -> None:
    """Start a new peak for `process_bytes`."""
    extension().reset_peak()
