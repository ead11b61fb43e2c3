"""
The parameters of coop-offline, one group for each of its parts.

The type of a field is its range, see `planner.core.params`.
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
from coop_plan.planner.search.compute.params import DEFAULTS as ORDERS
from coop_plan.planner.search.compute.params import OrderParams
from coop_plan.planner.search.makespan.params import DEFAULTS as JOINT
from coop_plan.planner.search.makespan.params import JointParams

Rule = tuple[Positive, bool, bool]
"""A scoring rule: the exponent of the distance, whether bytes are capped, whether it foresees."""

EXPONENTS = (0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class EvictionParams(Params):
    """The eviction step (`planner.heuristic.eviction`)."""

    closure_ops: Count = 64
    """Ops after which the estimate of a closure's cost stops growing."""

    pool: Count = 64
    """Victims that one look at all live tensors keeps in hand."""

    pool_from: Size = 512
    """Live tensors above which such a look is kept for several evictions."""

    heap_from: Size = 1 << 14
    """Live tensors above which they are kept in order, so that such a look is at the best alone."""

    pool_ops: Size = 64
    """Program positions after which a pool is too old."""

    least_distance: Positive = 1e-9
    """Added to every distance, in the unit of its price, so that none is 0."""

    max_recomputes_per_op: Size = 8
    """A run that computes more than this many times the program is given up."""

    chunk_events: Count = 4096
    """Events from one look at the clock to the next."""

    small_divisor: Count = 4096
    """Tensors below budget / this are evicted when nothing larger is left."""


@dataclass(frozen=True)
class PortfolioParams(Params):
    """Scoring rules crossed with a grid of logical budgets (`planner.heuristic.portfolio`)."""

    rules: tuple[Rule, ...] = tuple(
        (alpha, cap, foresee)
        for foresee in (False, True)
        for alpha in (1 / 16, *EXPONENTS)
        for cap in (False, True)
    )
    """Scoring rules; to foresee pays where evictions would keep alive what they are made of."""

    grid_ratio: Annotated[float, Within(math.nextafter(1.0, 2.0), math.inf)] = 1.015
    """Neighbouring logical budgets of the grid differ by this factor."""

    grid_windows: tuple[tuple[int, int], ...] = ((-8, 8), (-20, -8), (-44, -20))
    """
    Grid steps (above the first, up to the second) around the arena; each pair rises.

    They are tried in this order until one of them has a plan.
    """

    small_ops: Size = 500
    """Up to so many ops in the program every rule goes over the grid."""

    best_rules: Count = 4
    """On larger graphs, so many rules go over it."""

    unplaced: Size = 4
    """Runs whose layout is searched when the greedy placements have failed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(low >= high for low, high in self.grid_windows):
            raise ValueError("a window of the grid goes from a step to a later one")


@dataclass(frozen=True)
class PerturbationParams(Params):
    """Perturbation of a run's settings, in hill climbing and in the annealing of weights."""

    spreads: tuple[Ratio, ...] = (0.1, 0.3, 1.0)
    """Standard deviations of a weight's logarithm, of which one is drawn."""

    touched: tuple[Share, ...] = (0.02, 0.1, 0.5)
    """Shares of the weights that are changed, of which one is drawn."""

    budget_spread: Ratio = 0.01
    """Standard deviation of the logical budget's logarithm."""

    exponents: tuple[Positive, ...] = EXPONENTS
    """Exponents of the distance, of which one is drawn now and then."""

    correction_chance: Share = 0.5
    """Chance of a step to set weights by learned corrections instead of at random."""

    corrected_shares: tuple[Share, ...] = (0.1, 0.5, 1.0)
    """Shares of the weights that such a step sets, of which one is drawn."""

    most_learned: Factor = 10.0
    """The most by which it changes one, either way."""


