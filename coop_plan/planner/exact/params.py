"""
Every parameter of the exact methods: what it means, its unit, and what it may be.

One group for each part that reads it, all of them in `ExactParams`. The type of a field is its unit
and range, checked when a group is made. What is part of a proof, such as tolerances and the scale
of costs, is no parameter: it stands with the code that relies on it.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from coop_plan.planner.core.params import Count, Params, Ratio, Seconds, Share, Size, Within


@dataclass(frozen=True)
class SearchParams(Params):
    """How `optimal` spends its time (see `planner.exact.optimal`)."""

    default_seconds: Seconds = 60.0
    """Time limit of a request without one."""

    probe_seconds: Seconds = 10.0
    """The same, where any schedule will do: one of many budgets tried in search of the smallest."""

    small_graph_ops: Size = 3000
    ample_seconds: Seconds = 10.0
    heuristic_share: Share = 0.25
    """coop-offline takes its own time on graphs up to `small_ops` ops when there are more than
    `long_seconds` left, and else this share of the time left;"""

    reorder_share: Share = 0.2
    """`auto` keeps this share of the time for other orders of first runs;"""

    reorder_seconds: Seconds = 1.0
    """so long if it is there, however soon `optimal` ends: a process that proves takes some of it
    to start."""

    tiny_graph_ops: Size = 50
    """on graphs up to so many always: a fraction of a second."""

    first_plan_share: Share = 0.25
    """Share of the time left for finding any plan at all where coop-offline finds none."""

    offline_share: Share = 0.2
    """Share of the time left for more of coop-offline once a model took all of its own."""

    transfer_bounding_share: Share = 0.4
    """With transfers, share of the time left for which bounds are looked for beside the search;
    after that all processors search."""

    fix_share: Share = 0.9
    """Share of the time left that one run of fix-and-refine may take."""

    fix_arenas: tuple[Share, ...] = (1.0, 0.99, 0.975)
    """Shares of the arena to fix and refine within, in turn as long as only a layout is missing."""

    shrunk_arenas: tuple[Share, ...] = (0.995, 0.99, 0.98, 0.96, 0.93)
    """Logical budgets, as shares of the arena, for plans that are easier to place."""

    small_gap: Ratio = 1e-4
    """Cost over bound, minus one, below which smaller logical budgets are not worth trying; and the
    gap, as a share of the base cost, to which their models are solved."""

    place_work: Size = 1_000_000_000
    """Effort of `planner.placement.layout.lay_out` for what fix-and-refine finds, as far as time allows."""

    joint_ops: Size = 20
    """Up to so many ops eviction and layout are decided as one, where both in turn fail."""

    joint_copies: Count = 3
    """Runs an op may have then, the first one included."""

    joint_seconds: Seconds = 2.0
    """How long it may look for a better plan; for any plan at all, as long as there is time. With
    transfers, which that model does not have, coop-offline goes on for so long instead."""

    def heuristic_runs_to_end(self, ops: int, left: float) -> bool:
        """Whether coop-offline may take its own time on so many ops, with so much left (s)."""
        return ops <= (self.small_graph_ops if left > self.ample_seconds else self.tiny_graph_ops)


@dataclass(frozen=True)
class RoundShares(Params):
    """For the steps of a round on a hard model: shares of the time left when each begins."""

    cuts: Share
    """For path cuts."""

    solve: Share
    """For the solve after that."""

    lns: Share
    """For improving its solution if it ran out of time."""


@dataclass(frozen=True)
class RefinementParams(Params):
    """Rounds of the time-point model (see `planner.exact.refine`)."""

    first_gap: Ratio = 5e-4
    """Share of the base cost to which models are solved until a solution fits."""

    first_points: Count = 3
    """Time points to begin with: often these are enough."""

    points_per_round: Count = 4
    """Time points, or else cuts, that a round adds where a solution overflows a little."""

    large_overflow: Ratio = 1.0
    max_points: Count = 12
    """From so large an excess on, in capacities, there is one in each segment, up to so many."""

    easy_share: Share = 0.05
    easy_seconds: Seconds = 1.0
    """A model may be solved as it is within this share of the time left, or so long if that is
    more; where it is not, it counts as hard."""

    wide_gap: Ratio = 0.12
    """Cost over bound, minus one, above which a hard model is worth a process beside the search for
    bounds, and longer climbs of coop-offline."""

    wide_gap_transfers: Ratio = 1e-3
    """The same with transfers, for which coop-offline is the one that finds plans."""

    all_points_ops: Size = 30
    """With transfers, all ops are time points from the beginning where there are no more."""

    single_core_share: Share = 0.3
    """Share of the time left for those bounds where there is one processor only."""

    shares: RoundShares = RoundShares(0.12, 0.12, 0.05)
    """For hard models; the rest is for fix-and-refine and closer looks."""

    final_shares: RoundShares = RoundShares(0.25, 0.9, 0.5)
    """The same once nothing else is left to do."""

    min_solve_seconds: Seconds = 5.0
    """A solve after path cuts gets so much at least, if there is as much."""


@dataclass(frozen=True)
class ModelParams(Params):
    """The time-point model itself (see `planner.exact.model.timepoint`)."""

    finest_rounding: Size = 40
    """Memory rows are also rounded to multiples of sizes down to room / `finest`; 0: to none."""


@dataclass(frozen=True)
class PathCutParams(Params):
    """Path cuts and their separation (see `planner.exact.model.paths`)."""

    min_violation: Annotated[float, Within(-math.inf, 1.0)] = 0.02
    """Cuts that are violated by less are not worth a row; negative: those that hold anyway are."""

    precision: tuple[tuple[Share, Share], ...] = (
        (1e-2, 2e-2),
        (3e-3, 5e-3),
        (1e-3, 5e-4),
        (1e-3, 5e-4),
    )
    """Relative accuracy of relaxations, and the share of the bound by which a round must raise it.
    After one that does not, the next pair holds; it ends after the last. What is proved does not
    depend on this."""

    quick_precision: tuple[tuple[Share, Share], ...] = ((1e-2, 2e-2), (1e-2, 2e-2))
    """The same where it has to be quick."""

    simplex_columns: Size = 60_000
    """With transfers, relaxations of up to so many columns are solved to their optimum: first-order
    methods are far from it for long."""

    cuts_per_round: Count = 3000
    """New cuts before the relaxation is solved again."""

    cuts_per_interval: Count = 40
    """New cuts between the same two time points, times four before paths that share an end go."""

    cuts_per_op: Count = 2
    """How many of them may end at the same op."""


@dataclass(frozen=True)
class LnsParams(Params):
    """Large neighbourhood search (see `planner.exact.primal.lns`)."""

    widths: tuple[Share, ...] = (0.1, 0.2, 0.3)
    """Shares of the program that are set free at a time, one drawn each time."""

    step_seconds: Seconds = 3.0
    """Time limit of one stretch."""

    patience: Count = 12
    """Stretches without success before giving up."""

    relative_gap: Ratio = 1e-3
    """Share of the objective to which a stretch is solved."""


@dataclass(frozen=True)
class FixAndRefineParams(Params):
    """Windows between fixed time points (see `planner.exact.primal.fix_and_refine`)."""

    gap: Ratio = 5e-3
    """Share of the base cost to which windows are solved."""

    window_share: Share = 0.25
    window_seconds: Seconds = 1.0
    """Time of one window: this share of what is left, or so long if that is more."""

    points_per_window: Count = 4
    """Time points that a window gets at once."""

    margin_share: Share = 0.01
    excess_share: Ratio = 0.33
    """Bytes to free where a layout did not fit: this share of the capacity, or else of the excess,
    whichever is more."""

    max_conflicts: Count = 3
    """Crowds of the same op at the same position before it may not run there again."""


@dataclass(frozen=True)
class RepairParams(Params):
    """Repairs of readouts that overflow (see `planner.exact.primal.repair`)."""

    max_cost_share: Ratio = 0.02
    """Share of the base cost that what goes for one overflow may cost at most."""

    max_runs: Count = 3
    """How often an op may run for the same position before drops count as stuck."""


@dataclass(frozen=True)
class GuidedReplanParams(Params):
    """Plans as advice for coop-offline's kernel (see `planner.exact.primal.guided_replan`)."""

    evicted_weight: Ratio = 1e-3
    kept_weight: Ratio = 1e3
    """Weights of retention intervals that the plan gives up, and of those that it does not."""

    arenas: tuple[Ratio, ...] = (1.04, 1.02, 1.01, 1.0, 0.99, 0.98, 0.97, 0.95, 0.93)
    """Logical budgets to try, as shares of the arena."""

    alphas: tuple[Ratio, ...] = (1.0, 0.25)
    """Values of `planner.heuristic.eviction_run.Settings.alpha` to try with each."""


