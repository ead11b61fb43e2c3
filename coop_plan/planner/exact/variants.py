"""Choice of variants: the search over them, then other orders of first runs, and transfers.

With a link to the host, the search without it comes first. coop-offline then plans recomputes and
transfers of the variants that it chose, and each run's variant is re-selected in the best schedule.
Meanwhile a process proves bounds by the program of variants and transfers together.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from coop_plan.planner.core.errors import DoesNotFitError, TimeLimitError
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import NoScheduleError, PlacedSchedule, Schedule
from coop_plan.planner.exact.dual.background import BoundingProcess
from coop_plan.planner.exact.incumbent import OPTIMALITY_TOLERANCE, Incumbent
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.variants import fix_variants, restore_variants
from coop_plan.planner.exact.params import DEFAULTS
from coop_plan.planner.exact.primal.reselection import Reselection
from coop_plan.planner.exact.primal.variant_search import VariantSearch, solver_installed
from coop_plan.planner.heuristic.coop_offline import (
    CoopOffline,
    in_any_order,
    solve_coop_offline,
)
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.placement.layout import lay_out
from coop_plan.planner.search.compute.annealing import cheaper, reordered


def solve_with_variants(problem: Problem, request: Request, *, prove: bool) -> Solution:
    """Returns the cheapest schedule found with a variant per run; with `prove` also its bound.

    The bound is that of program order, with all variants and transfers that the problem offers.

    Raises:
        DoesNotFitError: no schedule was found.
    """
    if "transfers" in problem.beyond_recomputation:
        return _with_transfers(problem, request, prove=prove)
    return _recomputing(problem, request, prove=prove)


def _recomputing(problem: Problem, request: Request, *, prove: bool) -> Solution:
    """As `solve_with_variants`, without transfers.

    The search starts from coop-offline's schedule of default variants. First runs are in program
    order; the remaining time goes to other orders of the chosen runs. Without a time limit,
    coop-offline's schedule of default variants in any order is returned if it costs less.
    """
    end = request.deadline
    any_order = not (request.any_schedule or "reorder" in request.off)
    if any_order:
        request = request.part(0.9)
    search = VariantSearch(problem, request)
    incumbent = search.incumbent
    with contextlib.suppress(DoesNotFitError, TimeLimitError):
        first = request.in_program_order().part(0.1)
        incumbent.offer(solve_coop_offline(problem, first).placed)
    if not (request.any_schedule and incumbent.placed is not None):
        try:
            search.run(prove=prove and not request.any_schedule)
        except (DoesNotFitError, TimeLimitError):
            if incumbent.placed is None:
                raise
    assert incumbent.placed is not None
    solution = incumbent.answer() if prove else Solution(incumbent.placed)
    if not any_order:
        return solution
    if end is None:
        return cheaper(problem, solution, in_any_order(problem, request))
    return cheaper(
        problem, solution, _reordered(problem, replace(request, deadline=end), incumbent.placed)
    )


class _JointSearch:
    """Recomputes, transfers and variants together; `incumbent` has the cheapest schedule so far."""

    def __init__(self, problem: Problem, request: Request, bound_us: Callable[[], float]) -> None:
        self.problem, self.request, self.bound_us = problem, request, bound_us
        self.incumbent = Incumbent(problem, request.arena_bytes)
        self.error: DoesNotFitError | TimeLimitError = DoesNotFitError(-1)
        self._methods: dict[tuple[int, ...], CoopOffline] = {}
        """The method by assignment of one variant an op."""

    def run(self) -> PlacedSchedule:
        """Plan the default variants, those of the search without transfers, and the program's.

        Raises:
            DoesNotFitError: no schedule was found.
            TimeLimitError: none was found in time.
        """
        request = self.request
        self._plan(range(self.problem.op_count), 0.1)  # a share of the time left, as below
        if request.any_schedule and self.incumbent.placed is not None:
            return self.incumbent.placed
        with self._keeping_errors():
            unlinked = replace(self.problem, host_budget=0)
            found = _recomputing(unlinked, request.part(0.5), prove=False).placed
            every = range(len(self.problem.variants))
            self.incumbent.offer(restore_variants(self.problem, every, found))
            chosen = _first_variants(found.schedule)
            self._plan(chosen, 0.4, _ops(found.schedule))
        if request.any_schedule and self.incumbent.placed is not None:
            return self.incumbent.placed
        relaxed = self._relaxed()
        if relaxed is not None:
            self._plan(relaxed, 0.4)
        if self.incumbent.placed is None:
            raise self.error
        self._improve(request.part(0.9).deadline)
        self._reselect()
        return self.incumbent.placed

    def proved(self) -> bool:
        """True if the cost of the best schedule is within the tolerance of the bound."""
        return self.incumbent.cost_us <= self.bound_us() * (1 + OPTIMALITY_TOLERANCE)

    @contextlib.contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        try:
            yield
        except (DoesNotFitError, TimeLimitError) as error:
            self.error = error

    def _plan(
        self, chosen: Sequence[int], share: float, start: tuple[int, ...] | None = None
    ) -> None:
        """Plan the step of these variants by coop-offline, in a share of the time left."""
        key = tuple(chosen)
        if key in self._methods or self.proved() or self.request.out_of_time():
            return
        request = replace(self.request.part(share), progress=None, start=start)
        try:
            alone = fix_variants(self.problem, chosen)
        except NoScheduleError:  # a later run makes a tensor that the first one does not
            return
        with self._keeping_errors():
            method = CoopOffline(alone, request)
            method.begin()
            self._methods[key] = method
            self.incumbent.offer(restore_variants(self.problem, chosen, method.solution().placed))

    def _improve(self, end: float | None) -> None:
        """Improve the cheapest of the plans of one variant an op until then."""
        costs = dict[tuple[int, ...], float]()
        for chosen, method in self._methods.items():
            with contextlib.suppress(DoesNotFitError, TimeLimitError):
                costs[chosen] = method.solution().placed.cost_us
        if end is not None and costs:
            chosen = min(costs, key=costs.__getitem__)
            method = self._methods[chosen]
            method.improve(end, self.proved)
            self.incumbent.offer(restore_variants(self.problem, chosen, method.solution().placed))

    def _reselect(self) -> None:
        """Re-select the variant of each run of the best schedule."""
        best = self.incumbent.placed
        assert best is not None
        problem, arena = self.problem, self.request.arena_bytes
        reselection = Reselection(Program.of(problem, variants=True), problem.rounded(arena))
        better = reselection.improve(best.schedule, self.request.out_of_time)
        if better.cost_us < best.cost_us:
            self.incumbent.offer(lay_out(better, arena).placed)

    def _relaxed(self) -> list[int] | None:
        """The variants chosen by the relaxed program; None without a solver or a time limit."""
        if self.request.deadline is None or self.request.any_schedule or not solver_installed():
            return None
        return VariantSearch(self.problem, self.request).relaxed_choice()


def _with_transfers(problem: Problem, request: Request, *, prove: bool) -> Solution:
    """As `solve_with_variants`, with transfers."""
    if not prove or request.any_schedule:
        search = _JointSearch(problem, request, lambda: problem.floor_us)
        return Solution(search.run())
    if request.deadline is None:
        request = replace(request, deadline=time.monotonic() + DEFAULTS.default_seconds)
    with BoundingProcess() as bounding:
        program = Program.of(problem, variants=True)
        bounding.begin(program, program.problem.rounded(request.arena_bytes), set())
        incumbent = Incumbent(problem, request.arena_bytes)

        def bound_us() -> float:
            incumbent.prove(bounding.proved())
            return incumbent.bound_us

        placed = _JointSearch(problem, request, bound_us).run()
        bound = bound_us()
    if placed.cost_us < bound * (1 - OPTIMALITY_TOLERANCE):  # in another order of first runs
        return Solution(placed, "feasible", problem.floor_us, "any")
    incumbent.offer(placed)
    return incumbent.answer()


def _ops(schedule: Schedule) -> tuple[int, ...]:
    """The ops of a schedule's runs."""
    variants = schedule.problem.variants
    return tuple(variants[v].op for v in schedule.variants if v >= 0)


def _first_variants(schedule: Schedule) -> list[int]:
    """Per op the variant of its first run."""
    chosen: dict[int, int] = {}
    for v in schedule.variants:
        if v >= 0:
            chosen.setdefault(schedule.problem.variants[v].op, v)
    return [chosen[op] for op in range(schedule.problem.op_count)]


def _reordered(problem: Problem, request: Request, placed: PlacedSchedule) -> PlacedSchedule | None:
    """A cheaper schedule in any order, each op in the variant of its first run, or None."""
    variants = _first_variants(placed.schedule)
    sequence = np.array(_ops(placed.schedule), dtype=np.int64)
    try:
        alone = fix_variants(problem, variants)
        Schedule.of(alone, sequence)
    except NoScheduleError:  # a later run makes a tensor that the first one does not
        return None
    found = reordered(alone, sequence, placed.cost_us, request)
    return None if found is None else restore_variants(problem, variants, found)
