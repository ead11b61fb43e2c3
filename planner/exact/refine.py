"""Rounds of the time-point model: solve, read out, look closer where that overflows."""

import time
from dataclasses import dataclass, field

from planner.exact.incumbent import PROOF, Incumbent
from planner.exact.milp import Answer, Outcome
from planner.exact.points import initial_points
from planner.exact.polish import polish
from planner.exact.program import Program
from planner.exact.readout import Overflow, Readout, UnreadableError, read_out
from planner.exact.solving import News, SolverProcess
from planner.exact.timepoint import TimePointModel

COST_SCALE = 1e4
"""Costs are scaled so that the base cost is this much: far from a solver's tolerances."""

SOLVER_TOLERANCE = 1e-7
"""Share of the base cost that a bound gives away, as solvers compute in floating point."""

FIRST_GAP = 5e-4
"""Share of the base cost to which models are solved until a solution fits."""

FIRST_POINTS = 3
"""Time points to begin with. More make the linear relaxation weaker, and the model larger."""

ROUND_SHARE = 0.5
"""Share of the time left that one round may take."""

POLISH_SHARE = 0.2
"""Share of the time left for improving the solution of a round that took all of its own."""


@dataclass
class Refinement:
    """
    The rounds at one capacity (bytes, see `Program.capacity`).

    Only at the incumbent's own capacity do bounds count (`proves`); a smaller one is a way to
    plans that are easier to place.
    """

    program: Program
    process: SolverProcess
    incumbent: Incumbent
    capacity: int
    deadline: float
    proves: bool = True
    gap: float = FIRST_GAP
    points: list[int] = field(default_factory=list)
    cuts: set[tuple[int, int]] = field(default_factory=set)
    infeasible: bool = False
    """Whether it was proved that no schedule exists."""
    cut_short: bool = False
    """Whether the last round ran out of its time."""

    def __post_init__(self) -> None:
        if not self.points:
            self.points = initial_points(self.program, self.capacity, FIRST_POINTS)

    def round(self) -> Readout | None:
        """Solve once; None when there is no solution to read, for want of time or because of it."""
        unit = self.incumbent.problem.base_cost_us / COST_SCALE or 1.0
        while True:
            model = TimePointModel(self.program, self.capacity, self.points, self.cuts, unit)
            answer = self._solve(model, unit)
            if answer.values is None:
                return None
            try:
                return read_out(model, answer.values)
            except UnreadableError as error:
                if error.position is None or error.position in self.points:
                    return None
                self.points = sorted([*self.points, error.position])

    def _solve(self, model: TimePointModel, unit: float) -> Answer:
        base = self.incumbent.problem.base_cost_us

        def tell(news: News) -> None:
            if self.proves:
                self.incumbent.report(base + news.bound * unit)

        now = time.monotonic()
        until = now + max((self.deadline - now) * ROUND_SHARE, min(5.0, self.deadline - now))
        answer = self.process.solve(model.milp, until, gap=self.gap * COST_SCALE, progress=tell)
        if answer.outcome is Outcome.INFEASIBLE:
            self.infeasible = self.proves
            if self.proves and self.incumbent.solution is not None:
                self.incumbent.distrust("the solver calls a model infeasible that has a solution")
        elif self.proves:
            self.incumbent.raise_bound(base * (1 - SOLVER_TOLERANCE) + answer.bound * unit)
        self.cut_short = answer.outcome in (Outcome.FEASIBLE, Outcome.UNKNOWN)
        if self.cut_short and answer.values is not None:
            now = time.monotonic()
            until = now + (self.deadline - now) * POLISH_SHARE
            answer = polish(self.process, model, answer, until)
        return answer

    def refine(self, overflows: list[Overflow]) -> bool:
        """Look closer at the worst overflow of each segment; false when nothing is left to add."""
        points, cuts = set(self.points), set(self.cuts)
        worst: dict[int, Overflow] = {}
        for overflow in overflows:
            segment = next(point for point in self.points if point >= overflow.position)
            if segment not in worst or overflow.excess > worst[segment].excess:
                worst[segment] = overflow
        for overflow in worst.values():
            position, op = overflow.position, overflow.op
            if position == op or (position, op) in cuts:
                points.add(position)
            if position != op:
                cuts.add((position, op))
        grown = len(points) + len(cuts) > len(self.points) + len(self.cuts)
        self.points, self.cuts = sorted(points), cuts
        return grown

    def tighten(self) -> bool:
        """Ask for a proof from the next round on; false when it was asked for already."""
        if self.gap <= PROOF / 2:
            return False
        self.gap = PROOF / 2
        return True
