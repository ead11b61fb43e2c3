"""The arena of one compiled step: its program of slots, and what was measured while it ran."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.build import arena as extension

SERVED_OUTSIDE = -1
"""Offset of a slot that PyTorch's allocator serves: an output that leaves the step."""

Slots = Sequence[tuple[int, int]]
"""Of one op occurrence: (bytes, offset in the arena or `SERVED_OUTSIDE`) per allocation."""


@dataclass(frozen=True)
class Counters:
    """Since the step began: bytes of the arena reached, planned bytes not served as planned, µs."""

    high_water_bytes: int
    outside_bytes: int
    first_us: float
    again_us: float


class Arena:
    """`size` bytes at one address, and the slots of each op occurrence."""

    def __init__(self, size: int, program: Sequence[Slots], again: Sequence[bool]) -> None:
        self._ext: Any = extension()
        first = np.zeros(len(program) + 1, dtype=np.int64)
        np.cumsum([len(slots) for slots in program], out=first[1:])
        flat = np.array([slot for slots in program for slot in slots], dtype=np.int64)
        flat = flat.reshape(-1, 2)
        self.handle: int = self._ext.create(
            size,
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
            self._ext.destroy(self.handle)

    def begin(self, *, fresh: bool) -> None:
        """Run this thread's ops in the arena until `leave`; `fresh` starts the counters anew."""
        self._ext.begin(self.handle, fresh)

    @property
    def live(self) -> int:
        """Allocations in the arena that are not freed yet."""
        count: int = self._ext.live(self.handle)
        return count

    def counters(self) -> Counters:
        """What was measured since the last fresh `begin`."""
        return Counters(*self._ext.counters(self.handle))


def process_bytes() -> tuple[int, int]:
    """Bytes now allocated by PyTorch on the CPU outside arenas, and their peak."""
    current, peak = extension().process_bytes()
    return current, peak


def reset_peak() -> None:
    """Start a new peak for `process_bytes`."""
    extension().reset_peak()
