"""optimal: the time-point MILP, refined until a solution fits, with a proved bound at any time.

coop-offline's plan is the first incumbent. Each round solves one model (see
`planner.exact.model.timepoint`). Its lower bound is valid for every schedule; its solution is read
out and placed. If the schedule overflows or has a layout conflict, a guided re-plan keeps its
evictions as far as they fit, and the model is refined.

Hard models get path cuts (`planner.exact.model.paths`). With transfers a second process proves
bounds by relaxations (`planner.exact.dual.bounding`) while coop-offline improves its plan. If only
placement fails, slightly smaller logical budgets are tried.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from coop_plan.planner.core.errors import DoesNotFitError, TimeLimitError
from coop_plan.planner.core.jit import usable_cpus
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule
from coop_plan.planner.exact.dual.background import BoundingProcess
from coop_plan.planner.exact.incumbent import Incumbent
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.params import DEFAULTS, ExactParams
from coop_plan.planner.exact.primal.guided_replan import GuidedReplan
from coop_plan.planner.exact.primal.readout import Readout
from coop_plan.planner.exact.refine import Refinement
from coop_plan.planner.exact.solver.process import SolverProcess, require
from coop_plan.planner.heuristic.coop_offline import CoopOffline
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.placement.layout import lay_out

TINY_OPS = 50
"""Ops up to which coop-offline always runs to its own end."""


def heuristic_runs_to_end(ops: int, left: float) -> bool:
    """True if coop-offline runs to its own end on this many ops with `left` s left."""
    return ops <= (3000 if left > 10.0 else TINY_OPS)


class _OptimalSolve:
    def __init__(
        self,
        problem: Problem,
        request: Request,
        process: SolverProcess,
        bounding: BoundingProcess,
        params: ExactParams,
    ) -> None:
        self.problem, self.request, self.params = problem, request, params
        self.process, self.bounding = process, bounding
        self.program = Program.of(problem)
        self.guided_replan = GuidedReplan(problem, request)
        self.incumbent = Incumbent(problem, request.arena_bytes, request.progress)
        assert request.deadline is not None
        self.deadline = request.deadline
        self.offline_improved = False
        self._start()

    def _start(self) -> None:
        """Offer coop-offline's plan; if it has none, shorten the deadline for other budgets."""
        now = time.monotonic()
        left = self.deadline - now
        limit = None if heuristic_runs_to_end(self.program.n, left) else now + left * 0.25
        request = replace(self.request.in_program_order(), deadline=limit)
        self.offline = CoopOffline(self.problem, request)
        self.offline.begin()
        self._offer_heuristic()
        if self.incumbent.solution is None:
            now = time.monotonic()
            self.deadline = min(self.deadline, now + (self.deadline - now) * 0.25)

    def _offer_heuristic(self) -> None:
        with contextlib.suppress(DoesNotFitError, TimeLimitError):
            self.incumbent.offer(self.offline.solution().placed)

    def finished(self) -> bool:
        """True if the incumbent suffices or is proved optimal, or the deadline has passed."""
        self.incumbent.prove(self.bounding.proved())
        stop = self.request.any_schedule and self.incumbent.solution is not None
        return stop or self.incumbent.proved or time.monotonic() >= self.deadline

    def run(self) -> None:
        """Refine at the full capacity, then at smaller ones."""
        program, incumbent = self.program, self.incumbent
        capacity = program.problem.rounded(self.request.arena_bytes)
        bounding = None if self.request.any_schedule else self.bounding
        rounds = Refinement(
            program, self.process, bounding, incumbent, capacity, self.deadline, self.params
        )
        placed = self._iterate(rounds)
        linked = program.host_link is not None
        if rounds.yielded:
            self._improve_offline(0.4, lambda: self.finished() or self.bounding.ended)
            if self.bounding.running:
                self.bounding.kill()
            else:
                placed = self._iterate(rounds)
        if rounds.infeasible:
            return
        if linked:
            self._finish_with_transfers()
            return
        if not placed:
            self._solve_smaller_arenas(rounds)
        if rounds.timed_out:
            rounds.tighten()
            rounds.final = True
            self._iterate(rounds)

    def _finish_with_transfers(self) -> None:
        """Leave the remaining time to coop-offline, the only source of plans with transfers."""
        if self.finished():
            return
        left = self.deadline - time.monotonic()
        quick = self.program.n <= 20 and self.incumbent.solution is not None
        self._improve_offline(min(1.0, 2.0 / left) if quick else 1.0, self.finished)

    def _solve_smaller_arenas(self, rounds: Refinement) -> None:
        """Refine at smaller capacities until a schedule has a layout."""
        for share in (0.995, 0.99, 0.98, 0.96, 0.93):
            if self.incumbent.gap < 1e-4 or self.finished():
                return
            smaller = self._within(rounds, int(self.request.arena_bytes * share))
            if self._iterate(smaller):
                return

    def _iterate(self, rounds: Refinement) -> bool:
        """Refine until finished; returns True if the last schedule was placed."""
        while not self.finished():
            readout = rounds.round()
            if readout is None:
                return False
            placed = self._place_readout(readout)
            if readout.overflows:
                if rounds.timed_out and not self.offline_improved:
                    self.offline_improved = True
                    self._improve_offline(0.2, self.finished)
                if not rounds.refine(readout.overflows):
                    return False
            elif not rounds.proves or rounds.timed_out or not rounds.tighten():
                return placed
        return True

    def _improve_offline(self, share: float, stop: Callable[[], bool]) -> None:
        """Improve coop-offline's plan until `stop`, for at most this share of the time left."""
        now = time.monotonic()
        self.offline.processors = max(1, usable_cpus() - self.bounding.running)
        try:
            self.offline.improve(now + (self.deadline - now) * share, stop)
        finally:
            self._offer_heuristic()

    def _within(self, rounds: Refinement, arena: int) -> Refinement:
        """Copy of the rounds' state for a smaller arena (bytes), at which bounds do not count."""
        smaller = replace(
            rounds,
            capacity=max(1, self.program.problem.rounded(arena)),  # a divisor
            proves=False,
            points=list(rounds.points),
            cuts=set(rounds.cuts),
        )
        smaller.gap = 1e-4
        smaller.paths.paths = list(rounds.paths.paths)
        return smaller

    def _offer(self, placed: PlacedSchedule) -> None:
        """Offer a placed schedule of the program, whose tensors are SSA versions."""
        self.incumbent.offer(self.program.versions.placed_to_original(placed))

    def _place_readout(self, readout: Readout) -> bool:
        """Make a plan of a readout that would be cheaper; True if it needs no re-plan."""
        schedule = readout.schedule
        if schedule.cost_us >= self.incumbent.cost_us:
            return True
        arena = self.request.arena_bytes
        if not readout.overflows:
            placed = lay_out(schedule, arena).placed
            if placed.arena_bytes <= arena:
                self._offer(placed)
                return True
        restored = self.program.versions.to_original(schedule)
        replanned = self.guided_replan.replan(restored, self.incumbent.cost_us)
        if replanned is not None:
            self.incumbent.offer(replanned)
        return False


def solve_optimal(problem: Problem, request: Request, params: ExactParams = DEFAULTS) -> Solution:
    """Returns the cheapest schedule found by the deadline (or in the default time), with its bound.

    SIGINT ends the search early if there is a plan, and is raised otherwise.

    Raises:
        DoesNotFitError: no schedule was found, which does not prove that none exists.
    """
    require("ortools")
    if request.deadline is None:
        seconds = 10.0 if request.any_schedule else params.default_seconds
        request = replace(request, deadline=time.monotonic() + seconds)
    with SolverProcess() as process, BoundingProcess(params) as bounding:
        solve = _OptimalSolve(problem, request, process, bounding, params)
        try:
            if not solve.finished():
                solve.run()
        except KeyboardInterrupt:  # an interrupted search returns its best plan
            if solve.incumbent.solution is None:
                raise
    return solve.incumbent.answer()
