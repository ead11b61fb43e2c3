"""Parameters of coop-offline, one group per phase.

The type of a field is its valid range, see `planner.core.params`.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from coop_plan.planner.core.params import (
    Count,
    Factor,
    Params,
    Positive,
    PositiveShare,
    Ratio,
    Share,
    Size,
    Within,
)
from coop_plan.planner.search.compute.params import DEFAULTS as MOVES
from coop_plan.planner.search.compute.params import MoveParams, SequenceParams
from coop_plan.planner.search.makespan.params import DEFAULTS as MAKESPAN
from coop_plan.planner.search.makespan.params import MakespanParams

Rule = tuple[Positive, bool, bool]
"""Scoring rule: exponent alpha of the distance, `cap` and `foresee` (see `EvictionState`)."""

EXPONENTS = (0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class EvictionParams(Params):
    """Offline eviction kernel (`planner.heuristic.eviction`)."""

    closure_ops: Count = 64
    """Most ops counted in the estimate of a closure's cost."""

    unneeded_ancestors: Size = 256
    """Most ancestors, dead and needed by no evicted tensor, through which a change is followed."""

    pool_size: Count = 64
    """Most victims that one scan of the live tensors selects."""

    pool_min_live: Size = 512
    """Least number of live tensors for which a scan's victims are kept for later evictions."""

    heap_min_live: Size = 1 << 14
    """Least number of live tensors for which a heap by score replaces the scans."""

    pool_max_age: Size = 64
    """Most program positions for which a pool of victims is used."""

    least_distance: Positive = 1e-9
    """Added to each distance, in program positions, so that none is 0."""

    max_recomputes_per_op: Size = 8
    """Most recomputes, as a multiple of the program's ops, before a run is abandoned."""

    chunk_events: Count = 4096
    """Events between two checks of the time limit."""

    small_divisor: Count = 4096
    """Tensors smaller than the budget / this are evicted only if no larger one can be."""


