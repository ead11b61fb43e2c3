"""Registry of planning methods; the modules of a method are imported at its first use."""

from collections.abc import Mapping
from importlib import import_module

from coop_plan.planner.core.problem import Problem
from coop_plan.planner.method import MethodInfo, Request, Solution, Solve

DELTA_SWITCHES = {
    "filter": "evict the stalest tensor, not the one of least cost / (bytes x staleness)",
    "director": "swap every evicted tensor that may be swapped, whatever its cost",
    "prefetch": "prefetch a tensor only when an op reads it",
    "overlap": "start a copy to the host only when an allocation fails",
}

REORDER_SWITCHES = {"reorder": "run all ops for the first time in program order"}


def _imported(module: str, function: str) -> Solve:
    """A method's function, whose module in `coop_plan.planner` is imported at the first call."""

    def solve(problem: Problem, request: Request) -> Solution:
        found: Solve = getattr(import_module(f"coop_plan.planner.{module}"), function)
        return found(problem, request)

    return solve


def _coop_offline(problem: Problem, request: Request) -> Solution:
    from coop_plan.planner.heuristic.coop_offline import solve_coop_offline

    if "variants" in problem.beyond_recomputation:
        from coop_plan.planner.exact.variants import solve_with_variants

        return solve_with_variants(problem, request, prove=False)
    return solve_coop_offline(problem, request)


def _optimal(problem: Problem, request: Request) -> Solution:
    from coop_plan.planner.exact.optimal import solve_optimal

    if "variants" in problem.beyond_recomputation:
        from coop_plan.planner.exact.variants import solve_with_variants

        return solve_with_variants(problem, request.in_program_order(), prove=True)
    return solve_optimal(problem, request)


def _auto(problem: Problem, request: Request) -> Solution:
    from coop_plan.planner.exact.auto import solve_auto

    if "variants" in problem.beyond_recomputation:
        from coop_plan.planner.exact.variants import solve_with_variants

        return solve_with_variants(problem, request, prove=True)
    return solve_auto(problem, request)


METHODS: Mapping[str, MethodInfo] = {
    info.name: info
    for info in (
        MethodInfo(
            "keep-all",
            "no eviction, only placement: the baseline of every ratio",
            "Steiner et al., OLLA, 2022 (layout alone)",
            _imported("keep_all", "solve_keep_all"),
        ),
        MethodInfo(
            "coop",
            "online; evicts the cheapest contiguous set of blocks",
            "Zhang et al., Coop: Memory is not a Commodity, NeurIPS 2023, Algorithm 1",
            _imported("online.methods", "solve_coop"),
            switches={
                "sliding-window": "evict one tensor at a time, by cost / (bytes x staleness), as"
                " dtr does",
                "partitioning": "allocate cheap and expensive tensors from the same end",
                "recomputable-inplace": "copy in-place pairs instead of sharing one address",
            },
        ),
        MethodInfo(
            "coop-offline",
            "offline; plans evictions for the whole step, then places; near the optimum",
            "ours; closure cost / (bytes x distance to next use^alpha), see planner.heuristic",
            _coop_offline,
            transfers=True,
            homes="searched",
            variants=True,
            switches=REORDER_SWITCHES | {"walk": "disable the final local search"},
        ),
        MethodInfo(
            "dtr",
            "online; evicts the single tensor of least cost / (bytes x staleness)",
            "Kirisame et al., Dynamic Tensor Rematerialization, ICLR 2021, section 3",
            _imported("online.methods", "solve_dtr"),
        ),
        MethodInfo(
            "dte",
            "as dtr, counting the free bytes next to a tensor as its own",
            "Hu et al., MegTaiChi (MegEngine's DTE), ICS 2022",
            _imported("online.methods", "solve_dte"),
        ),
        MethodInfo(
            "delta",
            "online; a filter selects evictions, a director whether to swap or recompute",
            "Tang et al., DELTA, arXiv 2203.15980, 2022; open details: planner.online.delta",
            _imported("online.methods", "solve_delta"),
            transfers=True,
            homes="all",
            switches=DELTA_SWITCHES,
        ),
        MethodInfo(
            "swap-only",
            "online; offloads the stalest tensor, recomputes nothing",
            "after Rhu et al., vDNN, MICRO 2016, and Peng et al., Capuchin, ASPLOS 2020",
            _imported("online.methods", "solve_swap_only"),
            transfers=True,
            homes="all",
            switches={name: DELTA_SWITCHES[name] for name in ("prefetch", "overlap")},
        ),
        MethodInfo(
            "checkmate",
            "the paper's integer program with CBC; small graphs only",
            "Jain et al., Checkmate, MLSys 2020, section 4 (relaxed: section 5)",
            _imported("exact.checkmate", "solve_checkmate"),
            anytime=True,
            takes_solver=True,
            switches={
                "integral": "solve the LP relaxation with two-phase rounding (section 5) instead"
            },
        ),
        MethodInfo(
            "monet",
            "the paper's integer program over operator variants; small graphs only",
            "Shah et al., Memory Optimization for Deep Networks, ICLR 2021, sections 3 and 4",
            _imported("exact.monet", "solve_monet"),
            anytime=True,
            variants=True,
        ),
        MethodInfo(
            "optimal",
            "mixed-integer program, refined until it fits; anytime, with a proved bound",
            "ours; after Checkmate, MLSys 2020, section 4; see planner.exact",
            _optimal,
            anytime=True,
            starts_from="coop-offline",
            transfers=True,
            homes="searched",
            variants=True,
        ),
        MethodInfo(
            "auto",
            "keep-all, then coop-offline, then optimal, then other orders of first runs",
            "ours",
            _auto,
            anytime=True,
            starts_from="coop-offline",
            transfers=True,
            homes="searched",
            variants=True,
            switches=REORDER_SWITCHES,
        ),
    )
}
