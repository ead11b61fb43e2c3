"""A schedule as blocks of memory: who is live when, wherever it may lie."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coop_plan.planner.core.schedule import Schedule

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Blocks:
    """
    Lifetimes in events (half-open) and bytes: first one block per buffer, then the workspaces.

    A buffer that takes over an address begins after that event, within which it lies in the block
    it takes over; `same` lists (buffer, source). `scratch` lists the events of the workspaces.
    """

    lower: Ints
    upper: Ints
    size: Ints
    same: list[tuple[int, int]]
    scratch: list[int]

    @classmethod
    def of(cls, schedule: Schedule) -> "Blocks":
        """The blocks of a finished schedule; sizes are rounded up to the alignment."""
        problem = schedule.problem
        same = [(buffer, source) for buffer, source in enumerate(schedule.shares) if source >= 0]
        scratch = [event for event, op in enumerate(schedule.ops) if problem.workspace[op]]
        lower = np.array(schedule.first + scratch, dtype=np.int64)
        upper = np.array(schedule.last + scratch, dtype=np.int64) + 1
        sizes = [problem.size[t] for t in schedule.tensor]
        sizes += [problem.workspace[schedule.ops[event]] for event in scratch]
        lower[[buffer for buffer, _ in same]] += 1
        return cls(lower, upper, np.array(sizes, dtype=np.int64), same, scratch)

    def live(self, events: int) -> Ints:
        """Bytes live at each of so many events."""
        change = np.zeros(events + 1, dtype=np.int64)
        np.add.at(change, self.lower, self.size)
        np.subtract.at(change, self.upper, self.size)
        live: Ints = change.cumsum()[:-1]
        return live


def live_buffers(schedule: Schedule, event: int) -> list[int]:
    """The buffers that live at an event, whether or not they share an address."""
    lifetimes = enumerate(zip(schedule.first, schedule.last, strict=True))
    return [buffer for buffer, (first, last) in lifetimes if first <= event <= last]


def live_bytes(schedule: Schedule) -> list[int]:
    """Arena bytes at each event of a finished schedule, workspace included, sizes rounded up."""
    live: list[int] = Blocks.of(schedule).live(len(schedule.ops)).tolist()
    return live
