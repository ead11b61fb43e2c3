"""The verifier's model of the host slab, which holds the copies of offloaded buffers."""

from bisect import bisect_right
from collections.abc import Collection, Iterator
from heapq import heappop, heappush

from coop_plan.schemas import Compute, Offload, Plan, Prefetch, Step, Wait

FOR_EVER = -1
"""Number of a copy that is live from the first step to the last."""


class HostSlab:
    """Live copies by address.

    A copy is live from its offload to the last wait on it or on a prefetch from it, and to the end
    of the step if a run on the host reads it. So its end follows from the order of the steps and is
    computed before the replay. `on_host` are the (op, variant) of such runs.
    """

    def __init__(self, plan: Plan, on_host: Collection[tuple[int, str | None]]) -> None:
        self.plan = plan
        self.arena_bytes = 0
        """The highest end of a copy so far."""
        self._last_step = _last_steps(plan.steps, on_host)
        self._starts: list[int] = []
        """Start addresses of the live copies, ascending."""
        self._copies: list[tuple[int, int]] = []
        """Per start: the end, exclusive, and the step of the offload."""
        self._ending: list[tuple[int, int]] = []
        """Heap of (last step, start address) of the live copies."""

    def add(self, number: int, offset: int | None, size: int) -> Iterator[tuple[str, str]]:
        """Start a copy of `size` bytes at step `number`; yields code and message of each fault."""
        # Remove copies that ended before this step.
        while self._ending and self._ending[0][0] < number:
            slot = bisect_right(self._starts, heappop(self._ending)[1]) - 1
            del self._starts[slot], self._copies[slot]
        if offset is None:
            yield "no-host-offset", f"the offload at step {number} has no offset in the host slab"
            return
        if offset % self.plan.alignment:
            yield "misaligned", f"offset {offset} is not a multiple of {self.plan.alignment}"
        if not size:
            return
        end = offset + size
        self.arena_bytes = max(self.arena_bytes, end)
        if end > self.plan.host_arena_bytes:
            slab = f"the host slab of {self.plan.host_arena_bytes} bytes"
            yield "outside-arena", f"bytes {offset} to {end} exceed {slab}"
        # Live copies are disjoint and sorted, so only the two neighbours can overlap.
        slot = bisect_right(self._starts, offset)
        for near in (slot - 1, slot):
            if 0 <= near < len(self._starts):
                start, (stop, owner) = self._starts[near], self._copies[near]
                if start < end and offset < stop:
                    other = "a home" if owner == FOR_EVER else f"that of step {owner}"
                    yield "overlap", f"the host copy overlaps {other}"
                    return
        self._starts.insert(slot, offset)
        self._copies.insert(slot, (end, number))
        if number != FOR_EVER:
            heappush(self._ending, (self._last_step[number], offset))


def _last_steps(steps: list[Step], on_host: Collection[tuple[int, str | None]]) -> dict[int, int]:
    """Per offload step the last step at which its copy on the host is live."""
    offload: dict[int, int] = {}  # per buffer its last offload step
    pending: dict[int, int] = {}  # per buffer the offload step of the copy that its transfer uses
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        match step:
            case Compute() if (step.op, step.variant) in on_host:
                for read in step.reads:
                    if isinstance(read, int) and read in offload:
                        last[offload[read]] = len(steps)
            case Offload():
                offload[step.buffer] = pending[step.buffer] = last[number] = number
            case Prefetch():
                if step.from_ in offload:
                    pending[step.buffer] = offload[step.from_]
                    last[offload[step.from_]] = max(last[offload[step.from_]], number)
            case Wait():
                if step.buffer in pending:
                    copy = pending.pop(step.buffer)
                    last[copy] = max(last[copy], number)
    return last
