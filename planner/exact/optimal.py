"""
optimal: the time-point MILP, refined until what is read out of it fits; a proved bound at any time.

coop-offline's plan is the incumbent from the start. Each round solves one model (see
`planner.exact.model.timepoint`): its bound holds for good, and its solution is read out and placed; where
it overflows or finds no layout, the kernel of coop-offline follows it as closely as fits, and the
model looks closer. Where a model is hard and the gap wide, the time goes to coop-offline and,
beside it, to relaxations for a better bound (`planner.exact.dual.bounding`). Other hard models get path
cuts (`planner.exact.model.paths`), and where time does not suffice for one, a dive leads from its
solution to a plan (`planner.exact.primal.fix_and_refine`). When only placement is in the way, slightly smaller
logical budgets are tried.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule, Schedule
from coop_plan.planner.exact.dual.background import BoundingProcess
from coop_plan.planner.exact.incumbent import Incumbent
from coop_plan.planner.exact.model.intervals import schedule_intervals
from coop_plan.planner.exact.model.paths import PathCuts
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.primal.fix_and_refine import Dive
from coop_plan.planner.exact.primal.follow import Guide
from coop_plan.planner.exact.primal.packing import Crowded, place_or_pack, place_or_tell
from coop_plan.planner.exact.primal.readout import Readout
from coop_plan.planner.exact.refine import Refinement
from coop_plan.planner.exact.solver.process import SolverProcess, require
from coop_plan.planner.layout import WORK_PER_SECOND
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.offline.solve import CoopOffline

DEFAULT_SECONDS = 60.0
"""Time limit of a request without one."""

PROBE_SECONDS = 10.0
"""The same, where any schedule will do: one of many budgets tried in search of the smallest."""

SMALL_OPS = 3000
LONG_SECONDS = 10.0
HEURISTIC_SHARE = 0.25
"""coop-offline takes its own time on graphs up to SMALL_OPS when there are more than LONG_SECONDS
left, and else this share of what is left."""

BLIND_SHARE = 0.25
"""Share of the time left for finding any plan at all where coop-offline finds none."""

JOINT_OPS = 20
"""Up to here eviction and layout are decided as one, by CP-SAT, where both in turn fail."""

JOINT_SECONDS = 2.0
"""How long it may look for a better plan; for any plan at all, as long as there is time."""

SHRINK = (0.995, 0.99, 0.98, 0.96, 0.93)
"""Logical budgets, as shares of the arena, for plans that are easier to place."""

CLIMB_SHARE = 0.2
"""Share of the time left for more of coop-offline once a model took all of its own."""

DIVE_SHARE = 0.9
"""Share of the time left that a dive may take."""

DIVE_SHRINK = (1.0, 0.99, 0.975)
"""Shares of the arena to dive within, in turn as long as only a layout is missing."""

PLACE_WORK = 1_000_000_000
"""Effort of `planner.placement.place` for the layout of what it finds, as far as time allows."""

GOOD_GAP = 1e-4
"""Below this gap smaller logical budgets are not worth trying."""


class _Search:
    def __init__(
        self,
        problem: Problem,
        request: Request,
        process: SolverProcess,
        bounding: BoundingProcess,
    ) -> None:
        self.request = request
        self.process = process
        self.program = Program.of(problem)
        self.guide = Guide(problem, request)
        self.incumbent = Incumbent(problem, request.arena_bytes, request.progress)
        assert request.deadline is not None
        self.deadline = request.deadline
        self.climbed = False
        self.bounding = bounding
        self._begin()

    def _begin(self) -> None:
        """Start from coop-offline's plan; without one, do not spend all the time looking for one.

        The caller may ask for other budgets next, within the same deadline.
        """
        now = time.monotonic()
        share = self.deadline - now
        if share > LONG_SECONDS and self.program.n <= SMALL_OPS:
            limit = None
        else:
            limit = now + share * HEURISTIC_SHARE
        self.offline = CoopOffline(self.program.problem, replace(self.request, deadline=limit))
        self.offline.begin()
        self._offer_heuristic()
        if self.incumbent.solution is None:
            now = time.monotonic()
            self.deadline = now + (self.deadline - now) * BLIND_SHARE

    def _offer_heuristic(self) -> None:
        """Offer coop-offline's plan, if it has one."""
        arena = self.request.arena_bytes
        try:
            placed = self.offline.solution().placed
        except DoesNotFitError:
            return
        if placed.arena_bytes <= arena:
            self.incumbent.offer(placed)

    def finished(self) -> bool:
        """Whether there is nothing left to look for, or no time."""
        self.incumbent.prove(self.bounding.proved())
        enough = self.request.any_schedule and self.incumbent.solution is not None
        return enough or self.incumbent.proved or time.monotonic() >= self.deadline

    def finish(self) -> None:
        """Use the time for which better bounds may come."""
        if self.bounding.running and not self.finished():
            self._climb(1.0, self.finished)
        while self.bounding.running and not self.finished():
            self.incumbent.prove(self.bounding.proved(self.deadline))

    def run(self) -> None:
        """Rounds at the full capacity, then at smaller ones."""
        capacity = self.program.capacity(self.request.arena_bytes)
        bounding = None if self.request.any_schedule else self.bounding
        rounds = Refinement(
            self.program, self.process, bounding, self.incumbent, capacity, self.deadline
        )
        placed = self._refine(rounds)
        if rounds.gave_way:
            self._climb(1.0, lambda: self.finished() or self.bounding.ended)
            placed = self._refine(rounds)
        if rounds.infeasible:
            return
        if not placed:
            self._shrink(rounds)
        if rounds.cut_short:
            rounds.tighten()
            rounds.last = True
            self._refine(rounds)
        if not self.finished() and self.program.n <= JOINT_OPS:
            until = self.deadline
            if self.incumbent.solution is not None:
                until = min(until, time.monotonic() + JOINT_SECONDS)
            _, schedule = schedule_intervals(
                self.process, self.program, capacity, until, joint=True
            )
            if schedule is not None:
                self._use(Readout(schedule, [], []))

    def _shrink(self, rounds: Refinement) -> None:
        """Rounds at smaller capacities until a plan is placed."""
        for share in SHRINK:
            if self.incumbent.gap < GOOD_GAP or self.finished():
                return
            smaller = self._smaller(rounds, int(self.request.arena_bytes * share))
            if self._refine(smaller):
                return

    def _refine(self, rounds: Refinement) -> bool:
        """Rounds until done; whether the last plan was placed."""
        while not self.finished():
            readout = rounds.round()
            if readout is None:
                return False
            placed = self._use(readout)
            if readout.overflows:
                if rounds.cut_short:
                    if not self.climbed:
                        self.climbed = True
                        self._climb(CLIMB_SHARE, self.finished)
                    self._dive(rounds)
                if not rounds.refine(readout.overflows):
                    return False
            elif not rounds.proves or rounds.cut_short or not rounds.tighten():
                return placed
        return True

    def _climb(self, share: float, enough: Callable[[], bool]) -> None:
        """Let coop-offline look longer: until `enough`, for this share of the time left at most."""
        now = time.monotonic()
        try:
            self.offline.improve(now + (self.deadline - now) * share, enough)
        finally:
            self._offer_heuristic()

    def _dive(self, rounds: Refinement) -> None:
        """Look for a plan near the last round's solution, and at smaller capacities if need be."""
        arena = self.request.arena_bytes
        unit = self.program.problem.alignment
        for share in DIVE_SHRINK:
            if share < 1:
                rounds = self._smaller(rounds, int(arena * share))
                if rounds.round() is None:
                    return
            assert rounds.outline is not None
            now = time.monotonic()
            until = now + (self.deadline - now) * DIVE_SHARE
            capacity = min(rounds.capacity, arena // unit * unit)
            dive = Dive(self.program, self.process, capacity, until, self._place)
            placed = dive.run(rounds.outline, self.incumbent.cost_us)
            if placed is not None:
                self.incumbent.offer(placed)
            if placed is not None or not dive.margins:
                return

    def _smaller(self, rounds: Refinement, arena: int) -> Refinement:
        """The rounds' state within a smaller arena (bytes), where it proves nothing."""
        return replace(
            rounds,
            capacity=self.program.capacity(arena),
            proves=False,
            gap=GOOD_GAP,
            points=list(rounds.points),
            cuts=set(rounds.cuts),
            paths=PathCuts(list(rounds.paths.paths)),
        )

    def _place(self, schedule: Schedule) -> PlacedSchedule | Crowded:
        """A schedule with offsets within the arena, or where that fails."""
        left = max(0.0, self.deadline - time.monotonic())
        work = min(PLACE_WORK, int(left * WORK_PER_SECOND))
        return place_or_tell(schedule, self.request.arena_bytes, work)

    def _use(self, readout: Readout) -> bool:
        """Make a plan of a readout if it is worth it; whether it was placed as it is."""
        schedule = readout.schedule
        if schedule.cost_us >= self.incumbent.cost_us:
            return True
        arena = self.request.arena_bytes
        if not readout.overflows:
            placed = place_or_pack(self.process, schedule, arena, self.deadline)
            if placed is not None:
                self.incumbent.offer(placed)
                return True
        followed = self.guide.follow(schedule, self.incumbent.cost_us)
        if followed is not None:
            self.incumbent.offer(followed)
        return False


def solve_optimal(problem: Problem, request: Request) -> Solution:
    """
    The cheapest schedule found until the deadline (or for `DEFAULT_SECONDS`), with its bound.

    An interruption (SIGINT) ends the search early; without any plan it goes on as what it is.

    Raises:
        DoesNotFitError: nothing was found; it is not always proved that nothing exists.
    """
    require("ortools")
    if request.deadline is None:
        seconds = PROBE_SECONDS if request.any_schedule else DEFAULT_SECONDS
        request = replace(request, deadline=time.monotonic() + seconds)
    with SolverProcess() as process, BoundingProcess() as bounding:
        search = _Search(problem, request, process, bounding)
        try:
            if not search.finished():
                search.run()
                search.finish()
        except KeyboardInterrupt:  # whoever has seen enough gets the best so far
            if search.incumbent.solution is None:
                raise
    return search.incumbent.answer()
