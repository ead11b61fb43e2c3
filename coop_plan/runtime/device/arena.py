"""The arena: the memory in which a step runs, and the slots of its allocations."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from coop_plan.runtime.device.build import arena as extension
from coop_plan.runtime.device.cuda import Block, copy_out, moved_out
from coop_plan.runtime.errors import CudaGraphError
from coop_plan.runtime.options import CUDA_ALIGNMENT
from coop_plan.runtime.torch_internals.ops import storage_object, storage_reference

SERVED_OUTSIDE = -1
"""Offset of a slot that PyTorch's allocator serves: for an output that outlives the step."""

COPIES = 2
"""Kind of time of an occurrence that starts a copy; 0: a first computation, 1: a recomputation."""

Slots = Sequence[tuple[int, int]]
"""Slots of one op occurrence: (bytes, offset in the arena or `SERVED_OUTSIDE`) per allocation."""


@dataclass(frozen=True)
class Counters:
    """Measurements since the step began, in bytes and µs.

    Attributes:
        high_water_bytes: highest used offset of the arena.
        outside_bytes: allocations of ops that were not served as planned.
        process_bytes: peak of the step's thread, the whole arena included, above `before_bytes`.
        before_bytes: bytes of the process before the step.
        compute_us, recompute_us, copies_us: CPU time of the thread in first computations, in
            recomputations, and in starts of copies and waits for them.
        stray_count, stray_bytes: live allocations outside the plan at the peak, if the step is
            watched.
        largest_bytes, largest_line: the largest of them, and the user's line that made it.
        conflict_slot: the first slot that was occupied by a tensor past its planned life, or -1.
        conflicting_slot, conflicting_bytes: that tensor's slot, -1 if it is from another step, and
            its size.
    """

    high_water_bytes: int
    outside_bytes: int
    process_bytes: int
    before_bytes: int
    compute_us: float
    recompute_us: float
    copies_us: float
    stray_count: int
    stray_bytes: int
    largest_bytes: int
    largest_line: str
    conflict_slot: int
    conflicting_slot: int
    conflicting_bytes: int


