"""Coop, DTR, DTE, DELTA and swap-only: one simulator of an eager execution at real addresses.

The simulator (`planner.online`) executes the program op by op. It knows nothing of later ops,
except that a tensor has no reader left in the program (its last reference dies): it is then freed.
Before an op it recomputes missing inputs; if an allocation fails, the method's eviction rule frees
memory. Recomputable in-place (Coop, section 3.4) gives a dying input's address to the output of an
elementwise op.

Sources: Coop, NeurIPS 2023, Algorithm 1 and sections 3.2-3.4; DTR, ICLR 2021, section 3 and
appendix C; and, for choices that the papers leave open, their authors' public code.

- DTR as its simulator (uwsampl/dtr-prototype, simrd/runtime/v2.py, `RuntimeV2EagerOptimized` with
  `DTREqClass`): an op pins its inputs when its turn comes, not the whole closure. A tensor is
  accessed when an op requests it. A recomputed tensor stays resident until the rule evicts it.
- DTE as MegEngine (imperative/src/impl/interpreter/interpreter_impl.cpp, `flush_apply_stack`),
  which does the same three.
- Coop as OneFlow (oneflow/core/vm/remat/util.cpp, `_IncReferenceNumOfRecomputedTensor` and
  `EagerlyEvictRemattedTensors`): the whole closure is pinned before it runs. A tensor recomputed
  only for other recomputes is freed when its last pin is removed. OneFlow retains tensors marked as
  needed by the backward; a graph has no such mark, and the program's own readers decide. Best fit;
  cost / staleness without the size in windows. A tensor's cost counts the evicted inputs and other
  outputs of its producer, not the tensors computed from it (core/eager/tensor_storage.cpp,
  `approx_neighbor_cost`). It is accessed when an op begins that reads or produces it
  (`UpdateRematInfo`, before the op's time is added).
"""

from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.memory_bounds import largest_working_set
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.online.run import OnlineRun, simulate_arena
from coop_plan.planner.online.state import Rule, Transfers


def solve_coop(problem: Problem, request: Request) -> Solution:
    """Coop with its three ideas, each unless ablated."""
    return _solution(run_coop(problem, request))


def run_coop(problem: Problem, request: Request) -> OnlineRun:
    """Coop's run, not yet a schedule."""
    return simulate_arena(
        problem,
        request,
        Rule(window="sliding-window" not in request.off),
        partition="partitioning" not in request.off,
        inplace="recomputable-inplace" not in request.off,
        dependents=False,
    )


def solve_dtr(problem: Problem, request: Request) -> Solution:
    """DTR's h with e*: evicts the tensor with the least cost / (bytes × staleness)."""
    return _solution(_run_single(problem, request, Rule()))


def solve_dte(problem: Problem, request: Request) -> Solution:
    """DTR's rule, counting free bytes adjacent to a tensor as its own."""
    return _solution(_run_single(problem, request, Rule(counts_neighbours=True)))


def solve_delta(problem: Problem, request: Request) -> Solution:
    """DELTA's filter and director with prefetch and overlap, each unless ablated."""
    return _solution(_run_with_transfers(problem, request, "filter", "director", recomputes=True))


def solve_swap_only(problem: Problem, request: Request) -> Solution:
    """Swaps the stalest tensor; recomputes nothing."""
    return _solution(_run_with_transfers(problem, request))


def _run_with_transfers(
    problem: Problem, request: Request, *parts: str, recomputes: bool = False
) -> OnlineRun:
    on = {part: part not in request.off for part in ("prefetch", "overlap", *parts)}
    transfers = Transfers(swaps=True, recomputes=recomputes, **on)
    if "transfers" not in problem.beyond_recomputation:
        if not transfers.recomputes:
            raise DoesNotFitError(largest_working_set(problem).op)
        return _run_single(problem, request, Rule())
    return simulate_arena(
        problem, request, Rule(), partition=False, inplace=False, transfers=transfers
    )


def _run_single(problem: Problem, request: Request, rule: Rule) -> OnlineRun:
    return simulate_arena(
        problem, request, rule, partition=False, inplace=False, whole_closure=False
    )


def _solution(run: OnlineRun) -> Solution:
    return Solution(
        run.placed, eviction_free_ratio=run.eviction_free_ratio, evictions=run.evictions
    )
