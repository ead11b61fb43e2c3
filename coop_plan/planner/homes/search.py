"""Search for plans with movable residents on the host, by shares of their bytes.

For each share a plan without transfers is made in which each op holds the homes that it uses as
workspace. The joint search of recomputes and transfers (`planner.search.makespan`) starts from it,
with a prefetch before each use: it removes prefetches while memory suffices, and moves activations
in the same timeline. The homes of a share are those with the fewest uses, spread over the step.
"""

import time
from dataclasses import replace

import numpy as np

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.build_plan import assemble
from coop_plan.planner.core.errors import DoesNotFitError, TimeLimitError
from coop_plan.planner.core.memory_bounds import budget_lower_bound
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.homes.lower import Lowered, lowered, sequence_of, streamed
from coop_plan.planner.homes.restore import restored
from coop_plan.planner.keep_all import lay_out_everything
from coop_plan.planner.method import Request
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.registry import METHODS
from coop_plan.planner.search.makespan.annealing import MakespanSearch
from coop_plan.planner.search.makespan.sequence import to_sequence
from coop_plan.planner.smallest_budget import Task
from coop_plan.planner.verifier import verify
from coop_plan.schemas import Plan

SHARES = (1.0, 0.5, 0.25, 0.75)
"""Shares of the bytes of all movable residents that get homes, in the order of their searches."""

REFINEMENTS = (-0.125, 0.125)
"""Differences from the best of these shares that are searched afterwards."""


class HomeSearch:
    """Plans with homes for one graph.

    `request` has the seed, the deadline and the switches; its arena is not used.
    """

    def __init__(self, problem: Problem, options: PlanOptions, request: Request) -> None:
        self.problem, self.options, self.request = problem, options, request
        self.order = _by_uses(problem)
        size = {tensor.id: tensor.bytes for tensor in problem.graph.tensors}
        self._ends = np.cumsum([size[t] for t in self.order])
        if problem.host_budget is not None:
            self._ends = self._ends[self._ends <= problem.host_budget]
            self.order = self.order[: self._ends.size]
        self.began = time.monotonic()

    def cheapest(self, budget: int, limit_us: float) -> Plan | None:
        """The cheapest plan within a budget (bytes) that is found, if it costs less than a limit.

        The limit is in µs.
        """
        best: Plan | None = None
        best_share, left = 0.0, len(SHARES) + len(REFINEMENTS)
        searched: set[int] = set()
        for refined in (False, True):
            centre = best_share
            if not self.order or (refined and best is None):
                break
            for share in (centre + step for step in REFINEMENTS) if refined else SHARES:
                count = self._count(share)
                left -= 1
                if count in searched or self.request.out_of_time():
                    continue
                searched.add(count)
                request = self.request.part(1 / (left + 1))
                found = self._plan(self.order[:count], budget, limit_us, request)
                if found is not None:
                    best, best_share, limit_us = found, share, found.cost_us
        return best

    def smallest(self, budget: int) -> Plan | None:
        """The plan of least memory that is found, below a budget (bytes) that is known to be met.

        All movable residents for which the host has room have homes.
        """
        if not self.order:
            return None
        task = self._streaming_task(self.order, self.request.part(0.5))
        try:
            arena = task.smallest(lay_out_everything(task.problem).placed).arena_bytes
        except TimeLimitError:
            return None
        least = task.problem.fixed_bytes + arena
        while least < budget and not self.request.out_of_time():
            found = self._plan(self.order, least, np.inf, self.request)
            if found is not None:
                bound = budget_lower_bound(self.problem)
                return found.model_copy({"budget_lower_bound_bytes": bound})
            least += max(1, least // 64)
        return None

    def _count(self, share: float) -> int:
        """Number of residents, in `order`, with this share of their bytes; at least one."""
        reached = int(np.searchsorted(self._ends, share * self._ends[-1])) + 1
        return min(max(1, reached), len(self.order))

    def _plan(
        self, homes: list[int], budget: int, limit_us: float, request: Request
    ) -> Plan | None:
        """A plan with these homes within a budget (bytes), cheaper than a limit (µs)."""
        start = self._streaming(homes, budget, request)
        if start is None:
            return None
        low = lowered(self.problem, homes)
        problem = low.form.problem
        request = replace(request, arena_bytes=budget - problem.fixed_bytes)
        starts = [sequence_of(low, ops) for ops in (start, np.arange(self.problem.op_count))]
        search = MakespanSearch(problem, request, starts, limit_us)
        search.run(request.deadline, lambda: False)
        if search.placed is None:
            return None
        found = self._assembled(low, search, budget)
        host = self.problem.host_budget
        if host is not None and found.host_arena_bytes > host:
            return None
        verify(self.problem.graph, found)
        return found if found.cost_us < limit_us else None

    def _streaming(self, homes: list[int], budget: int, request: Request) -> Ints | None:
        """Ops in the order of a plan that prefetches each home before each use; None if none fits.

        Without transfers of activations.
        """
        task = self._streaming_task(homes, request.part(0.4))
        try:
            found = task.within(budget - task.problem.fixed_bytes).placed
        except (DoesNotFitError, TimeLimitError):
            return None
        return to_sequence(found.schedule)

    def _streaming_task(self, homes: list[int], request: Request) -> Task:
        """The planning task in which ops hold these homes as workspace (`streamed`)."""
        alone = streamed(self.problem, homes)
        return Task(alone, METHODS["coop-offline"], replace(request, progress=None))

    def _assembled(self, low: Lowered, search: MakespanSearch, budget: int) -> Plan:
        assert search.placed is not None
        placed = low.form.placed_to_original(search.placed)
        made = assemble(
            placed,
            host_offsets=np.zeros(len(placed.schedule), dtype=np.int64),
            host_arena_bytes=0,
            link_bytes_per_s=self.options.link,
            method=self.options.info.name,
            budget_bytes=budget,
            status="feasible",
            lower_bound_us=None,
            lower_bound_model=None,
            eviction_free_ratio=None,
            evictions=None,
            solve_seconds=time.monotonic() - self.began,
        )
        found = restored(self.problem.graph, low, made)
        return found.model_copy({"host_budget_bytes": self.problem.host_budget})


def _by_uses(problem: Problem) -> list[int]:
    """Ids of the residents that may have homes: fewest ops that use them first.

    Among those with as many uses, the order of the first use is bit-reversed, so that the copies of
    each share are spread over the step.
    """
    graph = problem.graph
    uses: dict[int, list[int]] = {graph.tensors[t].id: [] for t in problem.home_candidates}
    for position, op in enumerate(graph.ops):
        for t in dict.fromkeys(op.inputs):
            if t in uses:
                uses[t].append(position)
    classes: dict[int, list[int]] = {}
    for t in sorted(uses, key=lambda t: uses[t][0]):
        classes.setdefault(len(uses[t]), []).append(t)
    order: list[int] = []
    for count in sorted(classes):
        tensors = classes[count]
        bits = max(1, (len(tensors) - 1).bit_length())
        reverse = [int(f"{k:0{bits}b}"[::-1], 2) for k in range(1 << bits)]
        order += [tensors[k] for k in reverse if k < len(tensors)]
    return order
