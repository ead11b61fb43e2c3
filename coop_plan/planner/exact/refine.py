"""Refinement of the time-point model: solve, read out, add time points or cuts at overflows."""

import time
from dataclasses import dataclass, field
from itertools import groupby
from math import inf

from coop_plan.planner.core.jit import usable_cpus
from coop_plan.planner.exact.dual.background import BoundingProcess
from coop_plan.planner.exact.incumbent import OPTIMALITY_TOLERANCE, Incumbent
from coop_plan.planner.exact.model.milp import Answer, Outcome
from coop_plan.planner.exact.model.paths import PathCuts
from coop_plan.planner.exact.model.point_selection import (
    initial_points,
    segment_of,
    worst_of_groups,
)
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.timepoint import COST_SCALE, TimePointModel
from coop_plan.planner.exact.params import DEFAULTS, ExactParams
from coop_plan.planner.exact.primal.lns import improve_by_lns
from coop_plan.planner.exact.primal.readout import (
    NotRecomputableError,
    Overflow,
    Readout,
    Residency,
    read_out,
)
from coop_plan.planner.exact.solver.jobs import SolveProgress
from coop_plan.planner.exact.solver.process import SolverProcess


@dataclass
class Refinement:
    """Rounds at one capacity (bytes, a multiple of the alignment).

    `proves` is True at the arena's own capacity; bounds of smaller capacities do not count. A hard
    model with a wide gap starts `bounding`, if given.
    """

    program: Program
    process: SolverProcess
    bounding: BoundingProcess | None
    incumbent: Incumbent
    capacity: int
    deadline: float
    params: ExactParams = DEFAULTS
    proves: bool = True
    points: list[int] = field(default_factory=list)
    cuts: set[tuple[int, int]] = field(default_factory=set)
    infeasible: bool = False
    """True if a model at the full capacity is infeasible, so no schedule exists."""
    timed_out: bool = False
    """True if the last solve hit its time limit."""
    hard: bool = False
    """True if the last model was not solved within the time of an easy one."""
    large_overflow: bool = False
    """True if the last readout overflowed by a large excess."""
    yielded: bool = False
    """True if a round left the time to coop-offline and the bounding process."""
    final: bool = False
    """True if rounds may use all the time left."""
    gap: float = field(init=False)
    """Absolute gap to which models are solved, as a share of the base cost."""
    paths: PathCuts = field(init=False)

    def __post_init__(self) -> None:
        linked = self.program.host_link is not None
        self.gap = OPTIMALITY_TOLERANCE / 2 if linked else 5e-4
        self.paths = PathCuts(self.params.min_violation)
        if not self.points:
            every_op = linked and self.program.n <= 30
            count = self.program.n if every_op else self.params.first_points
            self.points = initial_points(self.program, self.capacity, count)

    def round(self) -> Readout | None:
        """Solve the model once and read its solution out; None if there is no solution."""
        while True:
            model = TimePointModel(self.program, self.capacity, self.points, self.cuts)
            answer = self._solve(model)
            if answer.values is None:
                return None
            try:
                residency = Residency.of(model, answer.values)
                return read_out(self.program, residency, self.capacity)
            except NotRecomputableError as error:
                if error.position in self.points:
                    return None
                self.points = sorted([*self.points, error.position])

    def _solve(self, model: TimePointModel) -> Answer:
        params = self.params
        # Shares of the time left for path cuts, the solve after them, and neighbourhoods.
        cuts, solve, lns = (0.25, 0.9, 0.5) if self.final else (0.12, 0.12, 0.05)
        if not (self.hard and self.large_overflow):
            easy = self._until(params.easy_share, params.easy_seconds)
            answer = self._attempt(model, easy)
            self.hard = answer.outcome in (Outcome.FEASIBLE, Outcome.UNKNOWN)
            coarse = len(self.points) <= self.program.n
            if (self.hard or coarse) and self._yields_to_bounding():
                return Answer(Outcome.UNKNOWN, -inf, inf, None)
        if self.hard:
            bound = self.paths.strengthen(self.process.relax, model, self._until(cuts))
            self._prove(model.bound_us(bound))
            answer = self._attempt(model, self._until(solve, 5.0))
        if answer.outcome is Outcome.INFEASIBLE:
            self.infeasible = self.proves
            if self.proves and self.incumbent.solution is not None:
                self.incumbent.discard_bounds("a solver calls a feasible model infeasible")
        self.timed_out = answer.outcome in (Outcome.FEASIBLE, Outcome.UNKNOWN)
        if self.timed_out and answer.values is not None:
            answer = improve_by_lns(self.process, model, answer, self._until(lns))
        return answer

    def _until(self, share: float, least: float = 0.0) -> float:
        """The end of a share of the time left, or of `least` seconds; never after the deadline."""
        now = time.monotonic()
        return min(self.deadline, now + max((self.deadline - now) * share, least))

    def _yields_to_bounding(self) -> bool:
        """Start the bounding process if there are transfers and a gap; True if the round ends.

        A round yields once, and only if there is a plan, as only coop-offline makes plans with
        transfers. On one processor the bounds come first.
        """
        bounding = self.bounding
        if bounding is None or self.yielded or not self.proves:
            return False
        if self.program.host_link is None or self.incumbent.gap <= 1e-3:
            return False
        bounding.begin(self.program, self.capacity, set(self.points[:-1]))
        if usable_cpus() == 1:
            until = self._until(0.3)
            while bounding.running and time.monotonic() < until:
                self._prove(bounding.proved(until))
            bounding.kill()
        self.yielded = self.incumbent.solution is not None
        return self.yielded

    def _attempt(self, model: TimePointModel, until: float) -> Answer:
        def report(progress: SolveProgress) -> None:
            if self.proves:
                self.incumbent.report(model.bound_us(progress.bound))

        answer = self.process.solve(model.milp, until, gap=self.gap * COST_SCALE, progress=report)
        if answer.outcome is not Outcome.INFEASIBLE:
            self._prove(model.bound_us(answer.bound))
        return answer

    def _prove(self, bound_us: float) -> None:
        if self.proves:
            self.incumbent.prove(bound_us)

    def refine(self, overflows: list[Overflow]) -> bool:
        """Add time points or cuts at the overflows of the last readout; False if none are new."""
        points, cuts = set(self.points), set(self.cuts)
        first = [overflow for overflow in overflows if overflow.position == overflow.op]
        self.large_overflow = any(o.excess > self.capacity for o in first)
        if self.large_overflow:
            chosen = self._one_per_segment(first)
        else:
            chosen = worst_of_groups(first or overflows, 4, key=lambda o: o.excess)
        for overflow in chosen:
            position, op = overflow.position, overflow.op
            if position == op or (position, op) in cuts:
                points.add(position)
            else:
                cuts.add((position, op))
        added = len(points) + len(cuts) > len(self.points) + len(self.cuts)
        self.points, self.cuts = sorted(points), cuts
        return added

    def _one_per_segment(self, first: list[Overflow]) -> list[Overflow]:
        """Of each segment the overflow with the largest working set, of equals the most central."""

        def fullness(overflow: Overflow) -> tuple[float, int]:
            share = round(self.program.working_set(overflow.position) / self.capacity, 2)
            low, high = segment_of(self.points, overflow.position)
            return share, -abs(2 * overflow.position - low - high)

        new = [overflow for overflow in first if overflow.position not in self.points]
        segments = groupby(new, key=lambda o: segment_of(self.points, o.position))
        chosen = [max(group, key=fullness) for _, group in segments]
        return sorted(chosen, key=lambda o: -o.excess)[:12]

    def tighten(self) -> bool:
        """Solve to a proof from the next round on; False if that was already so."""
        if self.gap <= OPTIMALITY_TOLERANCE / 2:
            return False
        self.gap = OPTIMALITY_TOLERANCE / 2
        return True
