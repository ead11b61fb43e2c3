"""Search for the smallest arena that a method meets: from above by plans, from below by bounds.

A probe asks the method for any schedule within an arena, which takes at most about a plan's time.
Its schedule, or the closest one if none fits, says how little memory suffices. The search goes on
between that and the largest arena without a schedule, by geometric means.
"""

import contextlib
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from coop_plan.planner.core.arrays import to_arrays
from coop_plan.planner.core.errors import DoesNotFitError, TimeLimitError
from coop_plan.planner.core.memory_bounds import (
    WorkingSet,
    largest_working_set,
    needs_with_resident_outputs,
    working_set_bound,
)
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule
from coop_plan.planner.exact.model.variants import restore_variants, without_pairs, without_variants
from coop_plan.planner.keep_all import SMALL_PROBLEM_OPS, keep_all_solution, lay_out_everything
from coop_plan.planner.method import MethodInfo, Progress, Request, Solution
from coop_plan.planner.placement.layout import lay_out_host
from coop_plan.planner.registry import METHODS
from coop_plan.schemas import format_bytes

COARSE_PROBES = 7
"""Probes on larger graphs, of about a plan's time each; the whole run at the end takes longer."""

SEARCH_SHARE = 0.5
"""With a deadline, share of the time for probes; the rest lowers the cost of the plan."""


class Smallest(NamedTuple):
    """
    The smallest arena (bytes) that the method meets on request, and its solution of least memory.

    The solution may need less than that arena: a search for a larger arena may have found it.
    """

    arena_bytes: int
    solution: Solution


