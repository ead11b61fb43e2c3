"""Guided re-plan: coop-offline's eviction kernel, guided by a schedule that does not fit.

A schedule read out of the time-point model may overflow between time points, or have a layout
conflict. Its evictions remain good advice. The kernel takes advice as a weight per retention
interval and evicts only under memory pressure, so its schedule fits with nearly the same evictions.
"""

from dataclasses import replace

import numpy as np

from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import OUTSIDE, PlacedSchedule, Schedule
from coop_plan.planner.heuristic.eviction_run import Settings
from coop_plan.planner.heuristic.portfolio import Portfolio
from coop_plan.planner.method import Request


class GuidedReplan:
    """Keeps the kernel's arrays and best run between re-plans."""

    def __init__(self, problem: Problem, request: Request) -> None:
        self._portfolio = Portfolio(problem, replace(request, progress=None))

    def replan(self, plan: Schedule, cost_limit_us: float) -> PlacedSchedule | None:
        """A placed schedule within the arena that costs less than the limit (µs), or None."""
        portfolio = self._portfolio
        portfolio.best.cost_us = min(portfolio.best.cost_us, cost_limit_us)
        before = portfolio.best.found
        weight = self._weights(plan)
        for share in (1.04, 1.02, 1.01, 1.0, 0.99, 0.98, 0.97, 0.95, 0.93):
            for alpha in (1.0, 0.25):
                if portfolio.request.out_of_time():
                    break
                settings = Settings(weight, alpha, cap=False, foresee=False)
                portfolio.consider(int(portfolio.request.arena_bytes * share), settings)
        found = portfolio.best.found
        if found is None or found is before:
            return None
        return portfolio.solution().placed

    def _weights(self, plan: Schedule) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Weight per row entry of `Arrays.uses`: low if `plan` recomputes the tensor for it."""
        problem, arrays = plan.problem, self._portfolio.arrays
        weight = np.full(arrays.uses.size + 1, 1e3)
        # Tensor → event of its production or last use in program order.
        last_access: dict[int, int] = {}
        seen: set[int] = set()
        for event, op in enumerate(plan.variants):
            if op in seen:
                continue
            seen.add(op)
            for t, buffer in zip(problem.op_inputs[op], plan.reads(event), strict=True):
                if buffer != OUTSIDE and plan.first[buffer] > last_access[t]:
                    slot = int(arrays.uses_ptr[t]) + problem.consumers[t].index(op)
                    weight[slot] = 1e-3
                last_access[t] = event
            for t in problem.makes[op]:
                last_access[t] = event
        return weight
