"""
The search for a schedule with its variants: starts, then large neighbourhoods of the program.

A start is one variant per op: the cheapest that is no larger than some share of the arena, and what
the relaxed program (`planner.exact.model.variant_timepoint`) says. coop-offline plans the step of those variants
alone. Without a time limit all work is counted, so that a seed is a plan; small steps, and those
without OR-Tools, then have single variants of the best start exchanged in place of programs. From the
cheapest such schedule on, a stretch of the program at a time is set free and solved (Shaw, Using
constraint programming and local search methods to solve vehicle routing problems, CP 1998); what
comes out is read at every event, each run gets the variant that fits it there, and where that is too
full the program looks closer. With a time limit the best that is too full is led to one that fits
before that. A schedule counts once it has a layout.
"""

import contextlib
import importlib.util
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from coop_plan.planner.core.errors import DoesNotFitError, TimeLimitError
from coop_plan.planner.core.memory_bounds import resident_output_bytes
from coop_plan.planner.core.memory_bounds import working_set_bound, working_sets
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import NoScheduleError, PlacedSchedule, Schedule
from coop_plan.planner.exact.incumbent import PROOF, SOLVER_TOLERANCE
from coop_plan.planner.exact.model.milp import INFINITY, Answer, Outcome
from coop_plan.planner.exact.model.points import worst_of_groups
from coop_plan.planner.exact.params import DEFAULTS as EXACT
from coop_plan.planner.exact.solver.process import SolverProcess
from coop_plan.planner.placement.layout import WORK, lay_out
from coop_plan.planner.method import Progress, Request
from coop_plan.planner.heuristic.coop_offline import CoopOffline
from coop_plan.planner.exact.model.variant_choices import Choices
from coop_plan.planner.exact.primal.warm_start import lifted
from coop_plan.planner.exact.model.variant_timepoint import VariantModel
from coop_plan.planner.exact.primal.variant_lns import Neighbourhoods, too_full
from coop_plan.planner.exact.variant_params import DEFAULTS, VariantParams
from coop_plan.planner.exact.primal.variant_readout import Rebody, read_out
from coop_plan.planner.exact.model.fix_variants import carried_back, restricted

FOREVER = 1e6
"""Seconds; where there is no time limit, work is counted."""


