"""Rounds of the time-point model: solve, read out, look closer where that overflows."""

import time
from dataclasses import dataclass, field
from itertools import groupby

from coop_plan.planner.core.jit import usable_cpus
from coop_plan.planner.exact.dual.background import BoundingProcess
from coop_plan.planner.exact.incumbent import PROOF, Incumbent
from coop_plan.planner.exact.model.milp import INFINITY, Answer, Outcome
from coop_plan.planner.exact.model.paths import PathCuts
from coop_plan.planner.exact.model.points import initial_points, segment, worst_of_groups
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.timepoint import COST_SCALE, TimePointModel
from coop_plan.planner.exact.params import DEFAULTS, ExactParams
from coop_plan.planner.exact.primal.lns import improve_by_lns
from coop_plan.planner.exact.primal.readout import (
    Outline,
    Overflow,
    Readout,
    UnreadableError,
    read_out,
)
from coop_plan.planner.exact.solver.jobs import News
from coop_plan.planner.exact.solver.process import SolverProcess

NOTHING = Answer(Outcome.UNKNOWN, -INFINITY, INFINITY, None)
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
    cut_short: bool = False
    """Whether the last round ran out of its time."""
    hard: bool = False
    """Whether it took path cuts."""
    far: bool = False
    """Whether the last readout overflowed by a large excess."""
    gave_way: bool = False
    """Whether it left the time to others, as bounds are looked for in the background."""
    last: bool = False
    """Whether rounds may take all the time."""
    outline: Outline | None = None
    """What the last readout was made of; none if the last model had no solution in its time."""
    gap: float = field(init=False)
    """Share of the base cost to which models are solved."""
    paths: PathCuts = field(init=False)

    def __post_init__(self) -> None:
        linked = self.program.links is not None
        self.gap = PROOF / 2 if linked else self.params.refinement.first_gap
        self.paths = PathCuts(self.params.path_cuts)
        if not self.points:
            self.points = initial_points(self.program, self.capacity, self._first_points())

    def _first_points(self) -> int:
        params = self.params.refinement
        small = self.program.n <= params.all_points_ops
        return self.program.n if self.program.links and small else params.first_points

    def round(self) -> Readout | None:
        """Solve once; None when there is no solution to read, for want of time or because of it."""
        while True:
            model = TimePointModel(
                self.program, self.capacity, self.points, self.cuts, self.params.model
            )
            answer = self._solve(model)
            if answer.values is None:
                self.outline = None
                return None
            try:
                self.outline = Outline.of(model, answer.values)
                return read_out(self.program, self.outline, self.capacity)
            except UnreadableError as error:
                if error.position in self.points:
                    return None
                self.points = sorted([*self.points, error.position])

    def _solve(self, model: TimePointModel) -> Answer:
        now = time.monotonic()
        left = self.deadline - now
        params = self.params.refinement
        shares = params.last_shares if self.last else params.shares
        if not (self.hard and self.far):
            easy = now + max(left * params.easy_share, params.easy_seconds)
            answer = self._attempt(model, min(self.deadline, easy))
            self.hard = answer.outcome in (Outcome.FEASIBLE, Outcome.UNKNOWN)
            closer = self.program.links is not None and len(self.points) <= self.program.n
            if (self.hard or closer) and self._gives_way():
                return NOTHING
        if self.hard:
            bound = self.paths.strengthen(self.process.relax, model, now + left * shares.cuts)
            self._prove(bound * model.cost_unit)
            if self._gives_way():
                return NOTHING
            now = time.monotonic()
            left = self.deadline - now
            until = now + max(left * shares.solve, min(params.least_seconds, left))
            answer = self._attempt(model, until)
        if answer.outcome is Outcome.INFEASIBLE:
            self.infeasible = self.proves
            if self.proves and self.incumbent.solution is not None:
                self.incumbent.distrust("the solver calls a model infeasible that has a solution")
        self.cut_short = answer.outcome in (Outcome.FEASIBLE, Outcome.UNKNOWN)
        if self.cut_short and answer.values is not None:
            now = time.monotonic()
            until = now + (self.deadline - now) * shares.lns
            answer = improve_by_lns(self.process, model, answer, until, self.params.lns)
        return answer

    def _gives_way(self) -> bool:
        """
        Where the gap is wide, begin to look for better bounds in the background instead.

        Once there is a plan, and then once, the time is left to those who make it cheaper. With one
        processor only, bounds come before whatever is done meanwhile. As long as nothing is proved,
        the gap says nothing; but with transfers, nothing may well be all that there is to prove.
        """
        bounding, incumbent, params = self.bounding, self.incumbent, self.params.refinement
        if bounding is None or self.gave_way or not self.proves:
            return False
        known = incumbent.bound_us > incumbent.problem.base_cost_us
        wide = params.wide_gap
        if self.program.links is not None:
            known, wide = True, params.wide_gap_linked
        if not known or incumbent.gap <= wide:
            return False
        bounding.begin(self.program, self.capacity, set(self.points[:-1]))
        if usable_cpus() == 1:
            now = time.monotonic()
            until = now + (self.deadline - now) * params.alone_share
            while bounding.running and time.monotonic() < until:
                self._prove(bounding.proved(until))
            bounding.kill()
        self.gave_way = self.incumbent.solution is not None
        return self.gave_way

    def _attempt(self, model: TimePointModel, until: float) -> Answer:
        def tell(news: News) -> None:
            if self.proves:
                self.incumbent.report(
                    self.incumbent.problem.base_cost_us + news.bound * model.cost_unit
                )

        answer = self.process.solve(model.milp, until, gap=self.gap * COST_SCALE, progress=tell)
        if answer.outcome is not Outcome.INFEASIBLE:
            self._prove(answer.bound * model.cost_unit)
        return answer

    def _prove(self, recomputes_us: float) -> None:
        if self.proves:
            self.incumbent.prove(recomputes_us)

    def refine(self, overflows: list[Overflow]) -> bool:
        """Look closer where the last readout overflowed; false when nothing is left to add."""
        params = self.params.refinement
        points, cuts = set(self.points), set(self.cuts)
        first = [overflow for overflow in overflows if overflow.position == overflow.op]
        self.far = any(o.excess > params.large_excess * self.capacity for o in first)
        if self.far:
            looked_at = self._one_per_segment(first)
        else:
            among, count = first or overflows, params.points_at_once
            looked_at = worst_of_groups(among, count, key=lambda o: o.excess)
        for overflow in looked_at:
            position, op = overflow.position, overflow.op
            if position == op or (position, op) in cuts:
                points.add(position)
            else:
                cuts.add((position, op))
        grown = len(points) + len(cuts) > len(self.points) + len(self.cuts)
        self.points, self.cuts = sorted(points), cuts
        return grown

    def _one_per_segment(self, first: list[Overflow]) -> list[Overflow]:
        """In each segment where least fits beside the op, of equals the one in the middle."""

        def fullness(overflow: Overflow) -> tuple[float, int]:
            share = round(self.program.touched(overflow.position) / self.capacity, 2)
            low, high = segment(self.points, overflow.position)
            return share, -abs(2 * overflow.position - low - high)

        new = [overflow for overflow in first if overflow.position not in self.points]
        segments = groupby(new, key=lambda o: segment(self.points, o.position))
        chosen = [max(group, key=fullness) for _, group in segments]
        return sorted(chosen, key=lambda o: -o.excess)[: self.params.refinement.most_points]

    def tighten(self) -> bool:
        """Ask for a proof from the next round on; false when it was asked for already."""
        if self.gap <= PROOF / 2:
            return False
        self.gap = PROOF / 2
        return True
