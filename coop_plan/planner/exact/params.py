"""Parameters of the exact methods: one group per part that reads it, all in `ExactParams`.

The annotated type of a field is its valid range, checked on construction: `Share` is in [0, 1],
`Ratio`, `Seconds` and `Size` are at least 0, `Factor` and `Count` at least 1. Tolerances and cost
scales that a proof relies on are constants next to the code that uses them.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from coop_plan.planner.core.params import Count, Factor, Params, Ratio, Seconds, Share, Size, Within


@dataclass(frozen=True)
class SearchParams(Params):
    """Time limits and time shares of `optimal` (see `planner.exact.optimal`)."""

    default_seconds: Seconds = 60.0
    """Time limit of a request that sets none, s."""

    probe_seconds: Seconds = 10.0
    """Time limit of a feasibility probe (`any_schedule`), as in the search for `min`, s."""

    small_graph_ops: Size = 3000
    """Up to this many ops coop-offline runs to its own end, with `ample_seconds` left."""
    ample_seconds: Seconds = 10.0
    """Time left above which `small_graph_ops` applies, s."""
    heuristic_share: Share = 0.25
    """Share of the time left for coop-offline when it does not run to its own end."""

    seconds_per_op: Seconds = 2e-3
    """Time per op, s, below which `auto` leaves all of it to coop-offline."""

    reorder_share: Share = 0.2
    """Share of the time that `auto` reserves for other orders of first runs."""

    reorder_seconds: Seconds = 1.0
    """Minimum time for other orders, s, as a bounding process takes part of it to start."""

    tiny_graph_ops: Size = 50
    """Up to this many ops coop-offline always runs to its own end."""

    first_plan_share: Share = 0.25
    """Share of the time left for finding any plan if coop-offline finds none."""

    offline_share: Share = 0.2
    """Share of the time left for more coop-offline search once a model has timed out."""

    transfer_bounding_share: Share = 0.4
    """With transfers, share of the time left until the bounding process ends."""

    shrunk_arenas: tuple[Share, ...] = (0.995, 0.99, 0.98, 0.96, 0.93)
    """Budgets of further rounds, as shares of the arena, tried in order on layout conflicts."""

    small_gap: Ratio = 1e-4
    """
    Gap (cost / bound - 1) to which models of smaller budgets are solved, and below which none are.
    """

    tiny_linked_ops: Size = 20
    """With transfers, up to this many ops a plan is improved for `tiny_seconds` only."""
    tiny_seconds: Seconds = 2.0
    """Time for that, s."""

    def least_seconds(self, ops: int) -> float:
        """Time (s) in which a model of so many ops may be solved."""
        return self.seconds_per_op * ops if ops > self.tiny_graph_ops else 0.0

    def heuristic_runs_to_end(self, ops: int, left: float) -> bool:
        """True if coop-offline runs to its own end on this many ops with `left` s left."""
        return ops <= (self.small_graph_ops if left > self.ample_seconds else self.tiny_graph_ops)


@dataclass(frozen=True)
class RoundShares(Params):
    """Steps of a round on a hard model, as shares of the time left when the step begins."""

    cuts: Share
    """Share for path cuts."""

    solve: Share
    """Share for the solve after path cuts."""

    lns: Share
    """Share for improving the solution by LNS, if the solve timed out."""


@dataclass(frozen=True)
class RefinementParams(Params):
    """Rounds of the time-point model (see `planner.exact.refine`)."""

    first_gap: Ratio = 5e-4
    """Gap, as a share of the base cost, to which models are solved until a solution fits."""

    first_points: Count = 3
    """Time points of the first model; often these suffice."""

    points_per_round: Count = 4
    """Time points (or cuts) that a round adds after a small overflow."""

    large_overflow: Ratio = 1.0
    """Overflow, as a multiple of the capacity, above which each segment gets a time point."""
    max_points: Count = 12
    """Limit on the time points that a round adds after a large overflow."""

    easy_share: Share = 0.05
    """A model is hard if not solved within this share of the time left, or `easy_seconds`."""
    easy_seconds: Seconds = 1.0
    """Minimum time before a model counts as hard, s."""

    wide_gap: Ratio = 0.12
    """Gap (cost / bound - 1) above which a hard model starts the bounding process."""

    wide_gap_transfers: Ratio = 1e-3
    """The same gap with transfers, where only coop-offline makes plans."""

    all_points_ops: Size = 30
    """With transfers, up to this many ops every op is a time point from the first model on."""

    single_core_share: Share = 0.3
    """On one processor, share of the time left that the bounding process runs alone."""

    shares: RoundShares = RoundShares(0.12, 0.12, 0.05)
    """Time shares on hard models; the rest is for further rounds."""

    final_shares: RoundShares = RoundShares(0.25, 0.9, 0.5)
    """Time shares of the final rounds, when nothing else is left to do."""

    min_solve_seconds: Seconds = 5.0
    """Minimum time of a solve after path cuts, if that much is left, s."""


@dataclass(frozen=True)
class ModelParams(Params):
    """The time-point model (see `planner.exact.model.timepoint`)."""

    finest_rounding: Size = 40
    """Memory rows are also rounded down to multiples of each size that is at least room /
    `finest_rounding`; 0 turns rounded rows off.
    """


@dataclass(frozen=True)
class PathCutParams(Params):
    """Path cuts and their separation (see `planner.exact.model.paths`)."""

    min_violation: Annotated[float, Within(-math.inf, 1.0)] = 0.02
    """Minimum violation of an added cut, at most 1; if negative, satisfied cuts are added, too."""

    precision: tuple[tuple[Share, Share], ...] = (
        (1e-2, 2e-2),
        (3e-3, 5e-3),
        (1e-3, 5e-4),
        (1e-3, 5e-4),
    )
    """(relative accuracy of the relaxation, minimum relative gain of a round) pairs. A round that
    gains less moves on to the next pair; after the last pair separation ends. Bounds are valid at
    any accuracy.
    """

    quick_precision: tuple[tuple[Share, Share], ...] = ((1e-2, 2e-2), (1e-2, 2e-2))
    """The same pairs for quick comparisons of models."""

    simplex_columns: Size = 60_000
    """With transfers, most columns of a relaxation solved by simplex, as PDLP is slow."""

    cuts_per_round: Count = 3000
    """Maximum number of cuts added before the relaxation is solved again."""

    cuts_per_interval: Count = 40
    """Maximum number of new cuts between two time points, of four times as many paths."""

    cuts_per_op: Count = 2
    """Maximum number of new cuts of an interval whose paths end at the same op."""


@dataclass(frozen=True)
class LnsParams(Params):
    """Large neighbourhood search on the time-point model (see `planner.exact.primal.lns`)."""

    first_width: Share = 0.12
    """Initial share of the program in a neighbourhood."""

    widen: Factor = 1.1
    """Factor on that share after a neighbourhood that was solved to its end."""

    narrow: Share = 0.7
    """Factor on that share after a neighbourhood that hit its time or node limit."""

    min_width: Share = 0.04
    """Lower limit of that share."""

    max_width: Share = 0.7
    """Upper limit of that share."""

    step_seconds: Seconds = 3.0
    """Time limit of one neighbourhood, s."""

    patience: Count = 12
    """Consecutive neighbourhoods without improvement after which the search ends."""

    relative_gap: Ratio = 1e-3
    """Relative gap to which a neighbourhood is solved."""


@dataclass(frozen=True)
class GuidedReplanParams(Params):
    """Weights and budgets of the guided re-plan (see `planner.exact.primal.guided_replan`)."""

    evicted_weight: Ratio = 1e-3
    """Score weight of retention intervals in which the guiding schedule evicts the tensor."""
    kept_weight: Ratio = 1e3
    """Score weight of all other retention intervals."""

    arenas: tuple[Ratio, ...] = (1.04, 1.02, 1.01, 1.0, 0.99, 0.98, 0.97, 0.95, 0.93)
    """Logical budgets to try, as multiples of the arena."""

    alphas: tuple[Ratio, ...] = (1.0, 0.25)
    """Values of `planner.heuristic.eviction_run.Settings.alpha` to try with each budget."""


@dataclass(frozen=True)
class BoundingParams(Params):
    """Time points of the bounding process's relaxations (see `planner.exact.dual.bounding`)."""

    few_points: tuple[Count, ...] = (4, 8, 20)
    """With transfers, numbers of time points of the first models; the best one is refined."""
    integral_max_columns: Size = 6000
    """The best of the first models is also solved as a MILP, up to this many columns."""
    integral_seconds: Seconds = 20.0
    """Time limit of that MILP, s."""

    first_spread: Count = 10
    """Time points of the first step if no blocks repeat; each step doubles them."""

    samples: Annotated[int, Within(2, math.inf)] = 4
    """Copies of a repeated block on which candidate ops are compared, at least 2."""

    candidates: Count = 4
    """Ops compared at once as the next time point of a repeated block."""

    min_gain: Ratio = 2e-3
    """Relative increase of the bound for which an op is kept as a time point."""

    min_block_share: Share = 0.5
    """Minimum share of the ops over capacity that lie in repeated blocks, for blocks to be used."""