@dataclass(frozen=True)
class Task:
    """A method on a problem, to be solved at several arena sizes."""

    problem: Problem
    method: MethodInfo
    request: Request

    @property
    def working_set(self) -> WorkingSet:
        """Lower bound on the arena of every schedule of the method."""
        return (working_set_bound if self.method.variants else largest_working_set)(self.problem)

    def solve(self, arena: int, *, any_schedule: bool = False) -> Solution:
        """The method's solution within `arena` bytes; raises `DoesNotFitError`.

        In-place pairs are a choice, but a heuristic may do worse with them: the cheapest of its
        solutions with and without pairs is taken (`without_pairs`).
        """
        try:
            found = self._solve(arena, any_schedule)
        except DoesNotFitError:
            apart = self._without_pairs(arena, any_schedule)
            if apart is None:
                raise
            return apart
        if any_schedule or found.status == "optimal":
            return found
        apart = self._without_pairs(arena, any_schedule)
        if apart is None or apart.placed.cost_us >= found.placed.cost_us:
            return found
        return replace(apart, lower_bound_us=found.lower_bound_us, bound_model=found.bound_model)

    def _without_pairs(self, arena: int, any_schedule: bool) -> Solution | None:
        """The method's cheapest solution without pairs, if it has no deadline."""
        if self.method.anytime or self.request.deadline is not None:
            return None
        best: Solution | None = None
        for alone in self._problems_without_pairs:
            try:
                found = replace(self, problem=alone)._solve(arena, any_schedule)
            except DoesNotFitError:
                continue
            if best is None or found.placed.cost_us < best.placed.cost_us:
                best = found
            if any_schedule:
                break
        if best is None:
            return None
        placed = restore_variants(self.problem, range(len(self.problem.variants)), best.placed)
        return replace(
            best, placed=placed, status="feasible", lower_bound_us=None, bound_model=None
        )

    @property
    def _problems_without_pairs(self) -> list[Problem]:
        """The problems of `_without_pairs`, made once per problem."""
        kept = self.problem.__dict__
        if "_without_pairs" not in kept:
            kept["_without_pairs"] = without_pairs(self.problem, SMALL_PROBLEM_OPS)
        found: list[Problem] = kept["_without_pairs"]
        return found

    def _solve(self, arena: int, any_schedule: bool) -> Solution:
        """As `solve`, with the problem's in-place pairs."""
        op, working_set = self.working_set
        if arena < 0 or working_set > self.problem.rounded(arena):
            raise DoesNotFitError(op)
        request = replace(self.request, arena_bytes=arena, any_schedule=any_schedule)
        solution = self.method.solve(self.problem, request)
        if solution.placed.arena_bytes > arena:
            raise DoesNotFitError(op)
        host_budget = self.problem.host_budget
        if host_budget is not None:
            host = lay_out_host(solution.placed.schedule, host_budget)
            if host.peak > host_budget:
                raise DoesNotFitError(op)
        return solution

    def within(self, arena: int) -> Solution:
        """As `solve`; if that fails, the solution without variants and in-place pairs."""
        try:
            return self.solve(arena)
        except DoesNotFitError:
            plain = without_variants(self.problem) if self.method.variants else None
            if plain is None:
                raise
        return self._from_plain(replace(self, problem=plain).solve(arena))

    def smallest(self, everything: PlacedSchedule, *, at_any_cost: bool = False) -> Smallest:
        """The smallest arena found, at most that of keep-everything.

        Its solution is improved in the end, unless one `at_any_cost` is wanted.

        A method need not be monotone: it may succeed in a smaller arena, or with fewer choices. So
        the search starts from the result of a simpler task. It does not depend on the requested
        budget, so all requests get the same answer.
        """
        best = Smallest(everything.arena_bytes, keep_all_solution(everything))
        plain = without_variants(self.problem) if self.method.variants else None
        if plain is not None:
            task = replace(self, problem=plain, request=self.request.part(SEARCH_SHARE))
            kept = lay_out_everything(plain, work=0).placed
            search = _Interval(task, Smallest(kept.arena_bytes, keep_all_solution(kept)))
            variants = "variants" in self.problem.beyond_recomputation
            if variants or self.request.deadline is not None:
                found = task.smallest(kept, at_any_cost=at_any_cost)
            else:  # only pairs: the full search is that with them
                search.narrow(1)
                found = search.known
            best = _smaller(best, Smallest(found.arena_bytes, self._from_plain(found.solution)))
        elif self.method.starts_from:
            request = self.request.part(SEARCH_SHARE)
            if "reorder" not in self.method.switches:
                request = request.in_program_order()
            first = replace(self, method=METHODS[self.method.starts_from], request=request)
            best = _smaller(best, first.smallest(everything, at_any_cost=at_any_cost))
        search = _Interval(self, best)
        with contextlib.suppress(TimeLimitError):
            search.narrow()
        return _smaller(search.known, best) if at_any_cost else search.improved()

    def at_any_costs(self) -> Solution:
        """The solution of least memory that is found without costs: each op counts alike.

        Costs decide what a method evicts, so its smallest arena depends on them. This one is the
        same for all graphs that differ in costs alone, as a step's on two machines do. Variants and
        transfers are not used.
        """
        problem = self.problem
        equal: dict[str, object] = {"cost_us": 1.0, "variants": []}
        graph = problem.graph.model_copy(
            {"ops": [op.model_copy(equal) for op in problem.graph.ops]}
        )
        places = problem.alignment, problem.outputs, 0, problem.outside
        task = replace(self, problem=Problem.with_places(graph, *places))
        everything = lay_out_everything(task.problem).placed
        return self._from_plain(task.smallest(everything, at_any_cost=True).solution)

    def improved(self, known: Solution, arena: int) -> Solution:
        """The cheaper of a solution within `arena` bytes and what the method finds from there."""
        if known.placed.cost_us <= self.problem.floor_us:
            return known
        task = self
        if "variants" not in self.problem.beyond_recomputation:
            task = replace(self, request=replace(self.request, larger=known.placed))
        try:
            found = task.solve(arena)
        except (DoesNotFitError, TimeLimitError):
            return known
        return min(known, found, key=lambda solution: solution.placed.cost_us)

    def _from_plain(self, solution: Solution) -> Solution:
        """A solution of the plain problem as one of this, without bounds, which ignore variants."""
        defaults = range(self.problem.op_count)
        return Solution(restore_variants(self.problem, defaults, solution.placed))


def _smaller(a: Smallest, b: Smallest) -> Smallest:
    placed = [(f.solution.placed.arena_bytes, f.solution.placed.cost_us) for f in (a, b)]
    best = a if placed[0] <= placed[1] else b
    return Smallest(min(a.arena_bytes, b.arena_bytes), best.solution)


def common_divisor(problem: Problem) -> int:
    """Bytes of which every buffer, and so the least arena of every schedule, is a multiple."""
    arrays = to_arrays(problem)
    sizes = np.concatenate((arrays.size[arrays.resident == 0], arrays.workspace))
    return int(np.gcd.reduce(sizes)) or problem.alignment


