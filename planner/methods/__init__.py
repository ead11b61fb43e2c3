"""The registry of planning methods."""

from collections.abc import Mapping

from planner.exact import checkmate
from planner.exact.auto import solve_auto
from planner.exact.optimal import solve_optimal
from planner.methods.base import MethodInfo, Progress, Request, Solution
from planner.methods.keep_all import solve_keep_all
from planner.methods.online import COOP_SWITCHES, solve_coop, solve_dte, solve_dtr
from planner.offline.solve import solve_coop_offline

METHODS: Mapping[str, MethodInfo] = {
    info.name: info
    for info in (
        MethodInfo(
            "keep-all",
            "no eviction, best placement: the baseline of every ratio",
            "Steiner et al., OLLA, 2022 (layout alone)",
            solve_keep_all,
        ),
        MethodInfo(
            "coop",
            "online; evicts the cheapest contiguous set of blocks",
            "Zhang et al., Coop: Memory is not a Commodity, NeurIPS 2023, Algorithm 1",
            solve_coop,
            switches=COOP_SWITCHES,
        ),
        MethodInfo(
            "coop-offline",
            "knows the whole step: plans evictions first, places second, near the optimum",
            "ours; closure cost / (bytes x distance to next use^alpha), see planner.offline",
            solve_coop_offline,
        ),
        MethodInfo(
            "dtr",
            "online; evicts the single tensor of least cost / (bytes x staleness)",
            "Kirisame et al., Dynamic Tensor Rematerialization, ICLR 2021, section 3",
            solve_dtr,
        ),
        MethodInfo(
            "dte",
            "as dtr, counting the free bytes next to a tensor as its own",
            "Hu et al., MegTaiChi (MegEngine's DTE), ICS 2022",
            solve_dte,
        ),
        MethodInfo(
            "checkmate",
            "the paper's integer program with CBC; small graphs only",
            "Jain et al., Checkmate, MLSys 2020, section 4 (relaxed: section 5)",
            checkmate.solve_checkmate,
            anytime=True,
            takes_solver=True,
            switches=checkmate.SWITCHES,
        ),
        MethodInfo(
            "optimal",
            "mixed-integer program refined until it fits, with a proved bound; best so far in time",
            "ours; after Checkmate, MLSys 2020, section 4; see planner.exact.timepoint",
            solve_optimal,
            anytime=True,
        ),
        MethodInfo(
            "auto",
            "keep-all, then coop-offline at once, then optimal until the time limit",
            "ours",
            solve_auto,
            anytime=True,
        ),
    )
}

__all__ = ["METHODS", "MethodInfo", "Progress", "Request", "Solution"]
