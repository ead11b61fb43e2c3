"""Executor of a plan's transfers: offloads, prefetches and waits, called between its ops.

A prefetched tensor is a new one at its planned address, with the dtype, sizes and strides of the
tensor that was offloaded, or of the parameter whose home is read.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

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

Layout = tuple[torch.dtype, int | torch.SymInt, Sequence[int], Sequence[int]]
"""Dtype, storage offset, sizes and strides of a tensor."""

Part = tuple[int, int, int]
"""Part of a transfer: its address, its offset in the slab, and its bytes."""


class Start(NamedTuple):
    """A transfer as it is started, in at least `least_us`; a prefetch has an `occurrence`.

    `home` is the tensor id of the resident whose home is read or written, None for a buffer.
    """

    direction: int
    least_us: float
    occurrence: int
    home: int | None
    source: int | None
    host_offset: int
    bytes: int
    buffer: int


def starts_of(transfers: Sequence[Transfer], first_occurrence: int, device: Device) -> list[Start]:
    """Starts of the transfers of a plan, in order, on a device with these bandwidths.

    `first_occurrence` is the arena's occurrence for the first prefetch; the others follow.
    """
    found, occurrence = [], first_occurrence
    for moved in transfers:
        buffer = moved.buffer
        rate = device.d2h_bytes_per_s if moved.to_host else device.h2d_bytes_per_s
        least_us = device.copy_latency_us + buffer.bytes / rate * 1e6
        home = buffer.tensor if moved.is_home else None
        place = moved.source, moved.host_offset, buffer.bytes, buffer.id
        direction = TO_HOST if moved.to_host else FROM_HOST
        found.append(Start(direction, least_us, occurrence, home, *place))
        occurrence += not moved.to_host
    return found


class TransferProgram(NamedTuple):
    """The transfers of a plan and all that their execution depends on."""

    starts: Sequence[Start]
    host_arena_bytes: int
    arena: Arena
    torch_device: torch.device


class TransferRunner:
    """Executes the transfers of one invocation; `clock` is given on CUDA."""

    def __init__(self, program: TransferProgram, clock: Clock | None) -> None:
        self._starts, self._host_arena_bytes, arena, self._device = program
        self._enter, self._pause, self._clock = arena.enter, arena.pause_for_copy, clock
        self._engines: CopyEngines | None = None
        self._slab: torch.Tensor | None = None
        self._homes: Homes | None = None
        self._layouts: dict[int, Layout] = {}
        self._handles: dict[int, list[CopyHandle]] = {}
        self.stall_us = [0.0, 0.0]
        """Time spent in waits for offloads, and for prefetches."""
        self._timed: list[tuple[Start, float, float]] = []  # begin and end, too
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
        assert self._slab is not None
        self._host = self._slab.data_ptr()
        self.stall_us = [0.0, 0.0]
        self._timed = []
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
        assert self._engines is not None
        self._engines.forget()
        self._handles.clear()

    @property
    def spans(self) -> list[CopySpan]:
        """Time spans of the transfers that this thread waited for, on the CPU."""
        return [
            CopySpan(moved.buffer, moved.bytes, moved.direction == TO_HOST, begin_us, end_us)
            for moved, begin_us, end_us in self._timed
        ]

    def offload(self, number: int, tensor: torch.Tensor | Copy) -> None:
        """Start transfer `number`: the whole storage is copied to the host."""
        self._pause()
        *_, home, _, host_offset, planned, buffer = self._starts[number]
        if home is not None:
            self._begin_home(number, home, [tensor] if isinstance(tensor, torch.Tensor) else tensor)
            return
        assert isinstance(tensor, torch.Tensor)
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size > planned:
            raise CopyError(
                f"offload {number}: buffer {buffer} has {size} bytes and was planned with {planned}"
            )
        self._layouts[number] = (
            *(tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()),
        )
        self._begin(number, [(storage.data_ptr(), host_offset, size)], storage)

    def prefetch(self, number: int) -> torch.Tensor | Copy:
        """Start transfer `number`; the tensor may be read after the wait for it.

        Of the states of an optimizer, it is a list of their storages' bytes.
        """
        _, _, occurrence, home, source, host_offset, size, _ = self._starts[number]
        self._enter(occurrence)
        if home is not None:
            return self._prefetch_home(number, home)
        memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._pause()
        assert source is not None
        dtype, offset, *layout = self._layouts[source]
        storage = memory.untyped_storage()
        self._begin(number, [(storage.data_ptr(), host_offset, size)], storage)
        tensor = torch.empty(0, dtype=dtype, device=self._device)
        return tensor.set_(storage, offset, *layout)

    def _prefetch_home(self, number: int, home: int) -> torch.Tensor | Copy:
        """Start a copy of a home; a parameter's has its layout."""
        assert self._homes is not None
        like = self._homes.parameter(home)
        if like is None:
            made = [
                torch.empty(size, dtype=torch.uint8, device=self._device)
                for _, size in self._homes.parts_of(home)
            ]
            self._pause()
            self._begin_home(number, home, made)
            return made
        layout = like.size(), like.stride()
        copy = torch.empty_strided(*layout, dtype=like.dtype, device=self._device)
        self._pause()
        self._begin_home(number, home, [copy])
        return copy

    def _begin_home(self, number: int, home: int, copy: Copy) -> None:
        """Start the copy of a home's parts, from or to their copy."""
        assert self._homes is not None
        parts = self._homes.parts_of(home)
        pairs = zip(copy, parts, strict=True)
        self._begin(number, [(part.data_ptr(), *place) for part, place in pairs], copy)

    def at_host(self, number: int, layout: Layout) -> Callable[[], tuple[torch.Tensor, float]]:
        """A wait of another thread for transfer `number`, an offload.

        It returns the copy, which has this layout, and the time waited, µs.

        Raises:
            CopyError: by the wait, if the transfer failed.
        """
        self._pause()
        assert self._homes is not None
        assert self._engines is not None
        homes, moved = self._homes, self._starts[number]
        waits = [self._engines.wait_on_host(one) for one in self._handles.get(number, ())]

        def copied() -> tuple[torch.Tensor, float]:
            try:
                waited_us = sum(wait().waited_us for wait in waits)
            except RuntimeError as error:
                raise CopyError(str(error)) from error
            memory = homes.memory(moved.host_offset, moved.bytes)
            dtype, offset, size, stride = layout
            copy = torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), offset, size, stride)
            return copy, waited_us

        return copied

    def wait(self, number: int) -> None:
        """Let later ops wait for transfer `number`."""
        self._pause()
        start = self._starts[number]
        if self._clock is None:
            self._complete(number, start)
        else:
            with self._clock.waiting(start.direction):
                self._complete(number, start)
        if start.home is not None and start.direction == TO_HOST:
            assert self._homes is not None
            self._homes.saved(start.home)

    def _complete(self, number: int, start: Start) -> None:
        """Wait for a transfer's copies."""
        assert self._engines is not None
        begin_us = None
        try:
            for handle in self._handles.pop(number, ()):
                timing = self._engines.wait(handle)
                if timing is not None:
                    waited_us, first_us, end_us = timing
                    self.stall_us[start.direction] += waited_us
                    begin_us = first_us if begin_us is None else begin_us
        except RuntimeError as error:
            raise CopyError(str(error)) from error
        if begin_us is not None:
            self._timed.append((start, begin_us, end_us))

    def _begin(self, number: int, parts: Sequence[Part], kept: object) -> None:
        """Start the copies of a transfer's parts, which share its time, in order of the slab.

        Neighbours that have the distance of their offsets are one copy. `kept` has the memory.
        """
        direction, least_us, *_, host_offset, planned, _ = self._starts[number]
        self.host_high_water = max(self.host_high_water, host_offset + planned)
        runs: list[list[int]] = []
        for address, offset, size in parts:
            if runs and address - offset == runs[-1][0] - runs[-1][1]:
                runs[-1][2:] = offset + size - runs[-1][1], runs[-1][3] + 1
            else:
                runs.append([address, offset, size, 1])
        assert self._engines is not None
        self._handles[number] = handles = []
        for address, offset, size, count in runs:
            share_us = least_us * count / len(parts)
            place = address, self._host + offset, size
            handles.append(self._engines.copy(direction, *place, share_us, (kept, self._slab)))
