"""Portfolio of eviction runs: scoring rules crossed with logical budgets, and the best that fits.

A run at a logical budget gives a cost and lifetimes; placement gives the arena they need. Lifetimes
end at the last access, so a run may fit the arena although its logical budget is larger. The
budgets form a fixed grid that does not depend on the arena, so that neighbouring budgets choose
from the same candidates.
"""

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from coop_plan.planner.core.arrays import Arrays, Ints, to_arrays
from coop_plan.planner.core.lifetimes import Blocks
from coop_plan.planner.core.memory_bounds import largest_working_set
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule, Schedule
from coop_plan.planner.heuristic.eviction_run import Record, Runner, Settings
from coop_plan.planner.heuristic.params import DEFAULTS, CoopOfflineParams, Rule
from coop_plan.planner.method import Progress, Request, Solution
from coop_plan.planner.placement.layout import WORK, fit, lay_out

GRID_RATIO = 1.015
"""Ratio of neighbouring logical budgets of the grid."""


@dataclass(frozen=True)
class Candidate:
    """A completed run and its blocks."""

    run: Record
    blocks: Blocks

    @property
    def cost_us(self) -> float:
        """Cost of the whole step, µs."""
        return self.run.cost_us

    @property
    def peak(self) -> int:
        """Peak of the live bytes."""
        return self.blocks.live

    def has_blocks_of(self, schedule: Schedule) -> bool:
        """True if a layout of a schedule of the same runs is one of this candidate.

        Buffers may live longer here than in an online run, which evicts them between their uses.
        """
        own, other = self.blocks, schedule.blocks()
        pairs = ((own.lower, other.lower), (own.upper, other.upper), (own.shares, other.shares))
        return all(np.array_equal(a, b) for a, b in pairs)


@dataclass
class _Incumbent:
    cost_us: float = np.inf
    found: Candidate | None = None
    offsets: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))


class _Outcome(NamedTuple):
    """Outcome of a rule's run: at least this cost (µs), and the live peak if the run completed.

    It did not fit `unfit_arena` bytes, as its live peak is larger or its greedy layout.
    """

    cost_us: float
    peak: int | None
    unfit_arena: int
    failed_op: int = -1