@dataclass(frozen=True)
class BoundingParams(Params):
    """Time points of the relaxations beside the search (see `planner.exact.dual.bounding`)."""

    few_points: tuple[Count, ...] = (4, 8, 20)
    integral_max_columns: Size = 6000
    integral_seconds: Seconds = 20.0
    """With transfers, so many time points are tried, and the best of these models is also solved as
    it is, if it has no more columns, for so long, before there are more time points."""

    first_spread: Count = 10
    """Time points of the first step where nothing repeats; each step has twice as many."""

    samples: Annotated[int, Within(2, math.inf)] = 4
    """Copies of a block from which the choice of an op is learned."""

    candidates: Count = 4
    """How many ops are tried beside those that were chosen before."""

    min_gain: Ratio = 2e-3
    """Share by which an op must raise the bound to be a time point from then on."""

    min_block_share: Share = 0.5
    """Blocks are used if so much of where keeping everything does not fit lies in them."""


@dataclass(frozen=True)
class PackingParams(Params):
    """Layouts by constraint programming (see `planner.exact.primal.packing`)."""

    seconds: Seconds = 5.0
    """How long the solver may look for a layout of one schedule."""

    max_blocks: Size = 1500
    """Beyond so many blocks the model is not worth building."""


@dataclass(frozen=True)
class SolverParams(Params):
    """The processes that solve (see `planner.exact.solver.process`)."""

    memory_bytes: Size = 8 << 30
    """Address space that each may take."""

    grace_seconds: Seconds = 0.3
    """How much earlier than the kill a solver is asked to stop by itself."""