@dataclass(frozen=True)
class HillClimbParams(Params):
    """Hill climbing over the weights of retention intervals (`planner.heuristic.hill_climb`)."""

    ops: Size = 100_000
    """Length of hill climbing: simulated ops in all, ≥ 0."""

    fewest_steps: Size = 20
    """The same as steps, at least."""

    most_steps: Size = 500
    steps_per_op: Count = 4
    """The same as steps, at most: not below `fewest_steps`."""

    spacing: Count = 2
    """Grid steps between the starts of neighbouring climbs."""

    starts_below: Size = 2
    """Climbs that start below the incumbent's own grid step."""

    starts_above: Size = 1
    """Climbs that start above it."""

    slope_steps: Count = 3
    """Grid steps to either side over which it is seen what memory is worth."""

    rank_steps: Count = 16
    """Grid steps that share one ranking of the rules for their climbs."""

    exponent_chance: Share = 0.1
    """Chance of a step to draw another exponent of the distance."""

    report_steps: Count = 16
    """Steps from one report of progress to the next."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most_steps < self.fewest_steps:
            raise ValueError("most_steps are not below fewest_steps")


@dataclass(frozen=True)
class AnnealingParams(Params):
    """The annealing of weights (`planner.heuristic.weight_annealing`)."""

    temperature: Ratio = 1e-3
    """
    By how much a run may be worse and taken on average, at the beginning.

    As a share of the base cost.
    """

    penalty: Positive = 5.0
    """Lower bound on the penalty for live bytes of e times the arena, in base costs."""

    penalty_growth: Factor = 1.3
    """Factor on the penalty while nothing fits."""

    layout_share: Share = 0.3
    """Share of the time for layouts that the greedy placements do not find."""

    looser: Factor = 1.005
    """Divisor of the estimate of a layout over its live peak, where one was found."""

    tighter: Factor = 1.001
    """Factor on that estimate where none was found."""

    cooling: Ratio = 2.0
    """The temperature falls with this power of the share of the time that is left."""

    idle_steps: Count = 200
    """
    Runs without one whose layout was tried, after which more must fit or less is asked of memory.
    """

    worth_placing: Share = 1e-4
    """Share of the incumbent's cost that a run must save before its layout is tried."""

    budget_chance: Share = 0.7
    """Chance of a step to change the logical budget."""

    exponent_chance: Share = 0.05
    """Chance of a step to draw another exponent of the distance."""

    group_chance: Share = 0.5
    """Chance of a step to change all copies of an interval in repeated blocks by one factor."""

    few_chance: Share = 0.2
    """Chance of a step to change a few weights instead of a share of them."""

    few: Count = 7
    """Upper bound on such a few weights."""

    stretch_chance: Share = 0.5
    """Chance of a step to stay within a stretch of the program."""

    stretch_divisors: tuple[Count, Count] = (50, 3)
    """Such a stretch has about ops / the first to ops / the second of these."""

    check_steps: Count = 64
    """Steps from one question whether it is enough to the next."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stretch_divisors[0] < self.stretch_divisors[1]:
            raise ValueError("stretch_divisors go from the shortest stretch to the longest")


@dataclass(frozen=True)
class OrderAnnealingParams(Params):
    """The annealing of sequences (`planner.search.compute.annealing`)."""

    temperature: Ratio = 0.4
    """Temperature at the beginning, in mean costs of an op."""

    cooling: Ratio = 2.0
    """The temperature falls with this power of the share of the time that is left."""

    room_factor: Count = 2
    """A sequence may have as many events as the first one times this."""

    room: Count = 2000
    """And so many more."""

    chunk_seconds: Positive = 0.01
    """Seconds from one look at the result to the next, about."""

    first_pace: Positive = 1000.0
    """Steps a second, before any are measured."""

    pace_share: PositiveShare = 0.2
    """Weight of the last chunk in the moving average of steps a second."""

    penalty: Positive = 5.0
    """Lower bound on the penalty for live bytes of e times the arena, in base costs."""

    penalty_growth: Factor = 1.01
    """Factor on the penalty after a chunk whose sequence does not fit."""

    penalty_decay: Factor = 1.007
    """Divisor of the penalty after a chunk whose sequence fits."""

    patience: Size = 50
    """Chunks after which it goes back to the last sequence that fitted."""

    layout_share: Share = 0.3
    """Share of the time for layouts."""

    most_work: Size = 500_000_000
    """
    Effort of `planner.placement.place` for one layout, at most.

    After a failure it is twice as much as before.
    """

    margin: Share = 1e-3
    """Share of the arena by which less may be live where a layout was fullest that failed."""

    worth_placing: Share = 1e-4
    """Share of the incumbent's cost that a sequence must save to have its layout tried."""

    fixed_steps: Count = 30_000
    fixed_steps_per_event: Count = 400
    """Upper bounds on the steps of each final search without a deadline."""

    fixed_chunks: Count = 40
    """Chunks of each of them; the result is inspected after each."""

    fixed_layout_blocks: Count = 100_000
    """Layouts times events, at most, but for one at the end."""

    fixed_temperatures: tuple[Ratio, ...] = (0.2, 0.8)
    """Their temperatures at the beginning, in mean costs of an op."""

    narrower: Share = 4e-3
    """Share of what may be live at once by which it gets less where a layout fails."""

    fixed_penalty_growth: Factor = 1.5
    """Factor on the penalty after a chunk whose sequence does not fit."""

    feasibility_steps: Count = 10_000
    feasibility_steps_per_event: Count = 100
    """Upper bounds on the steps of the search for a first sequence that fits."""

    feasibility_layouts: Count = 3
    """Layouts that this search tries."""

    feasibility_chunks: Count = 20
    """Chunks of this search."""

    feasibility_patience: Count = 6
    """Chunks in a row without a smaller excess, after which this search ends."""

    feasibility_penalty: Positive = 50.0
    """Penalty for live bytes of e times the arena in that search, in base costs."""

    check_chunks: Count = 64
    """Chunks from one question whether it is enough to the next."""

    report_chunks: Count = 16
    """Chunks from one report of progress to the next."""


@dataclass(frozen=True)
class CoopOfflineParams(Params):
    """All of coop-offline's parameters; see the groups."""

    eviction: EvictionParams = EvictionParams()
    portfolio: PortfolioParams = PortfolioParams()
    perturbation: PerturbationParams = PerturbationParams()
    hill_climb: HillClimbParams = HillClimbParams()
    annealing: AnnealingParams = AnnealingParams()
    moves: OrderParams = ORDERS
    order_annealing: OrderAnnealingParams = OrderAnnealingParams()

    joint: JointParams = JOINT

    between: tuple[Share, ...] = (0.25, 0.5, 0.75)
    """
    Logical budgets of further start sequences: shares of the way from the arena to keep-everything.
    """

    weights_share: Share = 0.25
    """Share of the time for annealing the weights, before the sequence."""

    joint_share: Share = 0.75
    """Share of the time, where there is a link, for recomputes and transfers as one;"""

    hopeless: Ratio = 0.03
    """all of it where recomputes alone cost more than those by so much."""


DEFAULTS = CoopOfflineParams()
