"""Choice of variants: the search over them, combined with a method that plans default variants."""

import contextlib
import time
from dataclasses import replace

import numpy as np

from coop_plan.planner.core.errors import DoesNotFitError, TimeLimitError
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import NoScheduleError, PlacedSchedule, Schedule
from coop_plan.planner.exact.model.variants import fix_variants, restore_variants
from coop_plan.planner.exact.primal.variant_search import VariantSearch
from coop_plan.planner.exact.variant_params import DEFAULTS, VariantParams
from coop_plan.planner.heuristic.coop_offline import in_any_order, solve_coop_offline
from coop_plan.planner.method import Request, Solution, Solve
from coop_plan.planner.search.compute.annealing import cheaper, reordered


def solve_with_variants(
    problem: Problem,
    request: Request,
    method: Solve,
    *,
    prove: bool,
    params: VariantParams = DEFAULTS,
) -> Solution:
    """Returns the cheapest schedule found with a variant per run; with `prove` also its bound.

    The search starts from coop-offline's schedule of default variants. With transfers half of the
    time goes to `method`, which uses default variants only, as the search over variants has no
    transfers. The cheaper schedule wins, and there is no bound. First runs are in program order;
    the remaining time goes to other orders of the chosen runs. Without a time limit, coop-offline's
    schedule of default variants in any order is returned if it costs less.

    Raises:
        DoesNotFitError: no schedule was found.
    """
    transfers = "transfers" in problem.beyond_recomputation
    share = 0.5 if transfers else params.default_variants_share
    until = None
    end, reorder = request.deadline, False
    if end is not None:
        now = time.monotonic()
        until = now + (end - now) * share
        reorder = not (transfers or request.any_schedule or "reorder" in request.off)
        if reorder:
            request = replace(request, deadline=end - (end - now) * params.reorder_share)
    search = VariantSearch(problem, request, params)
    default: Solution | None = None
    with contextlib.suppress(DoesNotFitError, TimeLimitError):
        first = method if transfers else solve_coop_offline
        default = first(problem, replace(request.in_program_order(), deadline=until))
        if not transfers:
            search.offer(default.placed)
    if not (request.any_schedule and default is not None):
        try:
            search.run(prove=prove and not request.any_schedule)
        except (DoesNotFitError, TimeLimitError):
            if default is None and search.placed is None:
                raise
    if search.placed is None or (default is not None and default.placed.cost_us <= search.cost_us):
        assert default is not None
        search.placed = default.placed
    solution = Solution(search.placed)
    if prove and not transfers:
        solution = replace(
            solution,
            status="optimal" if search.proved else "feasible",
            lower_bound_us=min(search.bound_us, search.cost_us),
            bound_model="program-order",
        )
    if end is None and not (transfers or request.any_schedule or "reorder" in request.off):
        solution = cheaper(problem, solution, in_any_order(problem, request))
    if reorder:
        placed = _reordered(problem, replace(request, deadline=end), search.placed)
        solution = cheaper(problem, solution, placed)
    return solution


def _reordered(problem: Problem, request: Request, placed: PlacedSchedule) -> PlacedSchedule | None:
    """A cheaper schedule in any order, each op in the variant of its first run, or None."""
    chosen: dict[int, int] = {}
    ops: list[int] = []
    for variant in placed.schedule.variants:
        ops.append(problem.variants[variant].op)
        chosen.setdefault(ops[-1], variant)
    variants = [chosen[op] for op in range(problem.op_count)]
    sequence = np.array(ops, dtype=np.int64)
    try:
        alone = fix_variants(problem, variants)
        Schedule.of(alone, sequence)
    except NoScheduleError:  # a later run makes a tensor that the first one does not
        return None
    found = reordered(alone, sequence, placed.cost_us, request)
    return None if found is None else restore_variants(problem, variants, found)
