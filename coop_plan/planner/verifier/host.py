"""The verifier's second memory: the slab on the host in which copies lie."""

from bisect import bisect_right
from collections.abc import Iterator
from heapq import heappop, heappush

from coop_plan.schemas import Offload, Plan, Prefetch, Step, Wait


class HostSlab:
    """
    Copies by address. One lives from its offload to the last wait on it or on a prefetch from it.

    So its end is known beforehand, from the order of the steps alone.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.arena_bytes = 0
        """The highest end so far."""
        self._last = _last_steps(plan.steps)
        self._starts: list[int] = []
        self._copies: list[tuple[int, int]] = []
        """By start: the end, exclusive, and the step of the offload."""
        self._ending: list[tuple[int, int]] = []
        """A heap of last steps, and the start of each copy."""

    def add(self, number: int, offset: int | None, size: int) -> Iterator[tuple[str, str]]:
        """Step `number` begins a copy of so many bytes; the code and message of each fault."""
        while self._ending and self._ending[0][0] < number:
            slot = bisect_right(self._starts, heappop(self._ending)[1]) - 1
            del self._starts[slot], self._copies[slot]
        if offset is None:
            yield "no-host-offset", "the copy has no offset in the host's slab"
            return
        if offset % self.plan.alignment:
            yield "misaligned", f"offset {offset} is no multiple of {self.plan.alignment}"
        if not size:
            return
        end = offset + size
        self.arena_bytes = max(self.arena_bytes, end)
        if end > self.plan.host_arena_bytes:
            slab = f"the host's slab of {self.plan.host_arena_bytes}"
            yield "outside-arena", f"bytes {offset} to {end} leave {slab}"
        slot = bisect_right(self._starts, offset)
        for near in (slot - 1, slot):
            if 0 <= near < len(self._starts):
                start, (stop, owner) = self._starts[near], self._copies[near]
                if start < end and offset < stop:
                    yield "overlap", f"the copy overlaps that of step {owner} on the host"
                    return
        self._starts.insert(slot, offset)
        self._copies.insert(slot, (end, number))
        heappush(self._ending, (self._last[number], offset))


def _last_steps(steps: list[Step]) -> dict[int, int]:
    """By the step that makes it, the last step that a copy on the host is for."""
    made: dict[int, int] = {}
    flying: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        match step:
            case Offload():
                made[step.buffer] = flying[step.buffer] = last[number] = number
            case Prefetch():
                if step.from_ in made:
                    flying[step.buffer] = made[step.from_]
                    last[made[step.from_]] = number
            case Wait():
                if step.buffer in flying:
                    last[flying.pop(step.buffer)] = number
    return last
