"""A schedule before it is a plan: typed events in order, and the buffers they make and read."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from coop_plan.planner.core.arrays import Ints, to_arrays
from coop_plan.planner.core.lifetimes import (
    MISSING,
    OFFLOAD,
    OUTSIDE,
    PREFETCH,
    RUN,
    WAIT,
    Blocks,
    HostCopies,
    Trace,
    blocks_of,
    host_copies,
    live_bytes,
    trace,
    trace_as_told,
)
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.timeline import Timeline

__all__ = ["OUTSIDE", "Event", "Offload", "PlacedSchedule", "Prefetch", "Run", "Schedule", "Wait"]


@dataclass(frozen=True, slots=True)
class Run:
    """
    OpVariant `variant` runs. `reads` follow its inputs and `writes` its outputs, buffer by buffer.

    `OUTSIDE` stands for resident tensors and outputs outside the arena.
    """

    variant: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offload:
    """A copy of `buffer` to the host begins; the buffer stays until a `Wait` on it."""

    buffer: int


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A copy of what the host has of buffer `source` begins, into the new buffer `buffer`."""

    buffer: int
    source: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Compute waits for the copy that was last begun on `buffer`."""

    buffer: int


Event = Run | Offload | Prefetch | Wait

ORDERS = {"run": RUN, "offload": OFFLOAD, "prefetch": PREFETCH, "wait": WAIT}
"""What can be asked for in order, and of what: a variant to run, and else a tensor."""


class NoScheduleError(ValueError):
    """An order of events that reads, copies or waits for something that is not there."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """
    Events in order, without addresses: kind `do[e]` (see `planner.core.lifetimes`) of `what[e]`.

    Everything else follows from that order (`trace`). Events and buffers are numbered from 0.
    """

    problem: Problem
    do: Ints
    what: Ints
    trace: Trace

    @classmethod
    def of(cls, problem: Problem, variants: Sequence[int] | Ints) -> "Schedule":
        """
        The schedule that runs these variants in that order, and keeps nothing longer than it is read.

        Raises:
            NoScheduleError: one of them reads what is not there.
        """
        what = np.array(variants, dtype=np.int64)
        return cls._of(problem, np.full(what.size, RUN, dtype=np.int64), what)

    @classmethod
    def of_orders(cls, problem: Problem, orders: Iterable[tuple[str, int]]) -> "Schedule":
        """
        The schedule of ("run", variant), ("offload", tensor), ("prefetch", tensor), ("wait", tensor).

        A wait is for the last copy of that tensor.

        Raises:
            NoScheduleError: one of them needs what is not there.
        """
        listed = [(ORDERS[do], what) for do, what in orders]
        table = np.array(listed, dtype=np.int64).reshape(-1, 2)
        return cls._of(problem, table[:, 0].copy(), table[:, 1].copy())

    @classmethod
    def of_events(cls, problem: Problem, do: Ints, what: Ints) -> "Schedule":
        """
        The schedule of events of kind `do[e]` (`planner.core.lifetimes`) and subject `what[e]`.

        Raises:
            NoScheduleError: one of them needs what is not there.
        """
        return cls._of(problem, do, what)

    @classmethod
    def as_told(
        cls, problem: Problem, what: Ints, taken: Ints, dropped: Ints, do: Ints
    ) -> "Schedule":
        """
        The schedule of a run that has decided what ends when (`planner.core.lifetimes`).

        Event e is of kind `do[e]` and subject `what[e]`.

        Raises:
            NoScheduleError: it read what it had dropped.
        """
        made = trace_as_told(to_arrays(problem), do, what, taken, dropped)
        return cls(problem, do, what, _complete(made, do))

    @classmethod
    def _of(cls, problem: Problem, do: Ints, what: Ints) -> "Schedule":
        return cls(problem, do, what, _complete(trace(to_arrays(problem), do, what), do))

    def __len__(self) -> int:
        return int(self.do.size)

    @cached_property
    def variants(self) -> list[int]:
        """Per event the variant it runs, −1 for a transfer."""
        found: list[int] = np.where(self.do == RUN, self.what, -1).tolist()
        return found

    @cached_property
    def tensor(self) -> list[int]:
        """Per buffer the tensor that it holds."""
        found: list[int] = self.trace.tensor.tolist()
        return found

    @cached_property
    def first(self) -> list[int]:
        """Per buffer the event that makes it."""
        found: list[int] = self.trace.first.tolist()
        return found

    @cached_property
    def last(self) -> list[int]:
        """Per buffer the last event that touches it."""
        found: list[int] = self.trace.last.tolist()
        return found

    def reads(self, event: int) -> list[int]:
        """The buffers that a run reads, input by input; `OUTSIDE` for those not in the arena."""
        begin, end = self.trace.reads_ptr[event : event + 2]
        found: list[int] = self.trace.reads[begin:end].tolist()
        return found

    def events(self) -> Iterator[Event]:
        """The events."""
        t = self.trace
        reads, reads_ptr = t.reads.tolist(), t.reads_ptr.tolist()
        writes, writes_ptr = t.writes.tolist(), t.writes_ptr.tolist()
        moved, source = t.moved.tolist(), t.source.tolist()
        for e, (do, what) in enumerate(zip(self.do.tolist(), self.what.tolist(), strict=True)):
            if do == RUN:
                yield Run(
                    what,
                    tuple(reads[reads_ptr[e] : reads_ptr[e + 1]]),
                    tuple(writes[writes_ptr[e] : writes_ptr[e + 1]]),
                )
            elif do == OFFLOAD:
                yield Offload(moved[e])
            elif do == PREFETCH:
                yield Prefetch(moved[e], source[e])
            else:
                yield Wait(moved[e])

    @property
    def cost_us(self) -> float:
        """The makespan, µs; see `planner.core.timeline`."""
        return self.timeline.end_us

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline at the end of the step."""
        problem, timeline = self.problem, Timeline(self.problem.device)
        moved = self.trace.moved.tolist()
        for e, (do, what) in enumerate(zip(self.do.tolist(), self.what.tolist(), strict=True)):
            if do == RUN:
                timeline.compute(problem.variants[what].cost_us)
            elif do == WAIT:
                timeline.wait(moved[e])
            else:
                copy = timeline.offload if do == OFFLOAD else timeline.prefetch
                copy(moved[e], problem.bytes[what])
        return timeline

    def live_bytes(self, *, exact: bool = False) -> Ints:
        """Arena bytes live at each event, workspace included; rounded up unless `exact`."""
        a = to_arrays(self.problem)
        sizes = (a.bytes, a.scratch) if exact else (a.size, a.workspace)
        return live_bytes(self.do, self.what, self.trace, *sizes)

    def live_buffers(self, event: int) -> list[int]:
        """The buffers that live at an event, whether or not they share an address."""
        there = (self.trace.first <= event) & (event <= self.trace.last)
        found: list[int] = np.flatnonzero(there).tolist()
        return found

    def blocks(self) -> Blocks:
        """What is placed."""
        return blocks_of(to_arrays(self.problem), self.do, self.what, self.trace)

    @cached_property
    def host_copies(self) -> HostCopies:
        """What is placed in the host's slab."""
        return host_copies(to_arrays(self.problem), self.do, self.what, self.trace)

    def fits(self, arena_bytes: int) -> bool:
        """Whether what is live never exceeds an arena; a layout may still need more."""
        units = self.problem.rounded(arena_bytes)
        return int(self.live_bytes().max(initial=0)) <= units

    def place(self, offsets: Ints, blocks: Blocks | None = None) -> "PlacedSchedule":
        """
        With offsets (bytes) of its `blocks`, given where they are known.

        Of buffers that share an address in place, the first one's counts.
        """
        blocks = blocks or self.blocks()
        buffers = self.trace.tensor.size
        offset = offsets[:buffers].copy()
        for b in np.flatnonzero(self.trace.shares >= 0).tolist():  # a source is an earlier buffer
            offset[b] = offset[self.trace.shares[b]]
        workspace = np.zeros(len(self), dtype=np.int64)
        workspace[blocks.event] = offsets[buffers:]
        return PlacedSchedule(self, offset, workspace)


