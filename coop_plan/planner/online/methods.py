"""
Coop, DTR and DTE: one simulator of an eager execution at real addresses.

The simulator (`planner.online`) runs the program op by op and knows nothing of what is to come,
except when a tensor has no reader left in the program (its references die): then it goes, once.
Before an op it recomputes what is missing; when an allocation fails, the method's eviction rule
makes room. Recomputed in-place (Coop, section 3.4) hands a dying input's address to the output of
an elementwise op.

Sources: Coop, NeurIPS 2023, Algorithm 1 and sections 3.2-3.4; DTR, ICLR 2021, section 3 and
appendix C; and, where the papers leave a choice open, what their authors' public code does.

- DTR as its simulator (uwsampl/dtr-prototype, simrd/runtime/v2.py, `RuntimeV2EagerOptimized` with
  `DTREqClass`): an op locks what it reads when its turn comes, not the closure; a tensor is
  accessed when an op asks for it; what is recomputed stays until the rule evicts it.
- DTE as MegEngine (imperative/src/impl/interpreter/interpreter_impl.cpp, `flush_apply_stack`),
  which does the same three.
- Coop as OneFlow (oneflow/core/vm/remat/util.cpp, `_IncReferenceNumOfRecomputedTensor` and
  `EagerlyEvictRemattedTensors`): the whole closure is pinned before it runs, and a tensor that was
  recomputed only for others goes when nothing pins it. OneFlow keeps those that it marked as needed
  by the backward; a graph does not have that mark, and here the program's own readers decide. Best
  fit; cost / staleness without the size in windows. A tensor's cost counts the evicted ones that it
  and its twins are made from, not those made from it (core/eager/tensor_storage.cpp,
  `approx_neighbor_cost`); it is accessed when an op begins that reads or makes it
  (`UpdateRematInfo`, before the op's time is added).
"""

import math

from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.memory_bounds import largest_working_set
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.online.params import DEFAULTS, OnlineParams
from coop_plan.planner.online.run import OnlineRun, simulate_arena
from coop_plan.planner.online.simulator import SINGLE, SINGLE_WITH_NEIGHBOURS, WINDOW
from coop_plan.planner.online.transfers import (
    DIRECTS,
    FILTERS,
    OVERLAPS,
    PREFETCHES,
    RECOMPUTES,
    SWAPS_OUT,
)


def solve_coop(problem: Problem, request: Request, params: OnlineParams = DEFAULTS) -> Solution:
    """Coop with its three ideas, each unless switched off."""
    return _solution(run_coop(problem, request, params))


def run_coop(
    problem: Problem,
    request: Request,
    params: OnlineParams = DEFAULTS,
    cost_limit: float = math.inf,
) -> OnlineRun:
    """Coop's run, before it is made a schedule; `TooDearError` above the limit (µs)."""
    return simulate_arena(
        problem,
        request,
        WINDOW if "sliding-window" not in request.off else SINGLE,
        partition="partitioning" not in request.off,
        inplace="recomputable-inplace" not in request.off,
        dependents=False,
        cost_limit=cost_limit,
        params=params,
    )


def solve_dtr(problem: Problem, request: Request, params: OnlineParams = DEFAULTS) -> Solution:
    """DTR's h with e*: minimum of cost / (bytes × staleness), one tensor at a time."""
    return _solution(_run_single(problem, request, SINGLE, params))


def solve_dte(problem: Problem, request: Request, params: OnlineParams = DEFAULTS) -> Solution:
    """DTR's rule with the free bytes next to a tensor counted as its own."""
    return _solution(_run_single(problem, request, SINGLE_WITH_NEIGHBOURS, params))


def solve_delta(problem: Problem, request: Request, params: OnlineParams = DEFAULTS) -> Solution:
    """DELTA's filter and director with prefetch and overlap, each unless switched off."""
    flags = {"director": DIRECTS, "filter": FILTERS, "prefetch": PREFETCHES, "overlap": OVERLAPS}
    on = [flag for switch, flag in flags.items() if switch not in request.off]
    return _solution(_run_linked(problem, request, SWAPS_OUT + RECOMPUTES + sum(on), params))


def solve_swap_only(
    problem: Problem, request: Request, params: OnlineParams = DEFAULTS
) -> Solution:
    """The stalest tensor is swapped, and nothing is computed again."""
    flags = {"prefetch": PREFETCHES, "overlap": OVERLAPS}
    on = [flag for switch, flag in flags.items() if switch not in request.off]
    return _solution(_run_linked(problem, request, SWAPS_OUT + sum(on), params))


def _run_linked(
    problem: Problem, request: Request, transfers: int, params: OnlineParams
) -> OnlineRun:
    if "transfers" not in problem.beyond_recomputation:
        if not transfers & RECOMPUTES:
            raise DoesNotFitError(largest_working_set(problem).op)
        return _run_single(problem, request, SINGLE, params)
    return simulate_arena(
        problem,
        request,
        SINGLE,
        partition=False,
        inplace=False,
        transfers=transfers,
        params=params,
    )


def _run_single(problem: Problem, request: Request, rule: int, params: OnlineParams) -> OnlineRun:
    return simulate_arena(
        problem,
        request,
        rule,
        partition=False,
        inplace=False,
        whole_closure=False,
        params=params,
    )


def _solution(run: OnlineRun) -> Solution:
    return Solution(
        run.placed,
        eviction_free_ratio=run.eviction_free_ratio,
        evictions=run.evictions,
    )
