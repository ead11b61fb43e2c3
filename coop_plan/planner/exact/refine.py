"""Rounds of the time-point model: solve, read out, look closer where that overflows."""

import time
from dataclasses import dataclass, field
from itertools import groupby

from coop_plan.planner.core.cpu_count import processors
from coop_plan.planner.exact.dual.background import BoundingProcess
from coop_plan.planner.exact.incumbent import OPTIMALITY_TOLERANCE, Incumbent
from coop_plan.planner.exact.model.milp import INFINITY, Answer, Outcome
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

NO_RESULT = Answer(Outcome.UNKNOWN, -INFINITY, INFINITY, None)
"""What is known of a model that was given up."""


@dataclass
class Refinement:
    """
    The rounds at one capacity (bytes, see `Program.capacity`).

    Only at the incumbent's own capacity do bounds count (`proves`); a smaller one is a way to
    plans that are easier to place. `bounding`, if given, begins with a hard model at a wide gap.
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
    """Whether it was proved that no schedule exists."""
    timed_out: bool = False
    """Whether the last round ran out of its time."""
    hard: bool = False
    """Whether it took path cuts."""
    large_overflow: bool = False
    """Whether the last readout overflowed by a large excess."""
    yielded: bool = False
    """Whether it left the time to others, as bounds are looked for in the background."""
    final: bool = False
    """Whether rounds may take all the time."""
    residency: Residency | None = None
    """What the last readout was made of; none if the last model had no solution in its time."""
    gap: float = field(init=False)
    """Share of the base cost to which models are solved."""
    paths: PathCuts = field(init=False)

    def __post_init__(self) -> None:
        linked = self.program.host_link is not None
        self.gap = OPTIMALITY_TOLERANCE / 2 if linked else self.params.refinement.first_gap
        self.paths = PathCuts(self.params.path_cuts)
        if not self.points:
            self.points = initial_points(self.program, self.capacity, self._first_points())

    def _first_points(self) -> int:
        params = self.params.refinement
        small = self.program.n <= params.all_points_ops
        return self.program.n if self.program.host_link and small else params.first_points

    def round(self) -> Readout | None:
        """Solve once; None when there is no solution to read, for want of time or because of it."""
        while True:
            model = TimePointModel(
                self.program, self.capacity, self.points, self.cuts, self.params.model
            )
            answer = self._solve(model)
            if answer.values is None:
                self.residency = None
                return None
            try:
                self.residency = Residency.of(model, answer.values)
                return read_out(self.program, self.residency, self.capacity)
            except NotRecomputableError as error:
                if error.position in self.points:
                    return None
                self.points = sorted([*self.points, error.position])

    def _solve(self, model: TimePointModel) -> Answer:
        now = time.monotonic()
        remaining = self.deadline - now
        params = self.params.refinement
        shares = params.final_shares if self.final else params.shares
        if not (self.hard and self.large_overflow):
            easy = now + max(remaining * params.easy_share, params.easy_seconds)
            answer = self._attempt(model, min(self.deadline, easy))
            self.hard = answer.outcome in (Outcome.FEASIBLE, Outcome.UNKNOWN)
            closer = self.program.host_link is not None and len(self.points) <= self.program.n
            if (self.hard or closer) and self._yields_to_bounding():
                return NO_RESULT
        if self.hard:
            bound = self.paths.strengthen(self.process.relax, model, now + remaining * shares.cuts)
            self._prove(bound * model.cost_unit)
            if self._yields_to_bounding():
                return NO_RESULT
            now = time.monotonic()
            remaining = self.deadline - now
            until = now + max(remaining * shares.solve, min(params.min_solve_seconds, remaining))
            answer = self._attempt(model, until)
        if answer.outcome is Outcome.INFEASIBLE:
            self.infeasible = self.proves
            if self.proves and self.incumbent.solution is not None:
                self.incumbent.discard_bounds(
                    "the solver calls a model infeasible that has a solution"
                )
        self.timed_out = answer.outcome in (Outcome.FEASIBLE, Outcome.UNKNOWN)
        if self.timed_out and answer.values is not None:
            now = time.monotonic()
            until = now + (self.deadline - now) * shares.lns
            answer = improve_by_lns(self.process, model, answer, until, self.params.lns)
        return answer

    def _yields_to_bounding(self) -> bool:
        """
        Where the gap is wide, begin to look for better bounds in the background instead.

        Once there is a plan, and then once, the time is left to those who make it cheaper. With one
        processor only, bounds come before whatever is done meanwhile. As long as nothing is proved,
        the gap says nothing; but with transfers, nothing may well be all that there is to prove.
        """
        bounding, incumbent, params = self.bounding, self.incumbent, self.params.refinement
        if bounding is None or self.yielded or not self.proves:
            return False
        proved = incumbent.bound_us > incumbent.problem.base_cost_us
        wide = params.wide_gap
        if self.program.host_link is not None:
            proved, wide = True, params.wide_gap_transfers
        if not proved or incumbent.gap <= wide:
            return False
        bounding.begin(self.program, self.capacity, set(self.points[:-1]))
        if processors() == 1:
            now = time.monotonic()
            until = now + (self.deadline - now) * params.single_core_share
            while bounding.running and time.monotonic() < until:
                self._prove(bounding.proved(until))
            bounding.kill()
        self.yielded = self.incumbent.solution is not None
        return self.yielded

    def _attempt(self, model: TimePointModel, until: float) -> Answer:
        def report(progress: SolveProgress) -> None:
            if self.proves:
                self.incumbent.report(
                    self.incumbent.problem.base_cost_us + progress.bound * model.cost_unit
                )

        answer = self.process.solve(model.milp, until, gap=self.gap * COST_SCALE, progress=report)
        if answer.outcome is not Outcome.INFEASIBLE:
            self._prove(answer.bound * model.cost_unit)
        return answer

    def _prove(self, recompute_us: float) -> None:
        if self.proves:
            self.incumbent.prove(recompute_us)

    def refine(self, overflows: list[Overflow]) -> bool:
        """Look closer where the last readout overflowed; false when nothing is left to add."""
        params = self.params.refinement
        points, cuts = set(self.points), set(self.cuts)
        first = [overflow for overflow in overflows if overflow.position == overflow.op]
        self.large_overflow = any(o.excess > params.large_overflow * self.capacity for o in first)
        if self.large_overflow:
            chosen = self._one_per_segment(first)
        else:
            among, count = first or overflows, params.points_per_round
            chosen = worst_of_groups(among, count, key=lambda o: o.excess)
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
        """In each segment where least fits beside the op, of equals the one in the middle."""

        def fullness(overflow: Overflow) -> tuple[float, int]:
            share = round(self.program.working_set(overflow.position) / self.capacity, 2)
            low, high = segment_of(self.points, overflow.position)
            return share, -abs(2 * overflow.position - low - high)

        new = [overflow for overflow in first if overflow.position not in self.points]
        segments = groupby(new, key=lambda o: segment_of(self.points, o.position))
        chosen = [max(group, key=fullness) for _, group in segments]
        return sorted(chosen, key=lambda o: -o.excess)[: self.params.refinement.max_points]

    def tighten(self) -> bool:
        """Ask for a proof from the next round on; false when it was asked for already."""
        if self.gap <= OPTIMALITY_TOLERANCE / 2:
            return False
        self.gap = OPTIMALITY_TOLERANCE / 2
        return True
