"""Homes: the places in a host slab where movable residents lie between their uses.

Between iterations the memory of a parameter, or of an optimizer's states, is its home: the storage
that the user holds points into the slab. An iteration copies it to the arena, and back after an
update. An update acts on the storage that the user holds, which has the arena's memory meanwhile.

A home of states has one part for each storage. An update that makes them allocates them in the
arena, at the addresses of a copy of their home.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from coop_plan.runtime.device.copy_engines import slab_of_homes
from coop_plan.runtime.device.cuda import bytes_of, capturing, exchange_memory, part_of, take_over
from coop_plan.runtime.errors import CudaGraphError, RuntimeRefusalError
from coop_plan.runtime.op_profile import part_offsets, parts_bytes
from coop_plan.runtime.torch_internals.ops import elements_spanned
from coop_plan.schemas import Plan

Copy = list[torch.Tensor]
"""Copy of a home in the arena: a tensor for each part, none if the states are not made yet."""


@dataclass
class Resident:
    """A movable resident: a parameter or buffer, or the states of a parameter.

    `name` is for messages. `parts` are the bytes of its storages. `states` returns those of states,
    none if they are not made yet. Else `parameter` is input number `position` of the last call.
    """

    name: str
    parts: Sequence[int]
    states: Callable[[], list[torch.UntypedStorage]] | None = None
    parameter: torch.Tensor | None = None
    position: int | None = None

    def storages(self) -> list[torch.UntypedStorage]:
        """Its storages, as they are now."""
        if self.parameter is not None:
            return [self.parameter.untyped_storage()]
        assert self.states is not None
        return self.states()


def can_move(tensor: torch.Tensor) -> bool:
    """True if a tensor is all of a storage whose memory may be exchanged."""
    storage = tensor.untyped_storage()
    return (
        tensor.numel() > 0
        and tensor.storage_offset() == 0
        and elements_spanned(tensor) * tensor.element_size() == storage.nbytes()
        and not (tensor.is_conj() or tensor.is_neg())  # of which a copy's bytes are not the values
        and not _has_to_stay(storage)
    )


def have_home(states: Sequence[torch.UntypedStorage], parts: Sequence[int]) -> bool:
    """True if states may have a home of these parts (bytes), or are not made yet."""
    sizes = sorted(storage.nbytes() for storage in states)
    return not any(map(_has_to_stay, states)) and sizes in ([], sorted(parts))


@dataclass(frozen=True)
class _Home:
    """A home at `offset` in the slab; `present` has the storages in it by their offset there.

    `parts` are the offsets in the slab and the bytes of these, ascending.
    """

    offset: int
    resident: Resident
    present: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    parts: list[tuple[int, int]] = field(default_factory=list)

    def place(self, placed: Mapping[int, torch.UntypedStorage]) -> None:
        """Let these storages be in the home."""
        self.present.clear()
        self.present.update(sorted(placed.items()))
        self.parts[:] = [(self.offset + at, one.nbytes()) for at, one in self.present.items()]


class Homes:
    """The homes of some parameters and states, for one plan at a time, in one slab."""

    def __init__(self) -> None:
        self.slab: torch.Tensor | None = None
        self._device: torch.device
        self._owner: object = None
        self._homes: dict[int, _Home] = {}
        self._unsaved: dict[int, Copy] = {}

    def begin(self, plan: Plan, residents: Mapping[int, Resident], device: torch.device) -> None:
        """Place all residents of a plan with homes in its slab, and give those of others memory.

        `residents` are the movable residents of the plan's graph, by tensor id, on `device`.

        Raises:
            RuntimeRefusalError: memory of a resident has to stay, has another size, or is shared.
            CudaGraphError: a CUDA graph is captured.
        """
        if plan.homes and device.type == "cuda" and capturing():
            raise CudaGraphError(
                "a CUDA graph cannot have an iteration whose parameters or states are on the host"
                " between their uses: call it outside of the capture, or leave link out"
            )
        now = [residents[home.tensor].storages() for home in plan.homes]
        _check_unshared(plan, residents, now)
        former, former_homes = self.slab, self._homes.values()
        is_same = residents is self._owner
        before = now if is_same else [home.resident.storages() for home in former_homes]
        left = [*self._left(before)]
        if not is_same or any(map(_has_to_stay, left)):
            homes = {
                home.tensor: _Home(home.host_offset, residents[home.tensor]) for home in plan.homes
            }
            for storage in itertools.chain(*before, *now):
                _check_movable(storage)
            size = plan.host_arena_bytes if homes else 0
            self.slab, self._device = slab_of_homes(size, device), device
            self._homes, self._owner = homes, residents
        for storage in left:
            if not _has_to_stay(storage):  # else it keeps the former slab
                _move(storage, _own_memory(storage))
        for home, storages in zip(self._homes.values(), now, strict=True):
            self._place(home, storages)
        if former is not self.slab and former is not None:
            for home in former_homes:
                for offset, storage in home.present.items():
                    at_home = storage.data_ptr() == former.data_ptr() + home.offset + offset
                    if at_home and not _has_to_stay(storage):
                        _move(storage, _own_memory(storage))

    def _left(
        self, residents: Sequence[Sequence[torch.UntypedStorage]]
    ) -> Iterator[torch.UntypedStorage]:
        """Storages at a home that are no longer its resident's: the user may hold them.

        `residents` has the storages of each home's resident.
        """
        for home, storages in zip(self._homes.values(), residents, strict=True):
            assert self.slab is not None
            base = self.slab.data_ptr() + home.offset
            now = {storage.data_ptr() for storage in storages}
            for offset, storage in home.present.items():
                if storage.data_ptr() == base + offset and base + offset not in now:
                    yield storage

    def _place(self, home: _Home, storages: Sequence[torch.UntypedStorage]) -> None:
        """Let the storages of a home's resident have its parts."""
        assert self.slab is not None
        base, parts = self.slab.data_ptr() + home.offset, home.resident.parts
        free, placed = dict(zip(part_offsets(parts), parts, strict=True)), {}
        missing = []
        for storage in storages:
            offset = storage.data_ptr() - base
            if free.get(offset) == storage.nbytes():
                placed[offset] = storage
                del free[offset]
            else:
                missing.append(storage)
        for storage in missing:
            found = next((at for at, size in free.items() if size == storage.nbytes()), None)
            if found is None:
                sizes = " + ".join(map(str, parts))
                raise RuntimeRefusalError(
                    f"{home.resident.name} were planned with {sizes} bytes, and now there are"
                    f" {storage.nbytes()}: make another train_iteration, or load what it had"
                )
            del free[found]
            _move(storage, self.memory(home.offset + found, storage.nbytes()))
            placed[found] = storage
        home.place(placed)

    def memory(self, offset: int, size: int) -> torch.Tensor:
        """Bytes of the slab, which they keep alive, on the device of the residents."""
        assert self.slab is not None
        return part_of(self.slab, offset, size, self._device)

    @property
    def end(self) -> int:
        """End of the last home in the slab."""
        homes = self._homes.values()
        return max((h.offset + parts_bytes(h.resident.parts) for h in homes), default=0)

    def parameter(self, tensor: int) -> torch.Tensor | None:
        """The parameter that a home is for; None if it is for states."""
        return self._homes[tensor].resident.parameter

    def parts_of(self, tensor: int) -> list[tuple[int, int]]:
        """Offset in the slab and bytes of each part of a tensor's home that has a storage."""
        return self._homes[tensor].parts

    def update(self, copies: Mapping[int, Copy], run: Callable[[], None]) -> None:
        """Run an update, in which storages have the memory of their copies, by tensor id.

        From here on the home is older than its copy, until `saved` or `save`.
        """
        self._unsaved |= copies
        try:
            for tensor, copy in copies.items():
                for storage, part in zip(self._homes[tensor].present.values(), copy, strict=True):
                    exchange_memory(storage, part.untyped_storage())
            run()
        finally:
            for tensor, copy in copies.items():
                self._take_back(tensor, copy)

    def _take_back(self, tensor: int, copy: Copy) -> None:
        """Let storages have the memory of their home, and the copy that of the arena.

        An exception may end it, or the exchange before it, at any call: then a second call goes on.
        """
        home = self._homes[tensor]
        if not home.present:
            made = sorted(home.resident.storages(), key=lambda storage: storage.data_ptr())
            if [storage.nbytes() for storage in made] != list(home.resident.parts):
                return  # of an update that failed, or of other sizes, which `begin` refuses
            home.place(dict(zip(part_offsets(home.resident.parts), made, strict=True)))
        assert self.slab is not None
        base = self.slab.data_ptr() + home.offset
        for number, (at, storage) in enumerate(home.present.items()):
            if number == len(copy):  # of states that were made in the arena
                copy.append(self.memory(home.offset + at, storage.nbytes()))
            if storage.data_ptr() != base + at:
                exchange_memory(storage, copy[number].untyped_storage())

    def saved(self, tensor: int) -> None:
        """Note that a tensor's copy was written to its home."""
        self._unsaved.pop(tensor, None)

    def save(self) -> None:
        """Write all copies that were updated to their homes, after an iteration that failed."""
        assert self.slab is not None
        for tensor, copy in self._unsaved.items():
            self._take_back(tensor, copy)
            for storage, part in zip(self._homes[tensor].present.values(), copy, strict=True):
                bytes_of(storage).copy_(bytes_of(part.untyped_storage()))
        self._unsaved.clear()