@dataclass(frozen=True)
class PortfolioParams(Params):
    """Scoring rules and the grid of logical budgets (`planner.heuristic.portfolio`)."""

    rules: tuple[Rule, ...] = tuple(
        (alpha, cap, foresee)
        for foresee in (False, True)
        for alpha in (1 / 16, *EXPONENTS)
        for cap in (False, True)
    )
    """Scoring rules to try; `foresee` helps where an eviction extends its inputs' lifetimes."""

    grid_ratio: Annotated[float, Within(math.nextafter(1.0, 2.0), math.inf)] = 1.015
    """Ratio of neighbouring logical budgets of the grid."""

    grid_windows: tuple[tuple[int, int], ...] = ((-8, 8), (-20, -8), (-44, -20))
    """Windows of grid steps around the arena, (above, up to), tried until one has a plan."""

    probe_stride: Count = 4
    """Grid steps between budgets of the later windows if any feasible schedule is enough."""

    fine_ratio: Annotated[float, Within(math.nextafter(1.0, 2.0), math.inf)] = 1.0025
    """Ratio of neighbouring logical budgets of the fine sweep, near the arena's size."""

    fine_steps: Count = 16
    """Logical budgets of the fine sweep."""

    fine_steps_above: Size = 4
    """Those of them above the arena: a run may need less than its logical budget."""

    fine_layouts: Size = 48
    """Most layouts of the fine sweep."""

    fine_runs_per_op: Positive = 2.0
    """Least runs of an op in the incumbent, on average, for which there is a fine sweep."""

    small_ops: Size = 500
    """Largest number of ops for which every rule is tried on the whole grid."""

    large_graph_rules: Count = 4
    """Number of rules tried on the grid for larger graphs."""

    max_unplaced: Size = 4
    """Most runs, of those without a greedy layout, whose layout is searched."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(low >= high for low, high in self.grid_windows):
            raise ValueError("each window of grid_windows must end after it starts")


@dataclass(frozen=True)
class HillClimbParams(Params):
    """Hill climbing over the weights of retention intervals (`planner.heuristic.hill_climb`)."""

    simulated_ops: Size = 35_000
    """Length of the climb, as simulated ops over all steps."""

    min_steps: Size = 20
    """Least number of steps."""

    max_steps: Size = 500
    """Most steps; at least `min_steps`."""
    steps_per_op: Count = 4
    """Most steps per op of the program."""

    spacing: Count = 2
    """Grid steps between neighbouring starts."""

    starts_below: Size = 2
    """Starts below the incumbent's grid step."""

    starts_above: Size = 1
    """Starts above the incumbent's grid step."""

    slope_steps: Count = 3
    """Grid steps to either side for measuring the value of memory (`HillClimb.slope`)."""

    rank_steps: Count = 16
    """Grid steps that share one ranking of the rules."""

    spreads: tuple[Ratio, ...] = (0.1, 0.3, 1.0)
    """Standard deviations of a weight's logarithm; a step draws one."""

    perturbed_shares: tuple[Share, ...] = (0.02, 0.1, 0.5)
    """Shares of the weights to perturb; a step draws one."""

    budget_spread: Ratio = 0.01
    """Standard deviation of the logical budget's logarithm."""

    exponents: tuple[Positive, ...] = EXPONENTS
    """Exponents of the distance; a step draws one at `exponent_chance`."""

    exponent_chance: Share = 0.1
    """Probability of drawing another exponent of the distance."""

    correction_chance: Share = 0.5
    """Probability of applying learned corrections to the weights instead of noise."""

    corrected_shares: tuple[Share, ...] = (0.1, 0.5, 1.0)
    """Shares of the weights to correct; a step draws one."""

    max_correction: Factor = 10.0
    """Largest factor of a correction, up or down."""

    report_steps: Count = 16
    """Steps between two progress reports."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_steps < self.min_steps:
            raise ValueError("max_steps must be at least min_steps")


@dataclass(frozen=True)
class SequenceAnnealingParams(SequenceParams):
    """Annealing of the sequence (`planner.search.compute.annealing`)."""

    chunk_seconds: Positive = 0.01
    """Seconds between two checks of the result, about."""

    initial_pace: Positive = 1000.0
    """Metropolis steps per second, before a measurement."""

    pace_share: PositiveShare = 0.2
    """Weight of the last chunk in the moving average of the pace."""

    max_layout_work: Size = 500_000_000
    """Most effort of one layout (`planner.placement.place`); it doubles after each failure."""

    margin: Share = 1e-3
    """Memory to keep free at the fullest event of a failed layout, as a share of the arena."""

    fixed_steps_per_event: Count = 25
    """Steps per event of the fixed-length phase, which has no deadline."""
    min_fixed_steps: Count = 28_000
    """Least steps of that phase."""
    max_fixed_effort: Positive = 1.37e7
    """Most steps of that phase times the square root of the events. A step's time grows with that
    root, so this limits the time of the phase."""
    max_least_steps_per_event: Count = 400
    """Most of the least steps per event, on tiny graphs."""

    fixed_chunks: Count = 40
    """Checks of the result in that phase."""

    min_search_saving: Share = 1e-3
    """Least saving of its end, as a share of the incumbent's cost, for which a layout is searched.
    """

    fixed_layout_events: Count = 100_000
    """Most layouts times events in that phase, besides the last layout."""

    fixed_temperature: Ratio = 0.4
    """Initial temperature of that phase, in mean costs of an op, with enough steps to cool."""
    cooling_steps_per_event: Positive = 20.0
    """Steps per event from which that temperature is used; with fewer it is proportionally lower,
    since they would not undo the moves of a high one."""

    fixed_penalty_growth: Factor = 1.5
    """Growth of the penalty weight after a chunk that ends infeasible."""

    feasibility_steps: Count = 10_000
    """Most steps of the feasibility phase, which starts if no run fits."""
    feasibility_steps_per_event: Count = 100
    """Most steps of that phase per event."""

    feasibility_layouts: Count = 3
    """Most layouts tried in that phase."""

    feasibility_chunks: Count = 20
    """Checks of the result in that phase."""

    feasibility_patience: Count = 6
    """Checks in a row without a smaller excess that end that phase."""

    feasibility_penalty: Positive = 50.0
    """Penalty weight of that phase, in base costs per unit of memory excess."""

    check_chunks: Count = 64
    """Chunks between two calls of `enough`."""

    report_chunks: Count = 16
    """Chunks between two progress reports."""

    def fixed_length(self, events: int, divisor: int = 1) -> tuple[int, float]:
        """Steps of the fixed-length phase, over `divisor`, and its initial temperature.

        The temperature is in mean costs of an op.
        """
        least = min(self.min_fixed_steps, self.max_least_steps_per_event * events)
        most = int(self.max_fixed_effort / math.sqrt(events))
        steps = min(max(least, self.fixed_steps_per_event * events), most)
        steps = max(1, steps // divisor)
        share = min(1.0, steps / events / self.cooling_steps_per_event)
        return steps, self.fixed_temperature * share


@dataclass(frozen=True)
class CoopOfflineParams(Params):
    """All parameters of coop-offline."""

    eviction: EvictionParams = EvictionParams()
    portfolio: PortfolioParams = PortfolioParams()
    hill_climb: HillClimbParams = HillClimbParams()
    moves: MoveParams = MOVES
    sequence_annealing: SequenceAnnealingParams = SequenceAnnealingParams()

    makespan: MakespanParams = MAKESPAN

    coop_ops: Size = 300
    """Ops up to which Coop's own run is made although another run fits."""

    start_shares: tuple[Share, ...] = (0.25, 0.5, 0.75)
    """Further starts of the joint search: recompute plans at these shares between arena and peak.
    """

    tight_repairs: Size = 3
    """Most repairs of one candidate on small graphs in an arena that no run fits: most candidates
    there cannot be repaired at all. On larger graphs fewer repairs miss smaller arenas.
    """

    start_divisor: Count = 3
    """Divisor of the feasibility phase's steps if it starts from a known schedule."""

    short_searches: Count = 2
    """Most joint searches, by seed, for any schedule that fits if no run does."""

    tiny_ops: Size = 12
    """Ops up to which the joint search runs `tiny_searches` times."""

    tiny_searches: Count = 8
    """Joint searches, by seed, of tiny graphs: some seeds miss the best of few schedules."""

    hill_climb_share: Share = 0.25
    """Share of the time in which the hill climbs continue, before the sequence is annealed."""

    annealings: Count = 3
    """Most annealings of the sequence within a time limit: results differ by seed."""

    annealing_seconds_per_event: Positive = 1e-3
    """Least time of each of several annealings, s per event."""

    makespan_share: Share = 0.75
    """Share of the time for the joint search of recomputes and transfers, if there is a link."""

    max_recompute_excess: Ratio = 0.03
    """Cost of the best recompute plan above the best plan, as a share, at which that share is 1."""


DEFAULTS = CoopOfflineParams()