@dataclass(frozen=True)
class CheckmateParams(Params):
    """The integer program of the paper (see `planner.exact.checkmate`)."""

    max_variables: Size = 50_000
    """More are refused: CBC closes about 10 000 in a minute."""

    default_seconds: Seconds = 3600.0
    """Time limit of a request without one, the paper's own."""

    solver: str = "PULP_CBC_CMD"
    """PuLP's solver where the request names none: a name in `pulp.listSolvers()`."""

    allowances: tuple[Share, ...] = (0.0, 0.1, 0.2, 0.3)
    """Shares of the budget denied to the relaxation, in turn, so that rounding may exceed it."""


@dataclass(frozen=True)
class ExactParams:
    """All of it, a group for each part; `dataclasses.replace` makes variants."""

    search: SearchParams = SearchParams()
    refinement: RefinementParams = RefinementParams()
    model: ModelParams = ModelParams()
    path_cuts: PathCutParams = PathCutParams()
    lns: LnsParams = LnsParams()
    fix_and_refine: FixAndRefineParams = FixAndRefineParams()
    repair: RepairParams = RepairParams()
    guided_replan: GuidedReplanParams = GuidedReplanParams()
    bounding: BoundingParams = BoundingParams()
    packing: PackingParams = PackingParams()
    solver: SolverParams = SolverParams()
    checkmate: CheckmateParams = CheckmateParams()


DEFAULTS = ExactParams()
"""What holds where a caller gives none."""
