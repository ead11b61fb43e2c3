"""The transfers of a plan as calls between its ops: away to the host, back, and the waits for them.

A tensor that comes back is a new one at its planned address, of the form that the old one had when
it was copied away.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

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
from coop_plan.runtime.reports import CopySpan
from coop_plan.schemas import Compute, Device, Offload, Plan, Prefetch, Wait


@dataclass(frozen=True)
class Transfer:
    """One copy of a plan: where on the host, how many bytes, and the number of its step's buffer.

    Of a prefetch `source` is the number of the transfer that it brings back, and `offset` the
    address in the arena.
    """

    direction: int
    buffer: int
    bytes: int
    host_offset: int
    source: int | None = None
    offset: int = 0


class Transfers:
    """The transfers of a plan in its order, and which of them each step begins or waits for."""

    def __init__(self, plan: Plan) -> None:
        self.all: list[Transfer] = []
        self.of_step: dict[int, int] = {}
        """By the number of an offload, a prefetch or a wait among the plan's steps."""
        steps = [step for step in plan.steps if isinstance(step, Compute)]
        size = {write.buffer: write.bytes for step in steps for write in step.writes}
        size |= {step.buffer: step.bytes for step in plan.steps if isinstance(step, Prefetch)}
        last: dict[int, int] = {}
        flying: dict[int, int] = {}
        for number, step in enumerate(plan.steps):
            if isinstance(step, Wait):
                self.of_step[number] = flying[step.buffer]
                continue
            if isinstance(step, Offload):
                assert step.host_offset is not None
                last[step.buffer] = len(self.all)
                moved = Transfer(TO_HOST, step.buffer, size[step.buffer], step.host_offset)
            elif isinstance(step, Prefetch):
                source = last[step.from_]
                there = self.all[source].host_offset
                moved = Transfer(FROM_HOST, step.buffer, step.bytes, there, source, step.offset)
            else:
                continue
            self.of_step[number] = flying[step.buffer] = len(self.all)
            self.all.append(moved)

    def arrivals(self) -> list[int]:
        """The transfers that make a tensor in the arena."""
        return [i for i, transfer in enumerate(self.all) if transfer.direction == FROM_HOST]


class Route(NamedTuple):
    """The transfers of a plan as its code carries them out.

    `first_occurrence` is the number of the arena's occurrence that takes the first tensor that
    comes back; the others follow. `device` has the bandwidths, `where` is where tensors lie.
    """

    transfers: Transfers
    host_arena_bytes: int
    arena: Arena
    first_occurrence: int
    device: Device
    where: torch.device


class Copies:
    """Carries out the transfers of one flight; `clock` is that of a CUDA device."""

    def __init__(self, route: Route, clock: Clock | None) -> None:
        self._transfers = route.transfers.all
        self._host_arena_bytes = route.host_arena_bytes
        self._arena, self._where, self._clock = route.arena, route.where, clock
        arrivals = route.transfers.arrivals()
        self._occurrence = {i: route.first_occurrence + k for k, i in enumerate(arrivals)}
        rates = {TO_HOST: route.device.d2h_bytes_per_s, FROM_HOST: route.device.h2d_bytes_per_s}
        self._least_us = [
            route.device.copy_latency_us + moved.bytes / rates[moved.direction] * 1e6
            for moved in self._transfers
        ]
        self._links: CopyEngines | None = None
        self._forms: dict[int, Any] = {}
        self._tickets: dict[int, CopyHandle] = {}
        self.stall_us = [0.0, 0.0]
        """What was waited for copies away, and back."""
        self.spans: list[CopySpan] = []
        self.host_high_water = 0

    def begin(self, memory: Memory | None) -> None:
        """The forward begins in that memory; what another left in flight there is over first."""
        assert memory is not None
        self._links = copy_engines_of(memory, self._where)
        self.abandon()
        self._links.reserve(self._host_arena_bytes)
        self.stall_us = [0.0, 0.0]
        self.spans = []
        self.host_high_water = 0

    def abandon(self) -> None:
        """The flight does not go on: nothing of it stays in flight."""
        if self._links is not None:
            self._links.finish()
        self._tickets.clear()
        self._forms.clear()

    def offload(self, number: int, tensor: torch.Tensor) -> None:
        """Transfer `number` begins: all of the tensor's memory goes to the host."""
        self._arena.pause()
        moved, storage = self._transfers[number], tensor.untyped_storage()
        if storage.nbytes() != moved.bytes:
            raise CopyError(
                f"buffer {moved.buffer} has {storage.nbytes()} bytes and was planned with"
                f" {moved.bytes}: it cannot be moved to the host"
            )
        self._forms[number] = (
            *(tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()),
        )
        self._begin(number, storage)

    def prefetch(self, number: int) -> torch.Tensor:
        """Transfer `number` begins; the tensor may be read after the wait for it."""
        self._arena.enter(self._occurrence[number])
        moved = self._transfers[number]
        memory = torch.empty(moved.bytes, dtype=torch.uint8, device=self._where)
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
        direction = self._transfers[number].direction
        if self._clock is not None:
            with self._clock.waiting(direction):
                self._link.wait(ticket)
            return
        try:
            over = self._link.wait(ticket)
        except RuntimeError as error:
            raise CopyError(str(error)) from error
        if over is not None:
            moved = self._transfers[number]
            self.stall_us[direction] += over.waited_us
            away = direction == TO_HOST
            span = CopySpan(moved.buffer, moved.bytes, away, over.begin_us, over.end_us)
            self.spans.append(span)

    @property
    def _link(self) -> CopyEngines:
        assert self._links is not None
        return self._links

    def _begin(self, number: int, storage: torch.UntypedStorage) -> None:
        moved = self._transfers[number]
        if not moved.bytes:
            return
        self.host_high_water = max(self.host_high_water, moved.host_offset + moved.bytes)
        self._tickets[number] = self._link.copy(
            moved.direction, storage, moved.host_offset, self._least_us[number]
        )


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
