"""Profile of one op: its time, its outputs, and the allocations it makes."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypedDict

PART_ALIGNMENT = 64
"""Alignment of a part in its home (`execute.homes`)."""

BYTES_PER_US = {"cpu": 1e4, "cuda": 1e6}
"""Model of the time to read and write tensors by an op that runs once in any plan, by device."""


@dataclass(frozen=True)
class Output:
    """One tensor that an op returns: a new storage, or a view of an input.

    `bytes` is the size of the allocation made for it, 0 for a view. `alias` is the position of the
    input whose storage it shares, among the op's tensor arguments in flattened order, or -1.
    `duplicate_of` is the position of an earlier output that is the same tensor, or -1.
    The other fields are its layout in the storage.
    """

    bytes: int
    alias: int
    duplicate_of: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Allocation:
    """One allocation of an op: for output `output`, or scratch (-1) at `offset` in the workspace.

    An allocation that belongs to no output and outlives the op has `output` -2. PyTorch's allocator
    serves it.
    """

    bytes: int
    output: int
    offset: int


@dataclass(frozen=True)
class OpProfile:
    """Time, outputs and memory of one op. `outputs` follows the flattened result; None: no tensor.

    `cost_us` is device time, without the launch on CUDA. `first_us` is that of a run
    before which no op of its kind ran for long; 0 if it is not known. `worker_bytes` is scratch
    that the kernel's worker threads allocate; PyTorch's allocator serves it, not the arena.
    `differs` is True if two runs on the same inputs returned different bits
    (`capture.nondeterminism`).
    """

    cost_us: float
    outputs: tuple[Output | None, ...]
    allocations: tuple[Allocation, ...]
    workspace_bytes: int
    worker_bytes: int
    differs: bool = False
    first_us: float = 0.0

    @property
    def allocated_outputs(self) -> set[int]:
        """Positions of outputs that the op allocates on its device (-1, -2: see `Allocation`)."""
        return {allocation.output for allocation in self.allocations}

    def allocations_except(self, positions: Collection[int]) -> tuple[Allocation, ...]:
        """The op's allocations if the outputs at `positions` are written into given tensors."""
        return tuple(a for a in self.allocations if a.output not in positions)


@dataclass(frozen=True)
class UpdateProfile:
    """Memory and time of an optimizer's update of one parameter.

    The `first` update allocates `state_bytes` of states for good, `later` ones none. If it
    `changes_gradient`, the gradient is overwritten. `state_parts` are the bytes of the states'
    storages; none if they have memory of another origin, too. `host_us` is the time of a later
    update on the host (`execute.host_updates`), whose temporaries are PyTorch's allocator's; None
    if no update may run there.
    """

    first: OpProfile
    later: OpProfile
    state_bytes: int
    changes_gradient: bool
    state_parts: tuple[int, ...]
    host_us: float | None

    @property
    def workspace_bytes(self) -> int:
        """Workspace that is enough for any update."""
        return max(self.first.workspace_bytes, self.later.workspace_bytes)


def part_offsets(parts: Sequence[int]) -> list[int]:
    """Offsets of parts (bytes), one after the other, in a home."""
    spans = (-(-size // PART_ALIGNMENT) * PART_ALIGNMENT for size in parts)
    return list(itertools.accumulate(spans, initial=0))[: len(parts)]


def parts_bytes(parts: Sequence[int]) -> int:
    """Bytes of a home with these parts (bytes)."""
    return part_offsets(parts)[-1] + parts[-1] if parts else 0


class LaunchTimes(TypedDict):
    """Launch times of `coop_plan.schemas.Device` for steps on the CPU, µs."""

    launch_us: float
    copy_launch_us: float