def _complete(made: Trace, do: Ints) -> Trace:
    if (made.reads == MISSING).any() or (made.moved[do != RUN] < 0).any():
        raise NoScheduleError("something is used that is not there")
    if (made.source[do == PREFETCH] < 0).any():
        raise NoScheduleError("something is fetched of which the host has no copy")
    return made


@dataclass(frozen=True, eq=False)
class PlacedSchedule:
    """A schedule with addresses: offsets in bytes per buffer, and of the workspace per event."""

    schedule: Schedule
    offset: Ints
    workspace_offset: Ints

    @property
    def problem(self) -> Problem:
        """What is scheduled."""
        return self.schedule.problem

    @property
    def cost_us(self) -> float:
        """The makespan, µs."""
        return self.schedule.cost_us

    @cached_property
    def arena_bytes(self) -> int:
        """Exact size of the arena: the highest end of a buffer or a workspace."""
        a, schedule = to_arrays(self.problem), self.schedule
        size = a.bytes[schedule.trace.tensor]
        runs = schedule.do == RUN
        scratch = a.scratch[schedule.what[runs]]
        ends = np.where(size > 0, self.offset + size, 0)
        scratch_ends = np.where(scratch > 0, self.workspace_offset[runs] + scratch, 0)
        return max(int(ends.max(initial=0)), int(scratch_ends.max(initial=0)))