class VariantSearch:
    """
    One search on one request.

    `placed` is the cheapest schedule that has a layout, None without any, `bound_us` what is proved
    of all schedules in program order, µs.
    """

    def __init__(
        self, problem: Problem, request: Request, params: VariantParams = DEFAULTS
    ) -> None:
        self.problem, self.request, self.params = problem, request, params
        self.choices = Choices.of_problem(problem)
        self.capacity = problem.rounded(request.arena_bytes)
        self.placed: PlacedSchedule | None = None
        self.bound_us = problem.floor_us
        self._failed = 0
        self._timed = request.deadline is not None
        self._solved = False  # with every op as a time point: neighbourhoods find no better
        # An op that overwrites a tensor in the arena is followed by no program and no exchange.
        self._plain = not any(problem.overwritten)
        self._need = working_sets(problem).first
        self._room = [self.capacity - held for held in resident_output_bytes(problem)]
        self.points = self._first_points(params.bound_points)
        self.cuts = frozenset[tuple[int, int]]()
        self._too_full: Schedule | None = None

    @property
    def cost_us(self) -> float:
        """The cost of the best schedule, infinite without one."""
        return INFINITY if self.placed is None else self.placed.cost_us

    def _first_points(self, count: int) -> list[int]:
        """Of so many groups of the ops that are too full with everything kept, the worst."""
        if self.choices.n <= self.params.small_ops:
            return list(range(self.choices.n + 1))
        least = [self._leanest(variants) for variants in self.choices.of]
        cheapest = self._consistent([variants[0] for variants in self.choices.of])
        live = Schedule.of(self.problem, cheapest).live_bytes().tolist()
        scratch = self.problem.variants
        over = [
            op
            for op, used in enumerate(live)
            if used - self.problem.rounded(scratch[cheapest[op]].workspace_bytes) > self.capacity
        ]
        chosen = worst_of_groups(over, count, key=lambda op: self._need[least[op]])
        return [*chosen, self.choices.n]

    # Starts: one variant per op.

    def _consistent(self, wanted: list[int]) -> list[int]:
        """Variants as wanted, but for those that read what is not made, or do not fit."""
        choices, made, chosen = self.choices, set[int](), list[int]()
        for op, variant in enumerate(wanted):
            found = [v for v in choices.of[op] if choices.reads[v] <= made] or [op]
            fit = [v for v in found if self._need[v] <= self._room[op]] or [self._leanest(found)]
            chosen.append(variant if variant in fit else fit[0])
            made.update(self.problem.variants[chosen[-1]].outputs)
        return chosen

    def _rules(self) -> Iterator[list[int]]:
        """Those that fit most often first: in haste no more than `hasty_rules` are tried."""
        choices = self.choices.of
        yield self._consistent([self._leanest(variants) for variants in choices])
        yield self._no_larger(self.params.sizes[0])
        yield self._consistent([min(variants, key=self._touched) for variants in choices])
        for share in self.params.sizes[1:]:
            yield self._no_larger(share)

    def _no_larger(self, share: float) -> list[int]:
        """The cheapest variants that take this share at most of the room that is there for them."""
        wanted = []
        for variants, room in zip(self.choices.of, self._room, strict=True):
            fit = (v for v in variants if self._need[v] <= share * room)
            wanted.append(next(fit, self._leanest(variants)))
        return self._consistent(wanted)

    def _leanest(self, variants: Sequence[int]) -> int:
        return min(variants, key=self._need.__getitem__)

    def _touched(self, variant: int) -> int:
        """Bytes of the tensors that a variant reads and makes: what is kept for others, or by them."""
        tensors = self.choices.reads[variant].union(self.problem.variants[variant].makes)
        return sum(self.problem.size[t] for t in tensors)

    def _relaxed(self, process: SolverProcess, model: VariantModel) -> Iterator[list[int]]:
        """What the program says whose columns need not be integers."""
        relaxed = replace(model.milp, integer=[False] * len(model.milp.integer))
        answer = process.solve(relaxed, self._until(INFINITY))
        if answer.outcome is Outcome.OPTIMAL:
            self.prove(model, answer.bound)
        if answer.values is not None:
            yield self._consistent(model.chosen(answer.values))

    def prove(self, model: VariantModel, bound: float) -> None:
        """Take a bound of a program at the full capacity."""
        if bound > -INFINITY:
            proved = model.bound_us(bound) * (1 - SOLVER_TOLERANCE)
            self.bound_us = max(self.bound_us, min(proved, self.cost_us))

    def _start(self, chosen: list[int]) -> None:
        """Plan the step of these variants, and give each run its own."""
        request = self.request.in_program_order()
        request = replace(request, progress=None, any_schedule=True)
        method = CoopOffline(restricted(self.problem, chosen), request)
        with contextlib.suppress(DoesNotFitError, TimeLimitError):
            method.begin()
            self.offer(carried_back(self.problem, chosen, method.solution().placed))

    def offer(self, placed: PlacedSchedule) -> bool:
        """Take a schedule that is cheaper than the best so far and within the arena."""
        if placed.cost_us >= self.cost_us or placed.arena_bytes > self.request.arena_bytes:
            return False
        self.placed = placed
        if self.request.progress is not None:
            base = max(self.problem.base_cost_us, 1e-12)
            overhead, bound = placed.cost_us / base - 1, self.bound_us / base - 1
            self.request.progress(
                Progress(f"variants and recomputes: overhead {overhead:.2%}", None, overhead, bound)
            )
        return True

    def _improve_runs(self, runs: list[int], capacity: int) -> Schedule | None:
        """The runs with the variants that suit them; None where they are no schedule."""
        try:
            return Rebody(self.choices, capacity).improve(runs, self.params.repairs)
        except NoScheduleError:
            return None

    def _keep(self, schedule: Schedule) -> bool:
        """Keep a schedule that fits if it is cheaper and has a layout."""
        arena = self.request.arena_bytes
        if schedule.cost_us >= self.cost_us - 1e-6 or not schedule.fits(arena):
            return False
        layout = lay_out(schedule, arena, work=0)
        if layout.placed.arena_bytes > arena:
            layout = lay_out(schedule, arena, work=WORK, order_hint=layout.placement.order)
        return self.offer(layout.placed)

    def _climb(self, chosen: list[int]) -> None:
        """From the variants of a start on, exchange one at a time, with what makes what it reads."""
        changes = [v for variants in self.choices.of if len(variants) > 1 for v in variants]
        tried = unchanged = 0
        for variant in itertools.cycle(changes):
            if tried >= self.params.climbs or unchanged >= len(changes) or self._done():
                break
            unchanged += 1
            other = self._exchanged(chosen, variant)
            if other != chosen:
                tried += 1
                before = self.cost_us
                self._start(other)
                if self.cost_us < before:
                    chosen, unchanged = other, 0
                    if self.request.any_schedule:
                        return
        self._give_variants()

    def _exchanged(self, chosen: list[int], variant: int) -> list[int]:
        """Variants with another one, and with those that make what it reads."""
        wanted, stack = list(chosen), [variant]
        while stack:
            v = stack.pop()
            wanted[self.problem.variants[v].op] = v
            for t in sorted(self.choices.reads[v]):
                maker = self.problem.producer[t]
                if t not in self.problem.variants[wanted[maker]].outputs:
                    makers = self.choices.of[maker]
                    stack += [m for m in makers if t in self.problem.variants[m].outputs][:1]
        return self._consistent(wanted)

    # The search.

    def _until(self, seconds: float) -> float:
        deadline = self.request.deadline
        if deadline is None:
            return time.monotonic() + FOREVER
        return min(time.monotonic() + seconds, deadline)

    @property
    def _nodes(self) -> int:
        return 0 if self._timed else self.params.nodes

    def run(self, *, prove: bool = False) -> None:
        """
        Search until the deadline, or as much as is counted; with `prove` for a bound first.

        Raises:
            DoesNotFitError: no schedule was found.
        """
        if working_set_bound(self.problem).bytes > self.capacity:
            raise DoesNotFitError(working_set_bound(self.problem).op)
        haste = self.request.any_schedule
        solver = importlib.util.find_spec("ortools") is not None and self._plain
        if not self._timed and (haste or self.choices.n <= self.params.small_ops):
            solver = False
        best = list(range(self.choices.n))
        if haste or not solver:  # a solver's process takes longer to start than these
            rules = self._rules()
            best = self._from(itertools.islice(rules, self.params.hasty_rules) if haste else rules)
        if not (self.proved or (haste and self.placed is not None)):
            if solver:
                params = replace(EXACT.solver, grace_seconds=EXACT.solver.grace_seconds + 0.5)
                with SolverProcess(params) as process:
                    self._run(process, prove)
            elif not haste or self.choices.n <= self.params.small_ops:
                self._climb(best)
        if self.placed is None:
            raise DoesNotFitError(working_set_bound(self.problem).op)

    def _from(self, starts: Iterator[list[int]]) -> list[int]:
        """The starts, the runs of the best of which get variants of their own; which one that is."""
        seen: list[list[int]] = []
        best = list(range(self.choices.n))
        for chosen in starts:
            before = self.cost_us
            if chosen not in seen:
                seen.append(chosen)
                self._start(chosen)
            if self.placed is None or self.cost_us < before:
                best = chosen
            if self.request.any_schedule and self.placed is not None:
                return best
        self._give_variants()
        return best

    def _give_variants(self) -> None:
        """Give each run of the best schedule the variant that suits it."""
        if self.placed is not None and self._plain:
            better = self._improve_runs(self.placed.schedule.what.tolist(), self.capacity)
            if better is not None:
                self._keep(better)

    def _run(self, process: SolverProcess, prove: bool) -> None:
        model = self._model(self.capacity)
        self._from(self._relaxed(process, model))
        if self.request.any_schedule and self.placed is not None:
            return
        self._from(self._rules())
        small = self.choices.n <= self.params.small_ops
        # Without a time limit a large program may take minutes to say that nothing fits.
        whole = prove or small or self._timed
        if whole:
            self._refine(process, model, until_placed=not (prove or small))
        if self._timed and self._too_full is not None:
            self._repair(process, self._too_full)
        self._search(process)

    def _model(self, capacity: int, *, ordered: bool = False) -> VariantModel:
        deadline = self.request.deadline
        return VariantModel(self.choices, capacity, self.points, self.cuts, ordered, deadline)

    def _looks_at(self, model: VariantModel, capacity: int) -> bool:
        """Whether a model is of this capacity (bytes) and looks as closely as is known by now."""
        seen = model.points, model.cuts, model.capacity
        return seen == (self.points, self.cuts, capacity)

    def _refine(self, process: SolverProcess, model: VariantModel, *, until_placed: bool) -> None:
        """
        The whole program, as long as it knows too little of what its solutions need.

        Of a time limit this is a share, and again one while no schedule is known.
        """
        until, tight = self._share(self.params.bound_share), False
        while not self._done():
            if self.placed is None:
                until = self._share(self.params.bound_share)
            elif until_placed or time.monotonic() >= until:
                return
            gap = self.params.relative_gap
            if self.placed is not None and self._timed and not tight:
                gap = max(gap, self.params.rough * (self.cost_us / self.bound_us - 1))
            each = self._share(self.params.solve_share) if self.placed is not None else until
            ended = self._solve(process, model, min(until, each), gap)
            if self.placed is not None and not (ended and self._timed):
                return
            if self._looks_at(model, self.capacity):
                if tight or gap <= self.params.relative_gap:
                    return
                tight = True
            else:
                model = self._model(self.capacity)

    def _share(self, share: float) -> float:
        """When this share of what is left of the time is over."""
        now = time.monotonic()
        return now + (self._until(INFINITY) - now) * share

    def _solve(self, process: SolverProcess, model: VariantModel, until: float, gap: float) -> bool:
        """The program's bound, and the schedule of its solution; whether it was solved."""
        exact = self.choices.n <= self.params.small_ops
        gap = 0.0 if exact else gap
        answer = process.solve(model.milp, until, relative_gap=gap, nodes=self._nodes)
        self.prove(model, answer.bound)
        ended = answer.outcome is Outcome.OPTIMAL
        if answer.values is not None and not self._use(model, answer.values, self.capacity):
            self._start(self._consistent(model.chosen(answer.values)))
        self._solved |= exact and ended and self._looks_at(model, self.capacity)
        return ended

    def _use(self, model: VariantModel, values: list[float], capacity: int) -> bool:
        """Make a schedule of a solution; where it is too full, look closer from now on."""
        read = read_out(model, values)
        if read is None:
            return False
        runs = [variant for variant, _ in read]
        try:
            schedule = Schedule.of(self.problem, runs)
        except NoScheduleError:
            return False
        if schedule.cost_us < self.cost_us and not schedule.fits(capacity):
            # Variants that fit hide, at a price, what the program does not know.
            self._too_full = schedule
            self._look_closer(schedule, capacity)
        schedule = Rebody(self.choices, capacity).improve(runs, self.params.repairs)
        if schedule.cost_us >= self.cost_us - 1e-6 or not schedule.fits(capacity):
            return False
        kept = self._keep(schedule)
        self._failed = max(0, self._failed - 1) if kept else self._failed + 1
        return kept

    def _look_closer(self, schedule: Schedule, capacity: int) -> None:
        """More time points, or cuts, where a schedule needs more than that many bytes."""
        over = (schedule.live_bytes() - capacity).tolist()
        at, first, again = -1, dict[int, int](), dict[tuple[int, int], int]()
        for variant, excess in zip(schedule.variants, over, strict=True):
            op = self.problem.variants[variant].op
            if op == at + 1:
                at = op
                if excess > 0:
                    first[op] = excess
            elif excess > 0:
                again[at + 1, op] = max(excess, again.get((at + 1, op), 0))
        count = self.params.points_at_once
        new = {op: excess for op, excess in first.items() if op not in self.points}
        if not new:
            cuts = {pair: excess for pair, excess in again.items() if pair not in self.cuts}
            self.cuts |= {*sorted(cuts, key=lambda p: cuts[p])[-count:]}
            for position, op in again.keys() - cuts.keys():
                # What only the first runs of a segment read is not there in a shorter one.
                point = position if position not in self.points else position - 1
                if point >= 0 and point not in self.points:
                    new[point] = max(again[position, op], new.get(point, 0))
        if len(self.points) < self.params.most_points:
            self.points = sorted({*self.points, *sorted(new, key=lambda op: new[op])[-count:]})

    def _promising(self, model: VariantModel, answer: Answer) -> list[float] | None:
        """A solution of which variants that suit its runs may make the best schedule yet."""
        most = self.cost_us * (1 + self.params.worth_reading)
        return answer.values if model.bound_us(answer.objective) <= most else None

    def _repair(self, process: SolverProcess, schedule: Schedule) -> None:
        """Lead a schedule that is too full to one that fits: the program is solved around that."""
        params = self.params
        around = Neighbourhoods(random.Random(0), params)  # noqa: S311
        for _ in range(params.repair_rounds):
            model = self._model(self.capacity, ordered=True)
            values = lifted(model, schedule)
            full = too_full(model, values)
            if self._done() or not full:
                return
            worst = max(full, key=lambda k: full[k])
            part = around.around(model, values, worst)
            until = self._until(params.step_seconds)
            answer = process.solve(part, until, relative_gap=params.relative_gap)
            found = self._promising(model, answer)
            if found is not None:
                self._too_full = None
                if self._use(model, found, self.capacity):
                    return
                if self._too_full is not None:
                    schedule = self._too_full
                elif answer.outcome is Outcome.OPTIMAL:
                    return
            around.learn(answer.outcome)

    def _search(self, process: SolverProcess) -> None:
        """Neighbourhoods of the best schedule until the time is up."""
        params = self.params
        self.points = sorted({*self.points, *self._first_points(params.points)})
        draw = random.Random(self.request.seed)  # noqa: S311  (no secret)
        around = Neighbourhoods(draw, params)
        model = None
        failures = 0
        for count in itertools.count():
            if self.placed is None or self._done():
                return
            if not self._timed and (failures >= params.patience or count >= params.neighbourhoods):
                return
            margin = min(params.most_margin, params.margin * self._failed)
            capacity = int(self.capacity * (1 - margin))
            if model is None or not self._looks_at(model, capacity):
                model = self._model(capacity, ordered=True)
            values = lifted(model, self.placed.schedule)
            stretch = around.next(model, values)
            until = self._until(params.step_seconds)
            answer = process.solve(
                stretch, until, relative_gap=params.relative_gap, nodes=self._nodes
            )
            around.learn(answer.outcome)
            found = self._promising(model, answer)
            better = found is not None and self._use(model, found, capacity)
            failures = 0 if better else failures + 1

    @property
    def proved(self) -> bool:
        """Whether no schedule in program order costs less, within the tolerance."""
        return self.cost_us <= self.bound_us * (1 + PROOF)

    def _done(self) -> bool:
        return self.proved or self._solved or self.request.out_of_time()
