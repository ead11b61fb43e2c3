"""Executor of a plan's transfers: offloads, prefetches and waits, called between its ops.

A prefetched tensor is a new one at its planned address, with the dtype, sizes and strides of the
tensor that was offloaded, or of the parameter whose home is read.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from coop_plan.runtime.device.arena import Arena, Memory
from coop_plan.runtime.device.copy_engines import (
    FROM_HOST,
    TO_HOST,
    CopyEngines,
    CopyHandle,
    copy_engines_of,
)
from coop_plan.runtime.device.cuda import Clock
from coop_plan.runtime.errors import CopyError
from coop_plan.runtime.execute.homes import Copy, Homes
from coop_plan.runtime.execute.plan_index import Transfer
from coop_plan.runtime.reports import CopySpan
from coop_plan.schemas import Device

T = TypeVar("T")

Layout = tuple[torch.dtype, int | torch.SymInt, Sequence[int], Sequence[int]]
"""Dtype, storage offset, sizes and strides of a tensor."""


class TransferProgram(NamedTuple):
    """The transfers of a plan and all that their execution depends on.

    `first_occurrence` is the arena's occurrence for the first prefetch; the others follow. `device`
    has the bandwidths; tensors are on `torch_device`.
    """

    transfers: Sequence[Transfer]
    host_arena_bytes: int
    arena: Arena
    first_occurrence: int
    device: Device
    torch_device: torch.device


class TransferRunner:
    """Executes the transfers of one invocation; `clock` is given on CUDA."""

    def __init__(self, program: TransferProgram, clock: Clock | None) -> None:
        self._transfers = program.transfers
        self._host_arena_bytes = program.host_arena_bytes
        self._arena, self._device, self._clock = program.arena, program.torch_device, clock
        prefetches = [i for i, moved in enumerate(self._transfers) if not moved.to_host]
        self._occurrence = {i: program.first_occurrence + k for k, i in enumerate(prefetches)}
        rates = {TO_HOST: program.device.d2h_bytes_per_s, FROM_HOST: program.device.h2d_bytes_per_s}
        self._minimum_us = [
            program.device.copy_latency_us + moved.buffer.bytes / rates[_direction(moved)] * 1e6
            for moved in self._transfers
        ]
        self._engines: CopyEngines | None = None
        self._slab: torch.Tensor | None = None
        self._homes: Homes | None = None
        self._layouts: dict[int, Layout] = {}
        self._handles: dict[int, list[CopyHandle]] = {}
        self.stall_us = [0.0, 0.0]
        """Time spent in waits for offloads, and for prefetches."""
        self.spans: list[CopySpan] = []
        self.host_high_water = 0

    def begin(self, memory: Memory | None, homes: Homes | None = None) -> None:
        """Start a forward in `memory`, after the transfers of an earlier invocation there.

        A plan with homes needs `homes`, which have the plan's slab.
        """
        assert memory is not None
        self._engines = copy_engines_of(memory, self._device)
        self.abandon()
        self._homes = homes
        self._slab = self._engines.reserve(self._host_arena_bytes) if homes is None else homes.slab
        self.stall_us = [0.0, 0.0]
        self.spans = []
        self.host_high_water = 0 if homes is None else homes.end

    def abandon(self) -> None:
        """Wait for all copies of an invocation that does not continue, and save its updates."""
        if self._engines is not None:
            self._engines.finish()
        if self._homes is not None:
            self._homes.save()
        self._handles.clear()
        self._layouts.clear()

    def join(self) -> None:
        """Order later work after all transfers: a CUDA graph ends with them."""
        for number in list(self._handles):
            self.wait(number)

    def forget(self) -> None:
        """Forget the transfers of a half whose capture failed: none has run."""
        self._running_engines.forget()
        self._handles.clear()

    def offload(self, number: int, tensor: torch.Tensor | Copy) -> None:
        """Start transfer `number`: the whole storage is copied to the host."""
        self._arena.pause()
        moved = self._transfers[number]
        if moved.is_home:
            self._begin_home(number, [tensor] if isinstance(tensor, torch.Tensor) else tensor)
            return
        assert isinstance(tensor, torch.Tensor)
        storage = tensor.untyped_storage()
        if storage.nbytes() > moved.buffer.bytes:
            raise CopyError(
                f"offload {number}: buffer {moved.buffer.id} has {storage.nbytes()} bytes and was"
                f" planned with {moved.buffer.bytes}"
            )
        self._layouts[number] = (
            *(tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()),
        )
        self._begin(number, [storage], [moved.host_offset])

    def prefetch(self, number: int) -> torch.Tensor | Copy:
        """Start transfer `number`; the tensor may be read after the wait for it.

        Of the states of an optimizer, it is a list of their storages' bytes.
        """
        self._arena.enter(self._occurrence[number])
        moved = self._transfers[number]
        if moved.is_home:
            return self._prefetch_home(number)
        memory = torch.empty(moved.buffer.bytes, dtype=torch.uint8, device=self._device)
        self._arena.pause()
        assert moved.source is not None
        dtype, offset, size, stride = self._layouts[moved.source]
        storage = memory.untyped_storage()
        self._begin(number, [storage], [moved.host_offset])
        tensor = torch.empty(0, dtype=dtype, device=self._device)
        return tensor.set_(storage, offset, size, stride)

    def _prefetch_home(self, number: int) -> torch.Tensor | Copy:
        """Start a copy of a home; a parameter's has its layout."""
        assert self._homes is not None
        tensor = self._transfers[number].buffer.tensor
        made = [
            torch.empty(size, dtype=torch.uint8, device=self._device)
            for _, size in self._homes.parts_of(tensor)
        ]
        self._arena.pause()
        self._begin_home(number, made)
        like = self._homes.parameter(tensor)
        if like is None:
            return made
        (memory,) = made
        plain = torch.empty(0, dtype=like.dtype, device=self._device)
        return plain.set_(memory.untyped_storage(), 0, like.size(), like.stride())

    def _begin_home(self, number: int, copy: Copy) -> None:
        """Start the copy of a home's parts, from or to their copy."""
        assert self._homes is not None
        parts = self._homes.parts_of(self._transfers[number].buffer.tensor)
        storages = [part.untyped_storage() for part in copy]
        self._begin(number, storages, [offset for offset, _ in parts])

    def at_host(self, number: int, layout: Layout) -> Callable[[], tuple[torch.Tensor, float]]:
        """A wait of another thread for transfer `number`, an offload.

        It returns the copy, which has this layout, and the time waited, µs.

        Raises:
            CopyError: by the wait, if the transfer failed.
        """
        self._arena.pause()
        assert self._homes is not None
        moved = self._transfers[number]
        memory = self._homes.memory(moved.host_offset, moved.buffer.bytes)
        dtype, offset, size, stride = layout
        copy = torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), offset, size, stride)
        waits = [self._running_engines.wait_on_host(one) for one in self._handles.get(number, ())]

        def copied() -> tuple[torch.Tensor, float]:
            return copy, sum(_completed(wait).waited_us for wait in waits)

        return copied

    def wait(self, number: int) -> None:
        """Let later ops wait for transfer `number`."""
        self._arena.pause()
        moved = self._transfers[number]
        direction = _direction(moved)
        copies = []
        for handle in self._handles.pop(number, ()):
            if self._clock is not None:
                with self._clock.waiting(direction):
                    self._running_engines.wait(handle)
                continue
            copies.append(_completed(functools.partial(self._running_engines.wait, handle)))
        if moved.is_home and moved.to_host:
            assert self._homes is not None
            self._homes.saved(moved.buffer.tensor)
        timed = [copied for copied in copies if copied is not None]
        if timed:
            self.stall_us[direction] += sum(copied.waited_us for copied in timed)
            buffer, times = moved.buffer, (timed[0].begin_us, timed[-1].end_us)
            self.spans.append(CopySpan(buffer.id, buffer.bytes, moved.to_host, *times))

    @property
    def _running_engines(self) -> CopyEngines:
        assert self._engines is not None
        return self._engines

    def _begin(
        self, number: int, storages: Sequence[torch.UntypedStorage], offsets: Sequence[int]
    ) -> None:
        """Start the copies of storages, which share the time of the transfer, at host offsets.

        Neighbours that have the distance of their offsets are one copy.
        """
        if not storages:
            return
        assert self._slab is not None
        moved = self._transfers[number]
        self.host_high_water = max(self.host_high_water, moved.host_offset + moved.buffer.bytes)
        self._handles[number] = handles = []
        pairs = zip(storages, offsets, strict=True)
        for _, run in itertools.groupby(pairs, lambda pair: pair[0].data_ptr() - pair[1]):
            parts, places = zip(*run, strict=True)
            least_us = self._minimum_us[number] * len(parts) / len(storages)
            handles.append(
                self._running_engines.copy(
                    _direction(moved), parts, self._slab, places[0], least_us
                )
            )


def _completed(wait: Callable[[], T]) -> T:
    """Wait for a copy."""
    try:
        return wait()
    except RuntimeError as error:
        raise CopyError(str(error)) from error


def _direction(moved: Transfer) -> int:
    return TO_HOST if moved.to_host else FROM_HOST
