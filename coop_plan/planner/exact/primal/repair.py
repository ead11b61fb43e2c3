"""Repair of overflowing schedules: evict residents of the overflowing op, recompute them later.

Residents at the time points stay fixed, so segments are repaired independently. A segment is given
up if evictions thrash or no tensor can be evicted.
"""

import time
from dataclasses import dataclass, field

from coop_plan.planner.exact.model.point_selection import segment_of
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.params import DEFAULTS, RepairParams
from coop_plan.planner.exact.primal.readout import (
    Evictions,
    Margins,
    Overflow,
    Readout,
    Residency,
    ThrashingError,
    read_out,
)


@dataclass
class Repair:
    """Evictions for residency outlines that have much in common; `capacity` is in bytes."""

    program: Program
    capacity: int
    margins: Margins
    params: RepairParams = DEFAULTS.repair
    evictions: Evictions = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    """Segments given up, by the time point that ends them."""

    def read_out(self, residency: Residency, deadline: float) -> Readout:
        """The schedule of an outline; only segments that were given up overflow.

        After `deadline` (a `time.monotonic` value, s) other segments may overflow, too.

        Raises:
            NotRecomputableError: see `planner.exact.primal.readout.read_out`.
        """
        while True:
            try:
                readout = read_out(
                    self.program,
                    residency,
                    self.capacity,
                    self.evictions,
                    self.margins,
                    self.params.max_runs,
                )
            except ThrashingError as error:
                self._give_up(residency, error.position)
                if time.monotonic() > deadline:
                    self.evictions.clear()
                continue
            if time.monotonic() > deadline or not self._add(residency, readout):
                return readout

    def reset(self, low: int, high: int) -> None:
        """Remove evictions of the positions after `low` and up to `high`."""
        self.evictions = {at: e for at, e in self.evictions.items() if not low < at[0] <= high}
        self.given_up = {point for point in self.given_up if not low < point <= high}

    def _give_up(self, residency: Residency, position: int) -> None:
        low, point = segment_of(residency.points, position)
        self.reset(low, point)
        self.given_up.add(point)

    def _add(self, residency: Residency, readout: Readout) -> bool:
        """Add evictions for the first overflow of every segment; True if any state changed."""
        seen = set(self.given_up)
        changed = False
        for overflow in readout.overflows:
            _, point = segment_of(residency.points, overflow.position)
            if point in seen:
                continue
            seen.add(point)
            changed = True
            pinned = residency.resident[point] if overflow.op == point else set()
            chosen = self._choose(readout, overflow, pinned)
            if chosen:
                key = overflow.position, overflow.op
                self.evictions[key] = self.evictions.get(key, set()) | chosen
            else:
                self._give_up(residency, overflow.position)
        return changed

    def _choose(self, readout: Readout, overflow: Overflow, pinned: set[int]) -> set[int]:
        """Cheap tensors whose eviction removes the excess; empty if there are none or they cost too
        much.
        """
        program, schedule, event = self.program, readout.schedule, overflow.event
        size = program.problem.size
        live = {schedule.tensor[buffer] for buffer in schedule.live_buffers(event)}
        candidates = live.difference(program.reads[overflow.op], program.makes[overflow.op], pinned)
        costs = {t: self._recompute_us(t, live) for t in candidates if size[t]}
        excess = overflow.excess
        chosen: list[int] = []
        for t in sorted(costs, key=lambda t: (costs[t] / min(size[t], overflow.excess), t)):
            if excess > 0 and costs[t] < float("inf"):
                chosen.append(t)
                excess -= size[t]
        if excess > 0:
            return set()
        for t in sorted(chosen, key=lambda t: (-costs[t], t)):
            if excess + size[t] <= 0:
                chosen.remove(t)
                excess += size[t]
        limit = self.params.max_cost_share * program.problem.base_cost_us
        return set() if sum(costs[t] for t in chosen) > limit else set(chosen)

    def _recompute_us(self, tensor: int, live: set[int]) -> float:
        """µs to recompute the tensor from live tensors; infinite if it cannot be recomputed."""
        program, cost = self.program, 0.0
        stack, seen = [tensor], set[int]()
        while stack:
            op = program.problem.producer[stack.pop()]
            if op < 0 or program.runs_once(op):
                return float("inf")
            if op not in seen:
                seen.add(op)
                cost += program.problem.cost[op]
                stack += [t for t in program.reads[op] if t not in live]
        return cost