def _has_to_stay(storage: torch.UntypedStorage) -> bool:
    """True if a numpy array was made of the storage, or other processes share it.

    PyTorch marks storages of arrays, and those that it read from a file as well. It calls each one
    on CUDA shared.
    """
    shared = storage.device.type == "cpu" and storage.is_shared()
    return shared or not (storage.resizable() or take_over(storage))


def _check_unshared(
    plan: Plan,
    residents: Mapping[int, Resident],
    storages: Sequence[Sequence[torch.UntypedStorage]],
) -> None:
    """Raise if storages of two homes of a plan have one memory; `storages` has those of each."""
    owner: dict[int, str] = {}
    for home, parts in zip(plan.homes, storages, strict=True):
        name = residents[home.tensor].name
        for storage in parts:
            if storage.data_ptr() in owner:
                raise RuntimeRefusalError(
                    f"{owner[storage.data_ptr()]} and {name} were planned apart, and now share"
                    f" {storage.nbytes()} bytes: make a clone of one, or another train_iteration"
                )
            owner[storage.data_ptr()] = name


def _check_movable(storage: torch.UntypedStorage) -> None:
    if _has_to_stay(storage):
        raise RuntimeRefusalError(
            f"a parameter or state of {storage.nbytes()} bytes has to move within the memory of the"
            " host, and a numpy array or another process has its address: assign a clone to its"
            " `.data`, or leave out the option `link`"
        )


def _own_memory(storage: torch.UntypedStorage) -> torch.Tensor:
    """New memory of a storage's size, of PyTorch's allocator."""
    return torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device)


def _move(storage: torch.UntypedStorage, memory: torch.Tensor) -> None:
    """Move a storage to the memory of a tensor of its size.

    Raises:
        RuntimeRefusalError: a numpy array or another process has its address.
    """
    _check_movable(storage)
    values = bytes_of(storage)
    memory.copy_(values)
    if values.is_cuda:  # its allocator may know another stream
        values.record_stream(torch.cuda.current_stream(values.device))
    exchange_memory(storage, memory.untyped_storage())
