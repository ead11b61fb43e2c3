"""
optimal: the time-point MILP, refined until what is read out of it fits; a proved bound at any time.

coop-offline's plan is the incumbent from the start. Each round solves one model (see
`planner.exact.model.timepoint`): its bound holds for good, and its solution is read out and placed;
where it overflows or finds no layout, the kernel of coop-offline follows it as closely as fits, and
the model looks closer. Where a model is hard and the gap wide, the time goes to coop-offline and,
beside it, to relaxations for a better bound (`planner.exact.dual.bounding`). Other hard models get
path cuts (`planner.exact.model.paths`), and where time does not suffice for one, fix-and-refine
leads from its solution to a plan (`planner.exact.primal.fix_and_refine`). When only placement is in
the way, slightly smaller logical budgets are tried.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from coop_plan.planner.core.errors import DoesNotFitError, TimeLimitError
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.jit import usable_cpus
from coop_plan.planner.core.schedule import PlacedSchedule, Schedule
from coop_plan.planner.exact.dual.background import BoundingProcess
from coop_plan.planner.exact.incumbent import Incumbent
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.params import DEFAULTS, ExactParams
from coop_plan.planner.exact.primal.fix_and_refine import FixAndRefine
from coop_plan.planner.exact.primal.guided_replan import PlanFollower
from coop_plan.planner.exact.primal.intervals import schedule_intervals
from coop_plan.planner.exact.primal.packing import Crowded, place_or_pack, place_or_tell
from coop_plan.planner.exact.primal.readout import Readout
from coop_plan.planner.exact.refine import Refinement
from coop_plan.planner.exact.solver.process import SolverProcess, require
from coop_plan.planner.placement.layout import WORK_PER_SECOND
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.heuristic.coop_offline import CoopOffline


class _OptimalSolve:
    """One request: what is known so far, and what is tried next."""

    def __init__(
        self,
        problem: Problem,
        request: Request,
        process: SolverProcess,
        bounding: BoundingProcess,
        params: ExactParams,
    ) -> None:
        self.request = request
        self.params = params
        self.process = process
        self.problem = problem
        self.program = Program.of(problem)
        self.follower = PlanFollower(problem, request, params.follow)
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
        params = self.params.search
        now = time.monotonic()
        left = self.deadline - now
        unhurried = params.unhurried(self.program.n, left)
        limit = None if unhurried else now + left * params.heuristic_share
        request = replace(self.request.in_program_order(), deadline=limit)
        self.offline = CoopOffline(self.problem, request)
        self.offline.begin()
        self._offer_heuristic()
        if self.incumbent.solution is None:
            now = time.monotonic()
            self.deadline = now + (self.deadline - now) * params.blind_share

    def _offer_heuristic(self) -> None:
        """Offer coop-offline's plan, if it has one."""
        arena = self.request.arena_bytes
        try:
            placed = self.offline.solution().placed
        except (DoesNotFitError, TimeLimitError):
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
        capacity = self.program.problem.rounded(self.request.arena_bytes)
        bounding = None if self.request.any_schedule else self.bounding
        rounds = Refinement(
            self.program,
            self.process,
            bounding,
            self.incumbent,
            capacity,
            self.deadline,
            self.params,
        )
        placed = self._iterate(rounds)
        linked = self.program.links is not None
        if rounds.gave_way:
            share = self.params.search.linked_bounding_share if linked else 1.0
            self._climb(share, lambda: self.finished() or self.bounding.ended)
            if linked and self.bounding.running:
                self.bounding.kill()
            else:
                placed = self._iterate(rounds)
        if rounds.infeasible:
            return
        if linked:
            self._go_on_with_transfers()
            return
        if not placed:
            self._shrink(rounds)
        if rounds.cut_short:
            rounds.tighten()
            rounds.last = True
            self._iterate(rounds)
        if not self.finished() and self.program.n <= self.params.search.joint_ops:
            self._solve_jointly(capacity)

    def _go_on_with_transfers(self) -> None:
        """Leave the rest to coop-offline, which alone makes plans with transfers."""
        if self.finished():
            return
        params, left = self.params.search, self.deadline - time.monotonic()
        small = self.program.n <= params.joint_ops and self.incumbent.solution is not None
        self._climb(min(1.0, params.joint_seconds / left) if small else 1.0, self.finished)

    def _solve_jointly(self, capacity: int) -> None:
        """Eviction and layout as one model."""
        until = self.deadline
        if self.incumbent.solution is not None:
            until = min(until, time.monotonic() + self.params.search.joint_seconds)
        copies = self.params.search.joint_copies
        _, schedule = schedule_intervals(
            self.process, self.program, capacity, until, copies=copies, joint=True
        )
        if schedule is not None:
            self._use(Readout(schedule, [], []))

    def _shrink(self, rounds: Refinement) -> None:
        """Rounds at smaller capacities until a plan is placed."""
        params = self.params.search
        for share in params.shrink:
            if self.incumbent.gap < params.good_gap or self.finished():
                return
            smaller = self._smaller(rounds, int(self.request.arena_bytes * share))
            if self._iterate(smaller):
                return

    def _iterate(self, rounds: Refinement) -> bool:
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
                        self._climb(self.params.search.climb_share, self.finished)
                    self._fix_and_refine(rounds)
                if not rounds.refine(readout.overflows):
                    return False
            elif not rounds.proves or rounds.cut_short or not rounds.tighten():
                return placed
        return True

    def _climb(self, share: float, enough: Callable[[], bool]) -> None:
        """Let coop-offline look longer: until `enough`, for this share of the time left at most."""
        now = time.monotonic()
        self.offline.processors = max(1, usable_cpus() - self.bounding.running)
        try:
            self.offline.improve(now + (self.deadline - now) * share, enough)
        finally:
            self._offer_heuristic()

    def _fix_and_refine(self, rounds: Refinement) -> None:
        """Look for a plan near the last round's solution, and at smaller capacities if need be."""
        arena, params = self.request.arena_bytes, self.params.search
        unit = self.program.problem.alignment
        for share in params.fix_arenas:
            if share < 1:
                rounds = self._smaller(rounds, int(arena * share))
                if rounds.round() is None:
                    return
            assert rounds.outline is not None
            now = time.monotonic()
            until = now + (self.deadline - now) * params.fix_share
            capacity = min(rounds.capacity, arena // unit * unit)
            search = FixAndRefine(
                self.program, self.process, capacity, until, self._place, self.params
            )
            placed = search.run(rounds.outline, self.incumbent.cost_us)
            if placed is not None:
                self._offer(placed)
            if placed is not None or not search.margins:
                return

    def _smaller(self, rounds: Refinement, arena: int) -> Refinement:
        """The rounds' state within a smaller arena (bytes), where it proves nothing."""
        smaller = replace(
            rounds,
            capacity=max(1, self.program.problem.rounded(arena)),  # a divisor
            proves=False,
            points=list(rounds.points),
            cuts=set(rounds.cuts),
        )
        smaller.gap = self.params.search.good_gap
        smaller.paths.paths = list(rounds.paths.paths)
        return smaller

    def _place(self, schedule: Schedule) -> PlacedSchedule | Crowded:
        """A schedule with offsets within the arena, or where that fails."""
        left = max(0.0, self.deadline - time.monotonic())
        work = min(self.params.search.place_work, int(left * WORK_PER_SECOND))
        return place_or_tell(schedule, self.request.arena_bytes, work)

    def _offer(self, placed: PlacedSchedule) -> None:
        """Offer a placed schedule of the program, whose tensors are versions."""
        self.incumbent.offer(self.program.versions.placed_to_original(placed))

    def _use(self, readout: Readout) -> bool:
        """Make a plan of a readout if it is worth it; whether it was placed as it is."""
        schedule = readout.schedule
        if schedule.cost_us >= self.incumbent.cost_us:
            return True
        arena = self.request.arena_bytes
        if not readout.overflows:
            packing = self.params.packing
            placed = place_or_pack(self.process, schedule, arena, self.deadline, packing)
            if placed is not None:
                self._offer(placed)
                return True
        restored = self.program.versions.to_original(schedule)
        followed = self.follower.follow(restored, self.incumbent.cost_us)
        if followed is not None:
            self.incumbent.offer(followed)
        return False


def solve_optimal(problem: Problem, request: Request, params: ExactParams = DEFAULTS) -> Solution:
    """
    The cheapest schedule found until the deadline, or else in the default time, with its bound.

    An interruption (SIGINT) ends the search early; without any plan it goes on as what it is.

    Raises:
        DoesNotFitError: nothing was found; it is not always proved that nothing exists.
    """
    require("ortools")
    if request.deadline is None:
        times = params.search
        seconds = times.probe_seconds if request.any_schedule else times.default_seconds
        request = replace(request, deadline=time.monotonic() + seconds)
    with SolverProcess(params.solver) as process, BoundingProcess(params) as bounding:
        solve = _OptimalSolve(problem, request, process, bounding, params)
        try:
            if not solve.finished():
                solve.run()
                solve.finish()
        except KeyboardInterrupt:  # whoever has seen enough gets the best so far
            if solve.incumbent.solution is None:
                raise
    return solve.incumbent.answer()