@dataclass(frozen=True)
class SolverParams(Params):
    """Solver processes (see `planner.exact.solver.process`)."""

    memory_bytes: Size = 8 << 30
    """Address-space limit of a process, bytes."""

    grace_seconds: Seconds = 0.3
    """Time between a solver's own limit and the kill of its process, s."""


@dataclass(frozen=True)
class CheckmateParams(Params):
    """The paper's integer program (see `planner.exact.checkmate`)."""

    max_variables: Size = 50_000
    """Programs with more variables are rejected; CBC solves about 10 000 in a minute."""

    default_seconds: Seconds = 3600.0
    """Time limit of a request that sets none, s (the paper's)."""

    solver: str = "PULP_CBC_CMD"
    """PuLP solver if the request names none; a name of `pulp.listSolvers()`."""

    allowances: tuple[Share, ...] = (0.0, 0.1, 0.2, 0.3)
    """Shares of the budget withheld from the relaxation, tried in order, for rounding."""


@dataclass(frozen=True)
class ExactParams:
    """All parameter groups of the exact methods; change them with `dataclasses.replace`."""

    search: SearchParams = SearchParams()
    refinement: RefinementParams = RefinementParams()
    model: ModelParams = ModelParams()
    path_cuts: PathCutParams = PathCutParams()
    lns: LnsParams = LnsParams()
    guided_replan: GuidedReplanParams = GuidedReplanParams()
    bounding: BoundingParams = BoundingParams()
    solver: SolverParams = SolverParams()
    checkmate: CheckmateParams = CheckmateParams()


DEFAULTS = ExactParams()