class Portfolio:
    """Candidates for one problem and one arena, with the cheapest that fits as the incumbent."""

    def __init__(
        self, problem: Problem, request: Request, params: CoopOfflineParams = DEFAULTS
    ) -> None:
        self.problem = problem
        self.request = request
        self.params = params
        self.arrays: Arrays = to_arrays(problem)
        self.runner = Runner(self.arrays, params.eviction, lambda: self.request.out_of_time())
        weight = np.ones(self.arrays.uses.size + 1)
        self.settings = [Settings(weight, *rule) for rule in params.rules]
        self.best = _Incumbent()
        self.lowest_peak: Candidate | None = None
        """The candidate with the lowest live peak."""
        self._unplaced: list[tuple[float, int, Candidate]] = []
        self._unfit_runs: set[bytes] = set()  # digests of the runs without a greedy layout
        self._counter = itertools.count()
        kept = problem.__dict__.setdefault("_run_outcomes", {})
        self._outcomes: dict[tuple[int, Rule], _Outcome] = kept.setdefault(params.eviction, {})
        self.failed_op = largest_working_set(problem).op

    def candidate(
        self, budget: int, settings: Settings, cost_limit: float = np.inf
    ) -> Candidate | None:
        """Run at a logical budget (bytes); None if the run fails or exceeds the limit (µs)."""
        run = self.runner(budget, settings, cost_limit)
        if run is None:
            return None
        return Candidate(run, run.blocks(self.arrays))

    def candidate_of(self, ops: Ints) -> Candidate:
        """The sequence of these ops as a candidate."""
        run = Record(float(self.arrays.cost[ops].sum()), ops)
        return Candidate(run, run.blocks(self.arrays))

    def consider(self, budget: int, settings: Settings) -> Candidate | None:
        """Run at a logical budget; keep the run if it is cheaper and its layout fits the arena."""
        found = self.candidate(budget, settings, self.best.cost_us)
        if found is not None:
            self.offer(found)
        elif self.best.found is None:
            self.failed_op = self.runner.failed_op
        return found

    def consider_rule(self, step: int, number: int) -> None:
        """Consider a rule's run at a grid step, unless an earlier run of it shows no use of it."""
        key = step, self.params.rules[number]
        known = self._outcomes.get(key)
        if known is not None and self._is_useless(known):
            if self.best.found is None and known.peak is None:
                self.failed_op = known.failed_op
            return
        limit, arena = self.best.cost_us, self.request.arena_bytes
        found = self.consider(self.budget(step), self.settings[number])
        if found is not None:
            unfit = 0 if self.best.found is found else arena
            self._outcomes[key] = _Outcome(found.cost_us, found.peak, unfit)
        elif not self.runner.timed_out:
            self._outcomes[key] = _Outcome(limit, None, arena, self.runner.failed_op)

    def _is_useless(self, known: _Outcome) -> bool:
        """True if a run of this outcome is too expensive, or too large and not the lowest peak."""
        if known.peak is None or known.cost_us > self.best.cost_us:
            return known.cost_us >= self.best.cost_us
        if known.cost_us == self.best.cost_us:  # such a run ends, and may have the lowest peak
            return self.lowest_peak is not None and known.peak >= self.lowest_peak.peak
        too_large = known.peak > self.problem.rounded(self.request.arena_bytes)
        if self.request.larger is not None:  # others search its layout once more
            too_large = too_large or self.request.arena_bytes <= known.unfit_arena
        return too_large and known.peak >= self._peak_to_beat

    @property
    def _peak_to_beat(self) -> float:
        """Live peak from which a run that does not fit is of no use."""
        peaks = [] if self.lowest_peak is None else [self.lowest_peak.peak]
        peaks += [] if self.request.larger is None else [self.request.larger.arena_bytes]
        return min(peaks, default=np.inf)

    def offer(self, found: Candidate, work: int = 0) -> None:
        """Keep a candidate if it is cheaper than the incumbent and its layout fits the arena.

        `work` is that of a search for a layout, 0 for greedy ones only.
        """
        blocks, arena = found.blocks, self.request.arena_bytes
        max_peak = self.problem.rounded(self.request.arena_bytes)
        if self.lowest_peak is None or found.peak < self.lowest_peak.peak:
            self.lowest_peak = found
        if found.cost_us >= self.best.cost_us or found.peak > max_peak:
            return
        run = b"" if work else hashlib.sha256(found.run.ops.tobytes()).digest()
        if run in self._unfit_runs:
            return
        placement = fit(blocks, self.problem.alignment, arena, work=work)
        if placement.peak <= arena:
            self.keep(found, placement.offsets)
        elif not work:
            self._unfit_runs.add(run)
            self._unplaced.append((found.cost_us, next(self._counter), found))
            self._unplaced = sorted(self._unplaced)[:4]  # whose layouts are searched

    def keep(self, found: Candidate, offsets: Ints) -> None:
        """Make a candidate the incumbent; `offsets` (bytes) in the order of its blocks."""
        self.best = _Incumbent(found.cost_us, found, offsets)

    def place_unplaced(self, max_count: int | None = None) -> None:
        """Search layouts for the cheapest candidates, up to `max_count`, without a greedy one."""
        for _, _, found in self._unplaced[:max_count]:
            if self.request.out_of_time():
                return
            self.offer(found, WORK)
        self._unplaced.clear()

    def runs(
        self, budget: int, rules: Iterable[int], max_count: int | None = None
    ) -> list[tuple[float, int, Record]]:
        """Completed runs of these rules at a logical budget: (cost in µs, rule number, record),
        sorted.

        At most `max_count` distinct runs; a run is abandoned once it costs more than that many
        others.
        """
        found: list[tuple[float, int, Record]] = []
        for number in rules:
            limit = (
                found[max_count - 1][0]
                if max_count is not None and len(found) >= max_count
                else np.inf
            )
            run = self.runner(budget, self.settings[number], limit)
            if run is not None and not _among(run, found):
                found.append((run.cost_us, number, run))
                found.sort(key=lambda entry: entry[:2])
        return found[:max_count]

    def solution(self) -> Solution:
        """The incumbent as a placed schedule."""
        assert self.best.found is not None
        found = self.best.found
        schedule = Schedule.of(self.problem, found.run.ops)
        return Solution(schedule.place(self.best.offsets, found.blocks))

    def closest(self) -> PlacedSchedule | None:
        """The candidate with the lowest live peak in its greedy layout, of any size.

        None if the request's larger schedule needs no more memory.
        """
        larger = self.request.larger
        if self.lowest_peak is None:
            return None
        if larger is not None and self.lowest_peak.peak >= larger.arena_bytes:
            return None
        return lay_out(Schedule.of(self.problem, self.lowest_peak.run.ops), work=0).placed

    def sweep(self) -> None:
        """Try every rule at the arena's size, then the best rules over the grid around it."""
        center = self.step(self.request.arena_bytes)
        if self.request.deadline is not None:  # time may suffice for one run only
            self.consider(self.budget(center), self.settings[0])
        rules, stride = self.best_rules(center), 1
        # Grid steps around the arena, (above, up to), tried until one window has a plan.
        windows = [(-8, 8), (-20, -8), (-44, -20)]
        if self.request.larger is not None:
            windows = windows[:1]  # the other searches start from there
        for low, high in windows:
            for step in range(center + high, center + low, -stride):
                for number in rules:
                    self.consider_rule(step, number)
                    enough = self.request.any_schedule or self.request.out_of_time()
                    if enough and (self.best.found is not None or self.runner.timed_out):
                        return
            if self.best.found is not None:
                return
            rules = list(range(len(self.settings)))
            stride = 4 if self.request.any_schedule else 1

    def best_rules(self, step: int) -> list[int]:
        """Rule numbers by cost at a grid step; only the first few for large graphs."""
        all_rules = range(len(self.settings))
        max_count = None if self.problem.op_count <= 500 else 4  # of large graphs
        ranked = [number for _, number, _ in self.runs(self.budget(step), all_rules, max_count)]
        return [*ranked, *(number for number in all_rules if number not in ranked)][:max_count]

    def report(self, fraction: float | None) -> None:
        """Report the incumbent's overhead as progress."""
        if self.request.progress is not None:
            overhead = self.best.cost_us / max(self.problem.base_cost_us, 1e-12) - 1
            self.request.progress(
                Progress(f"improving: overhead {overhead:.2%}", fraction, overhead)
            )

    def budget(self, step: int) -> int:
        """Logical budget of a grid step, bytes."""
        return int(GRID_RATIO**step)

    def step(self, size: int) -> int:
        """Largest grid step whose budget is at most `size` bytes."""
        return int(np.log(max(size, 2)) / np.log(GRID_RATIO))


def _among(run: Record, runs: Iterable[tuple[float, int, Record]]) -> bool:
    return any(
        run.cost_us == cost and np.array_equal(run.ops, other.ops) for cost, _, other in runs
    )