class Memory:
    """Memory of an arena, on the CPU or a CUDA device, for one run at a time.

    It is allocated at first use, with at least `wanted` bytes. `tenant` is the owner of the last
    run in it.
    """

    def __init__(self) -> None:
        self._ext: Any = extension()
        self._destroy = self._ext.memory_retire  # at exit the extension may be emptied before
        self._handle = 0
        self._block: Block | None = None
        self._results: list[Callable[[], torch.UntypedStorage | None]] = []
        self.bytes = self.wanted = 0
        self.tenant: object = None

    def __del__(self) -> None:
        if getattr(self, "_handle", 0):
            self._retire()

    @property
    def block(self) -> Block | None:
        """The block of an arena on a CUDA device, once it is allocated."""
        return self._block

    @property
    def in_cuda_graph(self) -> bool:
        """True if a CUDA graph holds its addresses."""
        return self._block is not None and self._block.captured

    @property
    def live_offsets(self) -> list[int]:
        """Offsets of the slots of its live tensors, by address; -1 for a borrowed one."""
        found: list[int] = self._ext.memory_there(self._handle) if self._handle else []
        return found

    def reserve(self, size: int, device: int | None = None) -> int:
        """The handle of at least `size` bytes; no tensor may be live if the memory has to grow.

        It grows to the bytes that are `wanted`, unless a CUDA graph holds its addresses.

        On a CUDA device, the current stream waits for the last stream that used the memory.

        Raises:
            MemoryError, torch.OutOfMemoryError: out of memory.
            CudaGraphError: the memory would have to grow, and a CUDA graph holds its addresses.
        """
        if not self.in_cuda_graph:
            size = max(size, self.wanted)
        current = None if self._block is None else self._block.device
        if self._handle and (self.bytes < size or current != device):
            if self._block is not None and self._block.captured:
                raise CudaGraphError(
                    f"a CUDA graph was captured in an arena of {self.bytes} bytes, and another"
                    f" step of the same function needs {size}: run the largest step before the"
                    " capture, or give it a torch.compile of its own"
                )
            self._retire()
        if not self._handle:
            _free_blocks(self._ext)
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
        """Free the memory: now, or after its last tensor has died."""
        if self._block is not None and self.live_offsets:
            _blocks_in_use.append((self._handle, self._block))
        else:
            self._destroy(self._handle)
        self._handle, self._block, self._results = 0, None, []

    def note_results(self, values: Iterable[object]) -> None:
        """Note the tensors that a step returns: the user may keep those in this memory."""
        if self._block is None:
            return
        begin, end = self._block.address, self._block.address + self.bytes
        for value in values:
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                continue
            if begin <= value.data_ptr() < end:
                self._results.append(storage_reference(value))

    def detach_live(self, *, retire: bool = False) -> None:
        """Leave the memory of live tensors to their holders.

        On the CPU the holders keep the pages, all others are freed, and the next `reserve` maps new
        memory. On CUDA a step's results move to PyTorch's allocator; `retire` frees the memory
        before they take theirs.
        """
        if self._block is None:
            if self.live_offsets:
                self._retire()
            return
        found = self._live_results()
        if found:
            self._block.use()
        self._results = []
        with moved_out(found, self._block.device):
            if retire:
                self._retire()

    def lend(self) -> bool:
        """Let free bytes serve this thread's allocations outside ops, until `recall` or a run.

        Returns:
            False if it cannot be lent: it is on the CPU, or a CUDA graph holds its addresses.
        """
        if self._block is None or self._block.captured:
            return False
        self._block.use()
        if len(found := self._live_results()) == len(self.live_offsets):
            sizes = [storage.nbytes() for storage in found]
            places = [storage.data_ptr() - self._block.address for storage in found]
            for number, offset in packed(places, sizes, self.bytes):
                self._block.move(places[number], offset, sizes[number])
                self._ext.memory_move(self._handle, storage_object(found[number]), offset)
        self._ext.memory_lend(self._handle)
        return True

    def recall(self, kept: Iterable[object]) -> None:
        """End a loan; borrowed tensors among `kept` move to PyTorch's allocator."""
        if not self._handle or self._block is None or not self._ext.memory_recall(self._handle):
            return
        begin, end = self._block.address, self._block.address + self.bytes
        for value in kept:
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                storage = value.untyped_storage()
                if begin <= storage.data_ptr() < end:
                    copy_out(storage)

    def _live_results(self) -> list[torch.UntypedStorage]:
        """Storages of the noted results that are alive, by address."""
        found = (storage for result in self._results if (storage := result()) is not None)
        by_address = {storage.data_ptr(): storage for storage in found}
        return [by_address[address] for address in sorted(by_address)]

    def count_in(self, run: int) -> None:
        """Count its bytes in the run with this handle."""
        if self._handle:
            self._ext.run_include(run, self._handle)

    def release_above(self, ceiling: int) -> None:
        """Mark as idle: on the CPU, pages are freed before the process exceeds `ceiling` bytes."""
        if self._handle:
            self._ext.memory_rest(self._handle, ceiling)


MAX_COPIES = 256
"""Copies by which a tensor may move to a place that overlaps its own."""


def packed(places: Sequence[int], sizes: Sequence[int], end: int) -> Iterator[tuple[int, int]]:
    """Moves to lower offsets, in order, after which the bytes up to `end` are one gap.

    There are none if one gap holds two copies of all tensors: a foreach update takes one. A tensor
    whose move would take more than `MAX_COPIES` copies stays.

    Args:
        places: offsets of tensors in a memory, ascending.
        sizes: their bytes.
        end: bytes of the memory.

    Yields:
        The position of a tensor, and its new offset.
    """
    ends = [aligned(place + size) for place, size in zip(places, sizes, strict=True)]
    gaps = (after - before for before, after in zip([0, *ends], [*places, end], strict=True))
    if max(gaps) >= 2 * sum(sizes):
        return
    free = 0
    for number, (place, size) in enumerate(zip(places, sizes, strict=True)):
        if size <= MAX_COPIES * (place - free):
            yield number, free
            place = free
        free = aligned(place + size)


