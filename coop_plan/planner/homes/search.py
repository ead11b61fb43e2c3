"""Search for plans with movable residents and updates on the host, by shares of both.

For each pair of shares a plan without transfers is made in which each op holds the homes that it
uses as workspace. The joint search of recomputes and transfers (`planner.search.makespan`) starts
from it, with a prefetch before each use: it removes prefetches while memory suffices, and moves
activations in the same timeline. Updates on the host are spread over the step; what they use has
homes. The other homes are those with the fewest uses, spread over the step.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.errors import DoesNotFitError, TimeLimitError
from coop_plan.planner.core.memory_bounds import budget_lower_bound
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.homes.lower import Lowered, lowered, sequence_of, streamed, updated_on_host
from coop_plan.planner.homes.restore import assembled
from coop_plan.planner.homes.updates import HostUpdate, host_updates
from coop_plan.planner.keep_all import lay_out_everything
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.registry import METHODS
from coop_plan.planner.search.makespan.annealing import MakespanSearch
from coop_plan.planner.search.makespan.sequence import to_sequence
from coop_plan.planner.smallest_budget import Task
from coop_plan.schemas import Plan

T = TypeVar("T")

SHARES = ((0.0, 1.0), (0.0, 0.5), (0.0, 0.25), (0.0, 0.75))
"""Shares in the order of their searches: of the updates on the host among those that may run there,
and of the bytes that get homes among the other movable residents."""

REFINEMENTS = ((0.0, -0.125), (0.0, 0.125))
"""Differences from the best of these shares that are searched afterwards."""

HOST_SHARES = ((1.0, 0.0), (1.0, 1.0), (0.5, 0.0), (0.5, 0.5), (0.5, 1.0))
"""Shares that are searched next if there are updates that may run on the host."""

HOST_REFINEMENTS = ((-0.25, 0.0), (0.25, 0.0), (0.0, -0.25), (0.0, 0.25))
"""Differences from the best of all these shares that are searched last."""


class HomeSearch:
    """Plans with homes for one graph.

    `request` has the seed, the deadline and the switches; its arena is not used.
    """

    def __init__(self, problem: Problem, options: PlanOptions, request: Request) -> None:
        self.problem, self.options, self.request = problem, options, request
        self.order = by_uses(problem)
        self._size = {tensor.id: tensor.bytes for tensor in problem.graph.tensors}
        found = host_updates(problem)
        self.updates = _spread([u for u in found if {*u.residents} <= {*self.order}])
        self.began = time.monotonic()

    def cheapest(self, budget: int, limit_us: float) -> Plan | None:
        """The cheapest plan within a budget (bytes) that is found, if it costs less than a limit.

        The limit is in µs.
        """
        best: Plan | None = None
        rounds = [(SHARES, False), (REFINEMENTS, True)]
        rounds += [(HOST_SHARES, False), (HOST_REFINEMENTS, True)] if self.updates else []
        best_shares, left = (0.0, 0.0), sum(len(shares) for shares, _ in rounds)
        searched: set[tuple[int, int]] = set()
        for shares, refined in rounds:
            centre = best_shares if refined else (0.0, 0.0)
            for on_host, home in shares if best is not None or not refined else ():
                each = centre[0] + on_host, centre[1] + home
                updates, homes = self._chosen(*each)
                left -= 1
                counts = len(updates), len(homes)
                if not homes or counts in searched or self.request.out_of_time():
                    continue
                searched.add(counts)
                request = self.request.part(1 / (left + 1))
                found = self._plan(homes, updates, budget, limit_us, request)
                if found is not None:
                    best, best_shares, limit_us = found, each, found.cost_us
        return best

    def smallest(self, budget: int) -> Plan | None:
        """The plan of least memory that is found, below a budget (bytes) that is known to be met.

        All movable residents for which the host has room have homes, and none or all of the updates
        that may run on the host do. The choice whose ops need less at once is searched first, the
        other one if it may need less than the plan found. A whole search lowers the cost.
        """
        if not self.order:
            return None
        choices = []
        for updates in ([], self.updates) if self.updates else ([],):
            task = self._streaming_task(self.order, updates, self.request.part(0.25))
            choices.append((task.problem.fixed_bytes + task.working_set.bytes, updates, task))
        best: tuple[Lowered, Plan, Ints] | None = None
        for bound, updates, task in sorted(choices, key=lambda choice: choice[0]):
            found = self._least(updates, task, bound, budget) if bound < budget else None
            if found is not None:
                best, budget = found, found[1].peak_bytes
        if best is None:
            return None
        low, made, known = best
        cheaper = self._search(low, [known], budget, made.cost_us, self.request)
        if cheaper is not None:
            made = cheaper[0]
        figures = {"budget_lower_bound_bytes": budget_lower_bound(self.problem)}
        return made.model_copy(figures | {"budget_bytes": made.peak_bytes})

    def _least(
        self, updates: list[HostUpdate], task: Task, bound: int, budget: int
    ) -> tuple[Lowered, Plan, Ints] | None:
        """The plan of least memory below a budget and its sequence, with these updates on the host.

        Probes for any plan begin at the bytes that `task`, without transfers, needs, and go up by
        64ths until one succeeds. The next one is at `bound`, which no plan is much below. Others
        halve the bytes between the largest failure and the smallest success, down to a 64th. Each
        begins from the last plan.
        """
        everything = lay_out_everything(task.problem).placed
        try:
            placed = task.smallest(everything, at_any_cost=True).solution.placed
        except TimeLimitError:
            return None
        low = lowered(self.problem, self.order, updates)
        known = sequence_of(low, to_sequence(placed.schedule))
        least, failed = task.problem.fixed_bytes + placed.arena_bytes, bound - 1
        best: Plan | None = None
        while least < budget and not self.request.out_of_time():
            probe = replace(self.request.part(0.25), any_schedule=True)
            found = self._search(low, [known], least, np.inf, probe)
            if found is not None:
                best, known = found
                budget = best.peak_bytes
            elif best is not None:
                failed = least
            else:
                least += max(1, least // 64)
                continue
            if budget - failed <= max(1, budget // 64):
                break
            least = bound if failed < bound else (failed + budget) // 2
        return None if best is None else (low, best, known)

    def _chosen(self, on_host: float, home: float) -> tuple[list[HostUpdate], list[int]]:
        """The updates on the host and the homes (tensor ids) of a pair of shares.

        At least one resident has a home, if one may have.
        """
        updates = self.updates[: max(0, round(on_host * len(self.updates)))]
        used = dict.fromkeys(t for update in updates for t in update.residents)
        rest = [t for t in self.order if t not in used]
        ends = np.cumsum([self._size[t] for t in rest])
        count = 0
        if rest and (home > 0 or not used):
            count = int(np.searchsorted(ends, home * ends[-1])) + 1
        return updates, [*used, *rest[:count]]

    def _plan(
        self,
        homes: list[int],
        updates: list[HostUpdate],
        budget: int,
        limit_us: float,
        request: Request,
    ) -> Plan | None:
        """A plan with these homes and updates on the host within a budget (bytes).

        It is cheaper than a limit (µs).
        """
        start = self._streaming(homes, updates, budget, request)
        if start is None:
            return None
        low = lowered(self.problem, homes, updates)
        known = [sequence_of(low, start), *self._as_zero_offload(low, budget, request)]
        found = self._search(low, known, budget, limit_us, request)
        return None if found is None else found[0]

    def _search(
        self, low: Lowered, known: list[Ints], budget: int, limit_us: float, request: Request
    ) -> tuple[Plan, Ints] | None:
        """As `_plan`, from known sequences, with the plan's; the search begins from the first."""
        problem = low.form.problem
        request = replace(request, arena_bytes=budget - problem.fixed_bytes)
        program = np.arange(self.problem.op_count - len(low.updates))
        starts = [known[0], sequence_of(low, program)]
        search = MakespanSearch(problem, request, starts, limit_us)
        for sequence in known:
            search.consider(sequence)
        search.run(request.deadline, lambda: False)
        if search.placed is None or search.sequence is None:
            return None
        made = Solution(search.placed)
        found = assembled(self.problem, low, made, self.options, budget, self.began)
        if found is None or found.cost_us >= limit_us:
            return None
        return found, search.sequence

    def _as_zero_offload(self, low: Lowered, budget: int, request: Request) -> list[Ints]:
        """The sequence in which parameters that the host updates are fetched once, if one fits.

        Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, USENIX ATC 2021, keep
        them on the device.
        """
        once = updated_on_host(self.problem, low.updates)
        if not once:
            return []
        kept = self._streaming([*(low.homes - once)], low.updates, budget, request)
        return [] if kept is None else [sequence_of(low, kept, once)]

    def _streaming(
        self, homes: list[int], updates: Sequence[HostUpdate], budget: int, request: Request
    ) -> Ints | None:
        """Ops in the order of a plan that prefetches each home before each use; None if none fits.

        Without transfers of activations.
        """
        task = self._streaming_task(homes, updates, request.part(0.4))
        try:
            found = task.within(budget - task.problem.fixed_bytes).placed
        except (DoesNotFitError, TimeLimitError):
            return None
        return to_sequence(found.schedule)

    def _streaming_task(
        self, homes: list[int], updates: Sequence[HostUpdate], request: Request
    ) -> Task:
        """The planning task in which ops hold these homes as workspace (`streamed`)."""
        alone = streamed(self.problem, homes, updates)
        return Task(alone, METHODS["coop-offline"], replace(request, progress=None))


def by_uses(problem: Problem) -> list[int]:
    """Ids of the residents that may have homes: fewest ops that use them first.

    The host budget has room for them. Among those with as many uses, the order of the first use is
    bit-reversed, so that the copies of each share are spread over the step.
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
        order += _spread(classes[count])
    if problem.host_budget is None:
        return order
    size = {tensor.id: tensor.bytes for tensor in graph.tensors}
    ends = np.cumsum([size[t] for t in order])
    return order[: np.count_nonzero(ends <= problem.host_budget)]


def _spread(items: Sequence[T]) -> list[T]:
    """The items in bit-reversed order: those of each share are spread over the sequence."""
    bits = max(1, (len(items) - 1).bit_length())
    reverse = (int(f"{k:0{bits}b}"[::-1], 2) for k in range(1 << bits))
    return [items[k] for k in reverse if k < len(items)]
