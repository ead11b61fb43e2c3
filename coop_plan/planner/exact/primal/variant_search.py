"""Search for a schedule with its variants: start assignments, then large neighbourhood search.

A start assigns one variant per op: the cheapest one below a share of the arena, or the choice of
the relaxed program (`planner.exact.model.timepoint`). coop-offline plans the step of these
variants alone. Without a time limit all work is counted, so that a seed determines the plan. Small
steps, and installations without OR-Tools, then exchange single variants of the best start by hill
climbing.

Otherwise, from the cheapest schedule on, a neighbourhood of the program is solved (Shaw, Using
constraint programming and local search methods to solve vehicle routing problems, CP 1998). Its
solution is read out, each run's variant is re-selected, and the program is refined where the
readout overflows. A
schedule counts once it has a layout.
"""

import contextlib
import importlib.util
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from coop_plan.planner.core.errors import DoesNotFitError, TimeLimitError
from coop_plan.planner.core.memory_bounds import (
    resident_output_bytes,
    working_set_bound,
    working_sets,
)
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import NoScheduleError, Schedule
from coop_plan.planner.exact.incumbent import Incumbent
from coop_plan.planner.exact.model.milp import Answer, Milp, Outcome
from coop_plan.planner.exact.model.point_selection import worst_of_groups
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.timepoint import TimePointModel
from coop_plan.planner.exact.model.variants import fix_variants, restore_variants
from coop_plan.planner.exact.primal.lns import (
    RELATIVE_GAP,
    STEP_SECONDS,
    Neighbourhoods,
)
from coop_plan.planner.exact.primal.readout import (
    NotRecomputableError,
    Overflow,
    Residency,
    read_out,
)
from coop_plan.planner.exact.primal.reselection import Reselection
from coop_plan.planner.exact.primal.warm_start import warm_start
from coop_plan.planner.exact.solver.process import SolverProcess
from coop_plan.planner.heuristic.coop_offline import CoopOffline
from coop_plan.planner.method import Request
from coop_plan.planner.placement.layout import lay_out

SMALL_OPS = 60
"""Up to this many ops every op is a time point; programs are solved with a limit only."""


def solver_installed() -> bool:
    """True if the solver of the programs is installed."""
    return importlib.util.find_spec("ortools") is not None


