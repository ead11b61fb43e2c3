"""Annealing of the sequence itself: the last phase of coop-offline and auto.

First runs may leave program order, as in OLLA (Steiner et al., 2022, section 3) and Moccasin
(Bartan et al., ICML 2023, section 2), unless the switch "reorder" is off.
"""

import contextlib
import math
from collections.abc import Callable

import numpy as np

from coop_plan.planner.core.arrays import Ints, to_program
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule
from coop_plan.planner.heuristic.portfolio import Portfolio
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.placement.layout import WORK, fit
from coop_plan.planner.search.annealing import Annealing
from coop_plan.planner.search.compute.metropolis import metropolis
from coop_plan.planner.search.compute.params import MoveParams
from coop_plan.planner.search.compute.sequence import (
    current_sequence,
    new_state,
    set_sequence,
)

MIN_SAVING = 1e-4
"""Least saving, as a share of the incumbent's cost, that is worth more time."""

START_DIVISOR = 3
"""Divisor of the steps of searches that start from a known schedule."""


def fixed_length(events: int, effort: float, divisor: int = 1) -> tuple[int, float]:
    """Steps of an annealing without a deadline, over `divisor`, and its initial temperature.

    A step's time grows with the square root of the events. So the steps times that root are at most
    `effort`. With fewer than 20 steps an event the annealing begins colder, since they would not
    undo the moves of a high temperature. It is in mean costs of an op.
    """
    least, most = min(28_000, 400 * events), int(effort / math.sqrt(events))
    steps = max(1, min(max(least, 25 * events), most) // divisor)
    return steps, 0.4 * min(1.0, steps / events / 20.0)


class SequenceAnnealing(Annealing):
    """Improves the incumbent of a portfolio, starting from `start`.

    With `few_repairs` of a candidate, as for small graphs: most there cannot be repaired at all. On
    larger graphs it would miss smaller arenas.
    """

    few_chunks = True

    def __init__(self, portfolio: Portfolio, start: Ints, *, few_repairs: bool = False) -> None:
        super().__init__(portfolio.problem, portfolio.request)
        self.portfolio = portfolio
        self.start = start
        max_events = 2 * start.size + 2000  # of a sequence
        self.program = to_program(portfolio.arrays)
        moves = MoveParams(max_repairs=3) if few_repairs else MoveParams()
        if "reorder" in portfolio.request.off:
            moves = moves._replace(first_run_chance=0.0)
        self.state = new_state(portfolio.problem, max_events, moves)

    @property
    def cost_us(self) -> float:
        return self.portfolio.best.cost_us

    def load(self, sequence: Ints) -> None:
        set_sequence(self.state, sequence)

    def stored(self) -> Ints:
        return current_sequence(self.state)

    def steps(self, count: int, temperature: float, penalty: float) -> tuple[float, float]:
        limit, seed = int(self.limit), int(self.random.integers(1 << 31))
        return metropolis(self.program, self.state, count, limit, temperature, penalty, seed)

    def place(self, sequence: Ints, work: int) -> bool:
        portfolio, arena = self.portfolio, self.request.arena_bytes
        found = portfolio.candidate_of(sequence)
        placement = fit(found.blocks, self.problem.alignment, arena, work=work)
        if placement.peak <= arena:
            portfolio.keep(found, placement.offsets)
        return placement.peak <= arena

    def report(self) -> None:
        self.portfolio.report(None)

    def run(
        self,
        enough: Callable[[], bool] = lambda: False,
        deadline: float | None = None,
        divisor: int = 1,
    ) -> None:
        """Anneal from `start` until the deadline or until `enough` returns True.

        Without a deadline the number of steps depends on the events alone, over `divisor`.
        """
        steps, temperature = 0, 0.4
        if deadline is None:
            events, effort = max(1, self.start.size), self.portfolio.params.annealing_effort
            steps, temperature = fixed_length(events, effort, divisor)
        self.anneal(self.start, steps, temperature, enough, deadline)

    def find_feasible(self) -> None:
        """Search, at zero temperature, for a sequence that fits, from one that does not."""
        self.load(self.start)
        penalty = 50.0 * self.problem.base_cost_us  # no cost matters before it fits
        steps, most_layouts, chunks = min(10_000, 100 * max(1, self.start.size)), 3, 20
        if self.request.larger is not None:
            steps, most_layouts = steps // START_DIVISOR, 1
        layouts = stalled = 0
        least_excess = math.inf
        for _ in range(chunks):
            _, excess = self.steps(-(-steps // chunks), 0.0, penalty)
            if excess == 0:
                layouts += 1
                if self.place(self.stored(), WORK) or layouts == most_layouts:
                    return
            stalled = 0 if excess < least_excess or excess == 0 else stalled + 1
            least_excess = min(least_excess, excess)
            if stalled == 6 or self.request.out_of_time():
                break
        self.portfolio.offer(self.portfolio.candidate_of(self.stored()))


def reordered(
    problem: Problem,
    sequence: Ints,
    cost_us: float,
    request: Request,
    bound_us: Callable[[], float] | None = None,
) -> PlacedSchedule | None:
    """A schedule of default variants in any order that costs less than `cost_us`; None if none is
    found.

    Starts from `sequence` and ends at the request's deadline, or if the cost reaches the lower
    bound `bound_us` (by default every op once). Returns None, too, if the sequence reruns an op
    that accesses overwritten tensors.
    """
    assert request.deadline is not None
    runs = np.bincount(sequence, minlength=problem.op_count)
    if any(problem.touches_overwritten(op) for op in np.flatnonzero(runs > 1).tolist()):
        return None
    portfolio = Portfolio(problem, request)
    portfolio.best.cost_us = cost_us
    bound = bound_us or (lambda: problem.work_us)
    search = SequenceAnnealing(portfolio, sequence)
    with contextlib.suppress(KeyboardInterrupt):  # returns the best so far
        search.run(lambda: search.cost_us * (1 - MIN_SAVING) <= bound(), request.deadline)
    return None if portfolio.best.found is None else portfolio.solution().placed


def cheaper(problem: Problem, found: Solution, other: PlacedSchedule | None) -> Solution:
    """The cheaper of a solution in program order and a schedule in any order."""
    if other is None or other.cost_us >= found.placed.cost_us:
        return found
    bound, model = found.lower_bound_us, found.bound_model
    if bound is not None and other.cost_us < bound:  # the bound holds for program order only
        bound, model = problem.floor_us, "any"
    return Solution(other, lower_bound_us=bound, bound_model=model)
