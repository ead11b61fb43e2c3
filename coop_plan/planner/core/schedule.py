"""Schedules: typed events in order, and the buffers that they write and read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    trace_with_decisions,
)
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.timeline import Timeline

__all__ = ["OUTSIDE", "Event", "Offload", "PlacedSchedule", "Prefetch", "Run", "Schedule", "Wait"]


@dataclass(frozen=True, slots=True)
class Run:
    """A run of variant `variant`. `reads` follow its inputs and `writes` its outputs, one by one.

    `OUTSIDE` stands for resident tensors and outputs outside the arena.
    """

    variant: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offload:
    """Start copying `buffer` to the host; the buffer stays live until a `Wait` on it."""

    buffer: int


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Start copying the host's copy of buffer `source` into the new buffer `buffer`."""

    buffer: int
    source: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Stall compute until the copy last started on `buffer` has ended."""

    buffer: int


Event = Run | Offload | Prefetch | Wait


class NoScheduleError(ValueError):
    """A sequence of events that reads, copies or waits for a tensor that is not resident."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """Events in order, without addresses.

    Event e is of kind `do[e]` (see `planner.core.lifetimes`); its subject `what[e]` is a variant
    for `RUN`, else a tensor. All else follows from that order (`trace`).
    """

    problem: Problem
    do: Ints
    what: Ints
    trace: Trace

    @classmethod
    def of(cls, problem: Problem, variants: Sequence[int] | Ints) -> "Schedule":
        """The schedule that runs these variants in order and keeps no tensor beyond its last read.

        Raises:
            NoScheduleError: a variant reads a tensor that is not resident.
        """
        what = np.array(variants, dtype=np.int64)
        return cls.of_events(problem, np.full(what.size, RUN, dtype=np.int64), what)

    @classmethod
    def of_events(cls, problem: Problem, do: Ints, what: Ints) -> "Schedule":
        """The schedule of events of kind `do[e]` (`planner.core.lifetimes`) and subject `what[e]`.

        Raises:
            NoScheduleError: an event needs a tensor or a host copy that does not exist.
        """
        found = trace(to_arrays(problem), do, what)
        _check_complete(problem, do, what, found)
        return cls(problem, do, what, found)

    @classmethod
    def with_decisions(
        cls, problem: Problem, what: Ints, taken: Ints, dropped: Ints, do: Ints
    ) -> "Schedule":
        """The schedule of an online run, with its evictions and in-place decisions.

        `taken` and `dropped` are those of `planner.core.lifetimes.trace_with_decisions`; event e is
        of kind `do[e]` and subject `what[e]`.

        Raises:
            NoScheduleError: an event reads a tensor that was evicted.
        """
        found = trace_with_decisions(to_arrays(problem), do, what, taken, dropped)
        _check_complete(problem, do, what, found)
        return cls(problem, do, what, found)

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
        """Per buffer the event that writes it."""
        found: list[int] = self.trace.first.tolist()
        return found

    @cached_property
    def last(self) -> list[int]:
        """Per buffer the last event that uses it."""
        found: list[int] = self.trace.last.tolist()
        return found

    def reads(self, event: int) -> list[int]:
        """The buffers that a run reads, input by input; `OUTSIDE` for inputs not in the arena."""
        begin, end = self.trace.reads_ptr[event : event + 2]
        found: list[int] = self.trace.reads[begin:end].tolist()
        return found

    def events(self) -> Iterator[Event]:
        """The events as typed objects."""
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
        free = {(OFFLOAD, t) for t in problem.homes.copies}
        free |= {(PREFETCH, t) for t, _ in problem.homes.returned}
        host_us = dict(problem.homes.host_us)
        moved = self.trace.moved.tolist()
        for e, (do, what) in enumerate(zip(self.do.tolist(), self.what.tolist(), strict=True)):
            if do == RUN:
                timeline.compute(problem.variants[what].cost_us)
            elif do == WAIT:
                timeline.wait(moved[e])
            elif (do, what) in free:
                timeline.skip(moved[e])
                free.discard((OFFLOAD, what))
            else:
                copy = timeline.offload if do == OFFLOAD else timeline.prefetch
                copy(moved[e], problem.bytes[what])
                if do == OFFLOAD and what in host_us:
                    timeline.compute_on_host(host_us[what], [moved[e]])
        return timeline

    def live_bytes(self, *, exact: bool = False) -> Ints:
        """Arena bytes live at each event, workspace included; rounded up unless `exact`."""
        a = to_arrays(self.problem)
        sizes = (a.bytes, a.scratch) if exact else (a.size, a.workspace)
        return live_bytes(self.do, self.what, self.trace, *sizes)

    def blocks(self) -> Blocks:
        """The blocks that placement gives addresses in the arena."""
        return blocks_of(to_arrays(self.problem), self.do, self.what, self.trace)

    @cached_property
    def host_copies(self) -> HostCopies:
        """The copies that placement gives addresses in the host slab; those of homes are empty."""
        a, homes = to_arrays(self.problem), self.problem.homes
        if homes.copies or homes.returned:
            sent = dict(homes.host_us)
            placed = [*homes.copies, *(t for t, _ in homes.returned if t not in sent)]
            exact, rounded = a.bytes.copy(), a.size.copy()
            exact[placed] = rounded[placed] = 0
            a = a._replace(bytes=exact, size=rounded)
        return host_copies(a, self.do, self.what, self.trace)

    def fits(self, arena_bytes: int) -> bool:
        """True if the live bytes never exceed an arena; a layout may still need more."""
        units = self.problem.rounded(arena_bytes)
        return int(self.live_bytes().max(initial=0)) <= units

    def place(self, offsets: Ints, blocks: Blocks | None = None) -> "PlacedSchedule":
        """The schedule with offsets (bytes) of its `blocks`; pass `blocks` if already computed.

        Buffers that share an address in place have the offset of the first.
        """
        blocks = blocks or self.blocks()
        buffers = self.trace.tensor.size
        offset = offsets[:buffers].copy()
        for b in np.flatnonzero(blocks.shares >= 0).tolist():  # in order: shares[b] < b
            offset[b] = offset[blocks.shares[b]]
        workspace = np.zeros(len(self), dtype=np.int64)
        workspace[blocks.event] = offsets[buffers:]
        placed = replace(self, trace=self.trace._replace(shares=blocks.shares))
        return PlacedSchedule(placed, offset, workspace)


def _check_complete(problem: Problem, do: Ints, what: Ints, t: Trace) -> None:
    """
    Raise `NoScheduleError` at the first event that uses a tensor which is not resident.

    It is raised as well if no run makes an output of the step, as a variant may omit it.
    """
    graph = problem.graph
    for output, makers in problem.omitted_outputs.items():
        if not np.isin(what[do == RUN], makers).any():
            tensor = graph.tensors[output].id
            raise NoScheduleError(f"no run makes tensor {tensor}, an output of the step")
    missing = np.flatnonzero(t.reads == MISSING)
    if missing.size:
        event = int(np.searchsorted(t.reads_ptr, missing[0], side="right")) - 1
        variant = problem.variants[what[event]]
        tensor = graph.tensors[variant.inputs[missing[0] - t.reads_ptr[event]]].id
        op = graph.ops[variant.op]
        raise NoScheduleError(
            f"event {event} (op {op.id}, {op.name}) reads tensor {tensor}, which is not resident"
        )
    transfers = do != RUN
    faults = (
        (transfers & (t.moved < 0), "moves tensor", "which is not resident or not being copied"),
        ((do == PREFETCH) & (t.source < 0), "prefetches tensor", "which has no copy on the host"),
    )
    for flags, action, reason in faults:
        if flags.any():
            event = int(flags.argmax())
            tensor = graph.tensors[what[event]].id
            raise NoScheduleError(f"event {event} {action} {tensor}, {reason}")


@dataclass(frozen=True, eq=False)
class PlacedSchedule:
    """A schedule with addresses: byte offsets per buffer, and of the workspace per event."""

    schedule: Schedule
    offset: Ints
    workspace_offset: Ints

    @property
    def problem(self) -> Problem:
        """The problem of the schedule."""
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