def aligned(size: int) -> int:
    """`size` rounded up as PyTorch's CUDA allocator does."""
    return -(-size // CUDA_ALIGNMENT) * CUDA_ALIGNMENT


_blocks_in_use: list[tuple[int, Block]] = []
"""Handles and blocks of memories that were dropped with live tensors in them."""


def _free_blocks(ext: Any) -> None:
    """Free the blocks in use whose tensors have died."""
    for entry in [entry for entry in _blocks_in_use if not ext.memory_there(entry[0])]:
        _blocks_in_use.remove(entry)
        ext.memory_retire(entry[0])


class Arena:
    """The slots of each op occurrence of a step, in `size` bytes.

    `kinds` has the kind of time of each occurrence (`COPIES`). `device` is the index of a CUDA
    device, None for the CPU. A slot serves allocations of its size, or also `smaller` ones.
    """

    def __init__(
        self,
        size: int,
        program: Sequence[Slots],
        kinds: Sequence[int],
        device: int | None = None,
        *,
        smaller: bool = False,
    ) -> None:
        self._ext: Any = extension()
        self._destroy = self._ext.program_destroy
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
            bytes(kinds),
            smaller,
        )
        self.enter = self._ext.enter
        self.pause = self._ext.pause
        self.pause_for_copy = self._ext.pause_for_copy
        self.leave = self._ext.leave

    def occurrence(self, slot: int) -> int:
        """The occurrence of a slot, which is numbered over all occurrences."""
        return int(np.searchsorted(self._first, slot, side="right")) - 1

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._destroy(self.handle)


class Run:
    """One call of a step; its parts may run in different memories."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._ext: Any = extension()
        self._destroy = self._ext.run_destroy
        self._handle: int = self._ext.run_create(arena.handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._destroy(self._handle)

    def begin(self, memory: Memory, *, fresh: bool, watch: bool = False) -> None:
        """Run this thread's ops in `memory` until `leave`.

        `fresh` resets the counters; `watch` also counts allocations outside the plan.
        """
        reserved = memory.reserve(self.arena.size, self.arena.device)
        self._ext.begin(self._handle, reserved, self.arena.size, fresh, watch)

    def serve_elsewhere(self, slots: Sequence[int]) -> None:
        """Let PyTorch's allocator serve these slots, which are numbered over all occurrences."""
        self._ext.run_elsewhere(self._handle, np.array(slots, dtype=np.int64).tobytes())

    def allocated(self, addresses: Sequence[int | None]) -> list[int]:
        """Positions of the storages on the CPU that were allocated since the last fresh `begin`."""
        known = np.array([address or 0 for address in addresses], dtype=np.uint64)
        found: list[int] = self._ext.run_made(self._handle, known.tobytes())
        return found

    def include(self, memory: Memory) -> None:
        """Count the bytes of a memory that existed before the last fresh `begin`."""
        memory.count_in(self._handle)

    def exclude(self, size: int, since: Counters) -> None:
        """Count `size` bytes that stay, allocated `since` these counters, as of before the step."""
        self._ext.run_exclude(self._handle, since.process_bytes, size)

    def end(self) -> None:
        """Stop the counters."""
        self._ext.run_end(self._handle)

    def counters(self) -> Counters:
        """Measurements since the last fresh `begin`."""
        return Counters(*self._ext.counters(self._handle))


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Context that counts this thread's allocations on the CPU until they are freed.

    Its list gets the peak and the last of the bytes above those at the begin, after the context.
    """
    found: list[int] = []
    window = extension().window_open()
    try:
        yield found
    finally:
        found += extension().window_close(window)


def node_owners(node: object) -> int:
    """Reference count of a C++ autograd node, `node` included; 0 if it is unknown."""
    count: int = extension().node_owners(node)
    return count


def process_bytes() -> tuple[int, int]:
    """Current and peak bytes allocated by PyTorch on the CPU, arenas included."""
    current, peak = extension().process_bytes()
    return current, peak


def reset_peak() -> None:
    """Reset the peak of `process_bytes` to the current bytes."""
    extension().reset_peak()
