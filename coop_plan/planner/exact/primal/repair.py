"""
Repairing a readout that overflows: tensors beside the op in question go, and come again later.

Segments are repaired each on its own, as what is resident at the time points stays as it is. Where
two drops take from each other, or nothing can go, a segment is given up.
"""

import time
from dataclasses import dataclass, field

from coop_plan.planner.exact.model.point_selection import segment
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.params import DEFAULTS, RepairParams
from coop_plan.planner.exact.primal.readout import (
    Drops,
    Margins,
    Outline,
    Overflow,
    Readout,
    StuckError,
    read_out,
)


@dataclass
class Repair:
    """Drops for outlines that have much in common; `capacity` is in bytes."""

    program: Program
    capacity: int
    margins: Margins
    params: RepairParams = DEFAULTS.repair
    drops: Drops = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    """Segments, by the time point that ends them."""

    def read_out(self, outline: Outline, deadline: float) -> Readout:
        """
        The schedule of an outline, which overflows only in segments that were given up.

        That holds for readouts done by `deadline` (a `time.monotonic` value, s).

        Raises:
            UnreadableError: as `planner.exact.primal.readout.read_out`.
        """
        while True:
            try:
                readout = read_out(
                    self.program,
                    outline,
                    self.capacity,
                    self.drops,
                    self.margins,
                    self.params.most_runs,
                )
            except StuckError as stuck:
                self._give_up(outline, stuck.position)
                if time.monotonic() > deadline:
                    self.drops.clear()
                continue
            if time.monotonic() > deadline or not self._add(outline, readout):
                return readout

    def forget(self, low: int, high: int) -> None:
        """Begin anew for the positions after `low` and up to `high`."""
        self.drops = {key: value for key, value in self.drops.items() if not low < key[0] <= high}
        self.given_up = {point for point in self.given_up if not low < point <= high}

    def _give_up(self, outline: Outline, position: int) -> None:
        low, point = segment(outline.points, position)
        self.forget(low, point)
        self.given_up.add(point)

    def _add(self, outline: Outline, readout: Readout) -> bool:
        """Drops for the first overflow of every segment; whether anything has changed."""
        seen = set(self.given_up)
        changed = False
        for overflow in readout.overflows:
            _, point = segment(outline.points, overflow.position)
            if point in seen:
                continue
            seen.add(point)
            changed = True
            stay = outline.resident[point] if overflow.op == point else set()
            chosen = self._choose(readout, overflow, stay)
            if chosen:
                key = overflow.position, overflow.op
                self.drops[key] = self.drops.get(key, set()) | chosen
            else:
                self._give_up(outline, overflow.position)
        return changed

    def _choose(self, readout: Readout, overflow: Overflow, stay: set[int]) -> set[int]:
        """Cheap tensors that make up for the excess, if there are enough of them."""
        program, schedule, event = self.program, readout.schedule, overflow.event
        size = program.problem.size
        live = {schedule.tensor[buffer] for buffer in schedule.live_buffers(event)}
        beside = live.difference(program.reads[overflow.op], program.makes[overflow.op], stay)
        costs = {t: self._again(t, live) for t in beside if size[t]}
        left = overflow.excess
        chosen: list[int] = []
        for t in sorted(costs, key=lambda t: (costs[t] / min(size[t], overflow.excess), t)):
            if left > 0 and costs[t] < float("inf"):
                chosen.append(t)
                left -= size[t]
        if left > 0:
            return set()
        for t in sorted(chosen, key=lambda t: (-costs[t], t)):
            if left + size[t] <= 0:
                chosen.remove(t)
                left += size[t]
        if sum(costs[t] for t in chosen) > self.params.dearest * program.problem.base_cost_us:
            return set()
        return set(chosen)

    def _again(self, tensor: int, live: set[int]) -> float:
        """µs to compute the tensor anew from what is live; infinite if it cannot be."""
        program, cost = self.program, 0.0
        stack, seen = [tensor], set[int]()
        while stack:
            op = program.problem.producer[stack.pop()]
            if op < 0 or program.once(op):
                return float("inf")
            if op not in seen:
                seen.add(op)
                cost += program.problem.cost[op]
                stack += [t for t in program.reads[op] if t not in live]
        return cost