class VariantSearch:
    """One search for one request; its schedules have no transfers.

    `incumbent` has the cheapest schedule with a layout, and the bound of program order.
    """

    def __init__(self, problem: Problem, request: Request) -> None:
        self.problem, self.request = problem, request
        self.program = Program.of(problem, variants=True)
        self.capacity = problem.rounded(request.arena_bytes)
        self.incumbent = Incumbent(problem, request.arena_bytes, request.progress)
        self._failed_layouts = 0
        self._timed = request.deadline is not None
        self._solved_exactly = False  # every op a time point: nothing left to refine
        self._working_set = working_sets(problem).first
        self._room = [self.capacity - held for held in resident_output_bytes(problem)]
        # Few time points at first, as a program solved to optimality bounds better.
        self.points = self._first_points(12)
        self.cuts = frozenset[tuple[int, int]]()

    def _first_points(self, count: int) -> list[int]:
        """The op with the largest working set of each of `count` groups of ops over capacity."""
        variants = self.problem.variants
        if self.program.n <= SMALL_OPS:
            return list(range(self.program.n + 1))
        smallest = [self._smallest(numbers) for numbers in self.program.choices]
        cheapest = self._consistent([numbers[0] for numbers in self.program.choices])
        live = Schedule.of(self.problem, cheapest).live_bytes().tolist()
        over = [
            op
            for op, used in enumerate(live)
            if used - self.problem.rounded(variants[cheapest[op]].workspace_bytes) > self.capacity
        ]
        chosen = worst_of_groups(over, count, key=lambda op: self._working_set[smallest[op]])
        return [*chosen, self.program.n]

    # Start assignments: one variant per op.

    def _consistent(self, preferred: list[int]) -> list[int]:
        """The preferred variants, except those that do not fit or whose inputs are not made.

        If the default variant of an op lacks an input, the producer must make it in another pass.
        Default variants make all inputs of default variants and all outputs, so passes end.
        """
        program = self.program
        wanted = set(program.read_by_all[program.n])
        while True:
            made, chosen = set[int](), list[int]()
            before = len(wanted)
            for op, variant in enumerate(preferred):
                needed = wanted.intersection(program.makes[op])
                found = [
                    v
                    for v in program.choices[op]
                    if made.issuperset(program.reads[v]) and needed.issubset(program.makes[v])
                ]
                if not found:
                    found = [op]
                    wanted.update(set(program.reads[op]) - made)
                fit = [v for v in found if self._working_set[v] <= self._room[op]]
                fit = fit or [self._smallest(found)]
                chosen.append(variant if variant in fit else fit[0])
                made.update(program.makes[chosen[-1]])
            if len(wanted) == before:
                return chosen

    def _rule_starts(self) -> Iterator[list[int]]:
        """Starts by rule, those that fit most often first."""
        choices = self.program.choices
        yield self._consistent([self._smallest(variants) for variants in choices])
        yield self._no_larger(0.5)
        yield self._consistent([min(variants, key=self._tensor_bytes) for variants in choices])
        yield self._no_larger(1.0)
        yield self._no_larger(0.25)

    def _no_larger(self, share: float) -> list[int]:
        """The cheapest variants whose working set is at most this share of their room."""
        preferred = []
        for variants, room in zip(self.program.choices, self._room, strict=True):
            fit = (v for v in variants if self._working_set[v] <= share * room)
            preferred.append(next(fit, self._smallest(variants)))
        return self._consistent(preferred)

    def _smallest(self, variants: Sequence[int]) -> int:
        return min(variants, key=self._working_set.__getitem__)

    def _tensor_bytes(self, variant: int) -> int:
        """Bytes of the tensors that a variant reads and makes."""
        form = self.problem.variants[variant]
        return sum(self.problem.size[t] for t in form.reads + form.makes)

    def _relaxation_start(
        self, process: SolverProcess, model: TimePointModel
    ) -> Iterator[list[int]]:
        """The start chosen by the linear relaxation of the program, whose bound counts, too."""
        relaxed = replace(model.milp, integer=[False] * len(model.milp.integer))
        answer = process.solve(relaxed, self._until(inf))
        if answer.outcome is Outcome.OPTIMAL:
            self.incumbent.prove(model.bound_us(answer.bound))
        if answer.values is not None:
            yield self._consistent(model.chosen(answer.values))

    def relaxed_choice(self) -> list[int] | None:
        """The start chosen by the linear relaxation, transfers included; None without a result."""
        with SolverProcess() as process:
            return next(self._relaxation_start(process, self._model(self.capacity)), None)

    def _plan_start(self, chosen: list[int]) -> None:
        """Plan the step of these variants alone by coop-offline, and offer the schedule."""
        request = self.request.in_program_order()
        request = replace(request, progress=None, any_schedule=True)
        method = CoopOffline(fix_variants(self.problem, chosen), request)
        with contextlib.suppress(DoesNotFitError, TimeLimitError):
            method.begin()
            self.incumbent.offer(restore_variants(self.problem, chosen, method.solution().placed))

    def _reselected(self, runs: list[int], capacity: int) -> Schedule | None:
        """Re-select the variants of runs; None if the runs are no schedule."""
        try:
            schedule = Schedule.of(self.program.problem, runs)
            return Reselection(self.program, capacity).improve(schedule, self.request.out_of_time)
        except NoScheduleError:
            return None

    def _place(self, schedule: Schedule) -> bool:
        """Keep a schedule of the program that fits if it is cheaper and has a layout."""
        arena = self.request.arena_bytes
        if schedule.cost_us >= self.incumbent.cost_us - 1e-6 or not schedule.fits(arena):
            return False
        placed = lay_out(schedule, arena).placed
        return self.incumbent.offer(self.program.versions.placed_to_original(placed))

    def _hill_climb(self, chosen: list[int]) -> None:
        """Exchange single variants, with the producers of their inputs, while that improves."""
        changes = [v for variants in self.program.choices if len(variants) > 1 for v in variants]
        attempts = unchanged = 0
        for variant in itertools.cycle(changes):
            if attempts >= 24 or unchanged >= len(changes) or self._done():
                break
            unchanged += 1
            other = self._exchange(chosen, variant)
            if other != chosen:
                attempts += 1
                before = self.incumbent.cost_us
                self._plan_start(other)
                if self.incumbent.cost_us < before:
                    chosen, unchanged = other, 0
                    if self.request.any_schedule:
                        return
        self._reselect_variants()

    def _exchange(self, chosen: list[int], variant: int) -> list[int]:
        """The assignment with another variant, and with producers of its inputs."""
        preferred, stack = list(chosen), [variant]
        while stack:
            v = stack.pop()
            preferred[self.problem.variants[v].op] = v
            for t in self.program.reads[v]:
                maker = self.program.problem.producer[t]
                if t not in self.program.makes[preferred[maker]]:
                    makers = self.program.choices[maker]
                    stack += [m for m in makers if t in self.program.makes[m]][:1]
        return self._consistent(preferred)

    # Search by the program.

    def _until(self, seconds: float) -> float:
        deadline = self.request.deadline
        if deadline is None:
            return time.monotonic() + 1e6  # no limit: work is counted instead
        return min(time.monotonic() + seconds, deadline)

    def run(self, *, prove: bool = False) -> None:
        """Search until the deadline or the work limit; with `prove`, raise the bound first.

        Raises:
            DoesNotFitError: no schedule was found.
        """
        if working_set_bound(self.problem).bytes > self.capacity:
            raise DoesNotFitError(working_set_bound(self.problem).op)
        any_schedule = self.request.any_schedule
        solver = solver_installed()
        if not self._timed and (any_schedule or self.program.n <= SMALL_OPS):
            solver = False
        best = list(range(self.program.n))
        if any_schedule or not solver:  # starting a solver process takes longer
            rules = self._rule_starts()
            if any_schedule:
                rules = itertools.islice(rules, 3)
            best = self._run_starts(rules)
        if not (self.incumbent.proved or (any_schedule and self.incumbent.placed is not None)):
            if solver:
                with SolverProcess(grace_seconds=0.8) as process:
                    self._run_with_solver(process, prove)
            elif not any_schedule or self.program.n <= SMALL_OPS:
                self._hill_climb(best)
        if self.incumbent.placed is None:
            raise DoesNotFitError(working_set_bound(self.problem).op)

    def _run_starts(self, starts: Iterator[list[int]]) -> list[int]:
        """Plan each start, then re-select variants in the best schedule; returns its start."""
        seen: list[list[int]] = []
        best = list(range(self.program.n))
        for chosen in starts:
            before = self.incumbent.cost_us
            if chosen not in seen:
                seen.append(chosen)
                self._plan_start(chosen)
            if self.incumbent.placed is None or self.incumbent.cost_us < before:
                best = chosen
            if self.request.any_schedule and self.incumbent.placed is not None:
                return best
        self._reselect_variants()
        return best

    def _reselect_variants(self) -> None:
        if self.incumbent.placed is not None:
            better = self._reselected(self.incumbent.placed.schedule.what.tolist(), self.capacity)
            if better is not None:
                self._place(better)

    def _run_with_solver(self, process: SolverProcess, prove: bool) -> None:
        model = self._model(self.capacity)
        self._run_starts(self._relaxation_start(process, model))
        if self.request.any_schedule and self.incumbent.placed is not None:
            return
        self._run_starts(self._rule_starts())
        small = self.program.n <= SMALL_OPS
        # Without a time limit a large program may take minutes to prove that nothing fits.
        if prove or small or self._timed:
            self._refine(process, model, until_placed=not (prove or small))
        self._search(process)

    def _model(self, capacity: int, *, ordered: bool = False) -> TimePointModel:
        deadline = self.request.deadline
        return TimePointModel(
            self.program, capacity, self.points, self.cuts, ordered=ordered, deadline=deadline
        )

    def _is_current(self, model: TimePointModel, capacity: int) -> bool:
        """True if a model has this capacity (bytes) and all time points and cuts found so far."""
        return (model.points, model.cuts, model.capacity) == (self.points, self.cuts, capacity)

    def _refine(self, process: SolverProcess, model: TimePointModel, *, until_placed: bool) -> None:
        """Solve the whole program and refine it while its solutions overflow.

        With a deadline this takes a share of the time left, repeated until there is a schedule.
        """
        until, tight = self._time_share(0.4), False
        while not self._done():
            found = self.incumbent.placed is not None
            if not found:
                until = self._time_share(0.4)
            elif until_placed or time.monotonic() >= until:
                return
            gap = RELATIVE_GAP
            if found and self._timed and not tight:
                gap = max(gap, 0.2 * self.incumbent.gap)
            each = self._time_share(0.2) if found else until
            ended = self._solve(process, model, min(until, each), gap)
            if self.incumbent.placed is not None and not (ended and self._timed):
                return
            if self._is_current(model, self.capacity):
                if tight or gap <= RELATIVE_GAP:
                    return
                tight = True
            else:
                model = self._model(self.capacity)

    def _time_share(self, share: float) -> float:
        """The `time.monotonic` value at which this share of the time left has passed."""
        now = time.monotonic()
        return now + (self._until(inf) - now) * share

    def _solve(
        self, process: SolverProcess, model: TimePointModel, until: float, gap: float
    ) -> bool:
        """Solve the program, raise the bound, read the solution out; True if it is optimal."""
        exact = self.program.n <= SMALL_OPS
        answer = self._answer(process, model.milp, until, 0.0 if exact else gap)
        self.incumbent.prove(model.bound_us(answer.bound))
        ended = answer.outcome is Outcome.OPTIMAL
        values = answer.values
        if values is not None and not self._read_schedule(model, values, self.capacity):
            self._plan_start(self._consistent(model.chosen(values)))
        self._solved_exactly |= exact and ended and self._is_current(model, self.capacity)
        return ended

    def _answer(self, process: SolverProcess, milp: Milp, until: float, gap: float) -> Answer:
        """Solve a program by then; without a time limit, within 20 nodes."""
        nodes = 0 if self._timed else 20
        return process.solve(milp, until, relative_gap=gap, nodes=nodes)

    def _read_schedule(self, model: TimePointModel, values: list[float], capacity: int) -> bool:
        """Read out, re-select and place a solution; refine the program if the readout overflows."""
        rounded = self.problem.rounded(capacity)
        try:
            readout = read_out(self.program, Residency.of(model, values), rounded)
        except (NoScheduleError, NotRecomputableError):
            return False
        schedule = readout.schedule
        if schedule.cost_us < self.incumbent.cost_us and readout.overflows:
            # Refine by the readout as it is: re-selection may hide, at a cost, memory that the
            # program ignores.
            self._refine_model(readout.overflows)
        better = self._reselected(schedule.variants, capacity)
        least = self.incumbent.cost_us - 1e-6
        if better is None or better.cost_us >= least or not better.fits(capacity):
            return False
        kept = self._place(better)
        self._failed_layouts = max(0, self._failed_layouts + (-1 if kept else 1))
        return kept

    def _refine_model(self, overflows: list[Overflow]) -> None:
        """Add time points, or cuts of recomputes, at the overflows of a readout."""
        new, again = dict[int, int](), dict[tuple[int, int], int]()
        for o in overflows:
            if o.op != o.position:
                again[o.position, o.op] = max(o.excess, again.get((o.position, o.op), 0))
            elif o.op not in self.points:
                new[o.op] = o.excess
        count = 4  # time points, or cuts, of a round
        if not new:
            cuts = {pair: excess for pair, excess in again.items() if pair not in self.cuts}
            self.cuts |= {*sorted(cuts, key=lambda p: cuts[p])[-count:]}
            for position, op in again.keys() - cuts.keys():
                # H ignores tensors kept only for first runs later in the segment; a new time point
                # makes them residents.
                point = position if position not in self.points else position - 1
                if point >= 0 and point not in self.points:
                    new[point] = max(again[position, op], new.get(point, 0))
        if len(self.points) < 90:  # a larger program is hardly solved
            self.points = sorted({*self.points, *sorted(new, key=lambda op: new[op])[-count:]})

    def _promising(self, model: TimePointModel, answer: Answer) -> list[float] | None:
        """Values of a solution that may improve the best schedule after re-selection."""
        limit = self.incumbent.cost_us * 1.01
        return answer.values if model.bound_us(answer.objective) <= limit else None

    def _search(self, process: SolverProcess) -> None:
        """Solve neighbourhoods of the best schedule until the deadline or the work limit."""
        self.points = sorted({*self.points, *self._first_points(30)})
        neighbourhoods = Neighbourhoods(self.request.seed)
        model = None
        for count in itertools.count():
            best = self.incumbent.placed
            if best is None or self._done():
                return
            if not self._timed and count >= 8:
                return
            margin = min(0.04, 0.002 * self._failed_layouts)  # a share that is left free
            capacity = int(self.capacity * (1 - margin))
            if model is None or not self._is_current(model, capacity):
                model = self._model(capacity, ordered=True)
            values = warm_start(model, self.program.versions.of_original(best.schedule))
            part = neighbourhoods.next(model, values)
            answer = self._answer(process, part, self._until(STEP_SECONDS), RELATIVE_GAP)
            neighbourhoods.adapt(answer.outcome)
            found = self._promising(model, answer)
            if found is not None:
                self._read_schedule(model, found, capacity)

    def _done(self) -> bool:
        return self.incumbent.proved or self._solved_exactly or self.request.out_of_time()