class _Interval:
    """The interval between the largest arena that the method failed in and the smallest it meets.

    `found` is the solution that needs the least memory. The method met `met` bytes, possibly by
    that solution, which need not mean that it meets that solution's own arena.
    """

    def __init__(self, task: Task, start: Smallest) -> None:
        self.task, self.start = task, start
        self.small = task.problem.op_count <= SMALL_PROBLEM_OPS
        self.step = common_divisor(task.problem) if self.small else task.problem.alignment
        self.floor = task.working_set.bytes - self.step
        self.failed = self.floor
        self.met = start.arena_bytes
        self.found = start.solution

    def narrow(self, most: int | None = None) -> None:
        """Probe arenas within the interval until it is small enough or the probes are used up."""
        problem = self.task.problem
        linked = not self.small and "transfers" in problem.beyond_recomputation
        linked &= not problem.homes.copies  # an online run, which is quick
        if most is None:
            most = 64 if self.small else 3 if linked else COARSE_PROBES
        task = replace(self.task, request=self.task.request.part(SEARCH_SHARE))
        guess = max(0, self.floor + self.step)
        if not self.small:  # schedules below this are rare
            guess = max(guess, *needs_with_resident_outputs(task.problem))
        used = 0.0
        while used < most and guess < self.met:
            task.request.check_time()
            if task.request.progress is not None:
                met = format_bytes(task.problem.fixed_bytes + self.met)
                message = f"searching the smallest budget: {met} is met"
                task.request.progress(Progress(message, used / most))
            # A probe that succeeds ends early, but not with a link.
            used += 0.25 if self._probe(task, guess) and not linked else 1
            guess = self._next(last=used + 1 >= most)

    def _probe(self, task: Task, arena: int) -> bool:
        """Ask for any schedule within the arena; True if there is one."""
        task = replace(task, request=task.request.part(0.25))
        before = self.found.placed.arena_bytes
        try:
            self.found = self._started(task).solve(arena, any_schedule=True)
        except DoesNotFitError as error:
            self.failed = arena
            closest = error.closest
            if closest is not None and closest.arena_bytes < self._hint:
                self.found = Solution(closest)
                self.met = self.known.arena_bytes
            return False
        self.met = arena
        self.met = self.known.arena_bytes  # less on larger graphs
        size = self.found.placed.arena_bytes
        if size <= self.failed and not (self.small and before - size <= self._small_enough):
            self.failed = self.floor  # that failure proves nothing
        return True

    def _started(self, task: Task) -> Task:
        """The task whose searches start from the schedule of least memory.

        Not on small graphs, where a request for the arena found must meet it, nor with a deadline,
        nor with variants: a schedule need not be one of other variants.
        """
        placed, problem = self.found.placed, task.problem
        keeps_all = len(placed.schedule) == problem.op_count
        variants = "variants" in problem.beyond_recomputation
        if keeps_all or variants or self.small or task.request.deadline is not None:
            return task
        return replace(task, request=replace(task.request, larger=placed))

    @property
    def _hint(self) -> int:
        """Arena of a known schedule within the interval, else the smallest that is met."""
        arena = self.found.placed.arena_bytes
        return arena if self.failed < arena else self.met

    @property
    def _small_enough(self) -> int:
        """Bytes of an interval that ends the search."""
        budget = self.task.problem.fixed_bytes + self._hint
        return max(self.step, budget // (4096 if self.small else 256))

    def _next(self, *, last: bool) -> int:
        """The next arena to probe; that of the known schedule in the end, to confirm it."""
        high = self._hint
        if high - self.failed <= self._small_enough or (last and high < self.met):
            return high
        mean = int(max(self.failed, self.step) ** 0.5 * high**0.5) // self.step * self.step
        return min(max(mean, self.failed + self.step), high)

    @property
    def known(self) -> Smallest:
        """The smallest arena met.

        On larger graphs, or with a deadline, a schedule is a plan even if the method does not find
        it again when asked for its size.
        """
        if self.small and self.task.request.deadline is None:
            return Smallest(self.met, self.found)
        return Smallest(self.found.placed.arena_bytes, self.found)

    def improved(self) -> Smallest:
        """The smallest arena met, with the solution of a whole run of the method in it."""
        task, known = self.task, self.known
        timed = task.request.deadline is not None
        if known.solution.status == "optimal":
            return known
        if known.solution.placed.arena_bytes < known.arena_bytes:  # the method finds it no more
            return known
        try:
            found = self._started(task).solve(known.arena_bytes)
        except (DoesNotFitError, TimeLimitError):
            return self.start if timed and task.method.starts_from else _smaller(known, self.start)
        arena = found.placed.arena_bytes
        if arena < known.arena_bytes and not timed:
            if not self.small:
                return _smaller(Smallest(arena, found), self.start)
            if arena > self.failed:
                with contextlib.suppress(DoesNotFitError):
                    task.solve(arena, any_schedule=True)
                    return Smallest(arena, found)
        return _smaller(Smallest(known.arena_bytes, found), self.start)
