"""The transfers of a plan as calls between its ops: away to the host, back, and the waits for them.

A tensor that comes back is a new one at its planned address, of the form that the old one had when
it was copied away.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from coop_plan.runtime.device.arena import Arena, Memory
from coop_plan.runtime.device.copy_engines import AWAY, BACK, Links, Ticket, links_of
from coop_plan.runtime.device.cuda import Clock
from coop_plan.runtime.errors import CopyError
from coop_plan.runtime.execute.plan_index import Transfer
from coop_plan.runtime.reports import CopySpan
from coop_plan.schemas import Device


class Route(NamedTuple):
    """The transfers of a plan as its code carries them out.

    `first_occurrence` is the number of the arena's occurrence that takes the first tensor that
    comes back; the others follow. `device` has the bandwidths, `where` is where tensors lie.
    """

    transfers: Sequence[Transfer]
    host_arena_bytes: int
    arena: Arena
    first_occurrence: int
    device: Device
    where: torch.device


class Copies:
    """Carries out the transfers of one flight; `clock` is that of a CUDA device."""

    def __init__(self, route: Route, clock: Clock | None) -> None:
        self._transfers = route.transfers
        self._host_arena_bytes = route.host_arena_bytes
        self._arena, self._where, self._clock = route.arena, route.where, clock
        prefetches = [i for i, moved in enumerate(self._transfers) if not moved.to_host]
        self._occurrence = {i: route.first_occurrence + k for k, i in enumerate(prefetches)}
        rates = {AWAY: route.device.d2h_bytes_per_s, BACK: route.device.h2d_bytes_per_s}
        self._least_us = [
            route.device.copy_latency_us + moved.buffer.bytes / rates[_direction(moved)] * 1e6
            for moved in self._transfers
        ]
        self._links: Links | None = None
        self._forms: dict[int, Any] = {}
        self._tickets: dict[int, Ticket] = {}
        self.stall_us = [0.0, 0.0]
        """What was waited for copies away, and back."""
        self.spans: list[CopySpan] = []
        self.host_high_water = 0

    def begin(self, memory: Memory | None) -> None:
        """The forward begins in that memory; what another left in flight there is over first."""
        assert memory is not None
        self._links = links_of(memory, self._where)
        self.abandon()
        self._links.reserve(self._host_arena_bytes)
        self.stall_us = [0.0, 0.0]
        self.spans = []
        self.host_high_water = 0

    def abandon(self) -> None:
        """The flight does not go on: nothing of it stays in flight."""
        if self._links is not None:
            self._links.settle()
        self._tickets.clear()
        self._forms.clear()

    def offload(self, number: int, tensor: torch.Tensor) -> None:
        """Transfer `number` begins: all of the tensor's memory goes to the host."""
        self._arena.pause()
        moved, storage = self._transfers[number], tensor.untyped_storage()
        if storage.nbytes() != moved.buffer.bytes:
            raise CopyError(
                f"buffer {moved.buffer.id} has {storage.nbytes()} bytes and was planned with"
                f" {moved.buffer.bytes}: it cannot be moved to the host"
            )
        self._forms[number] = (
            *(tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()),
        )
        self._begin(number, storage)

    def prefetch(self, number: int) -> torch.Tensor:
        """Transfer `number` begins; the tensor may be read after the wait for it."""
        self._arena.enter(self._occurrence[number])
        moved = self._transfers[number]
        memory = torch.empty(moved.buffer.bytes, dtype=torch.uint8, device=self._where)
        self._arena.pause()
        assert moved.source is not None
        dtype, offset, size, stride = self._forms[moved.source]
        storage = memory.untyped_storage()
        self._begin(number, storage)
        tensor = torch.empty(0, dtype=dtype, device=self._where)
        return tensor.set_(storage, offset, size, stride)

    def wait(self, number: int) -> None:
        """What comes next comes after transfer `number`."""
        self._arena.pause()
        ticket = self._tickets.pop(number, None)
        if ticket is None:  # of no bytes
            return
        moved = self._transfers[number]
        direction = _direction(moved)
        if self._clock is not None:
            with self._clock.waiting(direction):
                self._link.wait(ticket)
            return
        try:
            over = self._link.wait(ticket)
        except RuntimeError as error:
            raise CopyError(str(error)) from error
        if over is not None:
            self.stall_us[direction] += over.waited_us
            buffer, times = moved.buffer, (over.begin_us, over.end_us)
            self.spans.append(CopySpan(buffer.id, buffer.bytes, moved.to_host, *times))

    @property
    def _link(self) -> Links:
        assert self._links is not None
        return self._links

    def _begin(self, number: int, storage: torch.UntypedStorage) -> None:
        moved = self._transfers[number]
        if not moved.buffer.bytes:
            return
        self.host_high_water = max(self.host_high_water, moved.host_offset + moved.buffer.bytes)
        self._tickets[number] = self._link.copy(
            _direction(moved), storage, moved.host_offset, self._least_us[number]
        )


def _direction(moved: Transfer) -> int:
    return AWAY if moved.to_host else BACK


class InFlight(Protocol):
    """What has copies (runtime.execute.invocation)."""

    copies: Copies | None


def offload(flight: InFlight, number: int, tensor: torch.Tensor) -> None:
    """`Copies.offload`, as a call in a graph."""
    assert flight.copies is not None
    flight.copies.offload(number, tensor)


def prefetch(flight: InFlight, number: int) -> torch.Tensor:
    """`Copies.prefetch`, as a call in a graph."""
    assert flight.copies is not None
    return flight.copies.prefetch(number)


def wait(flight: InFlight, number: int) -> None:
    """`Copies.wait`, as a call in a graph."""
    assert flight.copies is not None
    flight.copies.wait(number)
