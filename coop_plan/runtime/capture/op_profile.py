"""What is known of one op as it ran: its time, what it returned, and the memory it took."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Output:
    """One tensor an op returns: the storage it made, or the input it is a view of.

    `bytes` is the size of the allocation made for it, 0 for a view; `alias` is the position, among
    the op's tensor arguments in flattened order, of the input whose storage it shares, or -1;
    `twin` is the position of an earlier output that it is once more, or -1.
    The rest is how the tensor lies in its storage.
    """

    bytes: int
    alias: int
    twin: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Allocation:
    """One allocation of an op: for output `output`, or scratch (-1) at `offset` in the workspace.

    An allocation that neither belongs to an output nor is freed within the op has `output` -2: it
    is served by PyTorch's allocator.
    """

    bytes: int
    output: int
    offset: int


@dataclass(frozen=True)
class OpProfile:
    """Facts about one op. `outputs` follows the flattened result; None stands for no tensor.

    `cost_us` is the time of the device; what is started on CUDA is not waited for. `beside_bytes`
    is scratch that the kernel's worker threads take for themselves, which has no place in an arena.
    """

    cost_us: float
    outputs: tuple[Output | None, ...]
    allocations: tuple[Allocation, ...]
    workspace_bytes: int
    beside_bytes: int

    @property
    def allocated(self) -> set[int]:
        """Positions of the outputs whose memory the op took on its device."""
        return {allocation.output for allocation in self.allocations}

    def allocated_beside(self, over: Collection[int]) -> tuple[Allocation, ...]:
        """What the op takes, in order, if results at these positions are written into places."""
        return tuple(a for a in self.allocations if a.output not in over)
