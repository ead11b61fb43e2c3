"""The parameters of coop-offline, one group for each of its parts."""

from dataclasses import dataclass

from coop_plan.planner.core.ranges import check_range

Rule = tuple[float, bool]
"""A scoring rule: the exponent of the distance, and whether bytes are capped."""

EXPONENTS = (0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class ClairvoyantParams:
    """The clairvoyant step (`planner.offline.clairvoyant`)."""

    closure_ops: int = 64
    """Ops after which the estimate of a closure's cost stops growing; at least 1."""

    pool: int = 64
    """Victims that one look at all live tensors keeps in hand; at least 1."""

    pool_from: int = 512
    """Live tensors above which such a look is kept for several evictions; at least 0."""

    pool_ops: int = 64
    """Program positions after which a pool is too old; at least 0."""

    least_distance: float = 1e-9
    """Added to every distance, in the unit of its price, so that none is 0; above 0."""

    max_recomputes_per_op: int = 8
    """A run that computes more than this many times the program is given up; at least 0."""

    small_divisor: int = 4096
    """Tensors below budget / this are evicted when nothing larger is left; at least 1."""

    def __post_init__(self) -> None:
        check_range(self, "closure_ops", "pool", "small_divisor", least=1)
        check_range(self, "pool_from", "pool_ops", "max_recomputes_per_op", least=0)
        check_range(self, "least_distance", above=0)


@dataclass(frozen=True)
class PortfolioParams:
    """Scoring rules crossed with a grid of logical budgets (`planner.offline.portfolio`)."""

    rules: tuple[Rule, ...] = tuple((alpha, cap) for alpha in EXPONENTS for cap in (False, True))
    """Scoring rules: exponents above 0; at least one rule."""

    grid_ratio: float = 1.015
    """Neighbouring logical budgets of the grid differ by this factor; above 1."""

    grid_windows: tuple[tuple[int, int], ...] = ((-8, 8), (-20, -8), (-44, -20))
    """
    Grid steps (above the first, up to the second) around the arena; each pair rises.

    They are tried in this order until one of them has a plan.
    """

    small_ops: int = 500
    """Up to so many ops in the program every rule goes over the grid; at least 0."""

    best_rules: int = 3
    """On larger graphs, so many rules go over it; at least 1."""

    unplaced: int = 4
    """Runs whose layout is searched when the greedy placements have failed; at least 0."""

    def __post_init__(self) -> None:
        check_range(self, "grid_ratio", above=1)
        check_range(self, "best_rules", least=1)
        check_range(self, "small_ops", "unplaced", least=0)
        if not self.rules or min(alpha for alpha, _ in self.rules) <= 0:
            raise ValueError("rules must be some, with exponents above 0")
        if any(low >= high for low, high in self.grid_windows):
            raise ValueError("a window of the grid goes from a step to a later one")


@dataclass(frozen=True)
class PerturbationParams:
    """How the settings of a run are perturbed, in the climb and in the annealing of weights."""

    spreads: tuple[float, ...] = (0.1, 0.3, 1.0)
    """Standard deviations of a weight's logarithm, of which one is drawn; at least 0."""

    touched: tuple[float, ...] = (0.02, 0.1, 0.5)
    """Shares of the weights that are changed, of which one is drawn; 0 to 1."""

    budget_spread: float = 0.01
    """Standard deviation of the logical budget's logarithm; at least 0."""

    exponents: tuple[float, ...] = EXPONENTS
    """Exponents of the distance, of which one is drawn now and then; above 0."""

    def __post_init__(self) -> None:
        check_range(self, "spreads", "budget_spread", least=0)
        check_range(self, "touched", least=0, most=1)
        check_range(self, "exponents", above=0)


@dataclass(frozen=True)
class ClimbParams:
    """The hill climb over the weights of retention intervals (`planner.offline.climb`)."""

    ops: int = 100_000
    """The climb's length, as simulated ops in all; at least 0."""

    fewest_steps: int = 20
    """The same as steps, at least; 0 or more."""

    most_steps: int = 500
    """The same as steps, at most; not below `fewest_steps`."""

    spacing: int = 2
    """Grid steps between the starts of neighbouring climbs; at least 1."""

    climbs_below: int = 2
    """Climbs that start below the incumbent's own grid step; at least 0."""

    climbs_above: int = 1
    """Climbs that start above it; at least 0."""

    slope_steps: int = 3
    """Grid steps to either side over which it is seen what memory is worth; at least 1."""

    rank_steps: int = 16
    """Grid steps that share one ranking of the rules for their climbs; at least 1."""

    exponent_chance: float = 0.1
    """Chance of a step to draw another exponent of the distance; 0 to 1."""

    report_steps: int = 16
    """Steps from one report of progress to the next; at least 1."""

    def __post_init__(self) -> None:
        check_range(self, "ops", "fewest_steps", "climbs_below", "climbs_above", least=0)
        check_range(self, "most_steps", least=self.fewest_steps)
        check_range(self, "spacing", "slope_steps", "rank_steps", "report_steps", least=1)
        check_range(self, "exponent_chance", least=0, most=1)


@dataclass(frozen=True)
class AnnealingParams:
    """The annealing of weights (`planner.offline.anneal`)."""

    temperature: float = 1e-3
    """
    By how much a run may be worse and taken on average, at the beginning.

    As a share of the base cost; at least 0.
    """

    steep: float = 5.0
    """What an arena that is too small by a factor e costs at least, in base costs; above 0."""

    steeper: float = 1.3
    """Factor on that while nothing fits; at least 1."""

    layout_share: float = 0.3
    """Share of the time for layouts that the greedy placements do not find; 0 to 1."""

    looser: float = 1.005
    """Divisor of the estimate of a layout over its live peak, where one was found; at least 1."""

    tighter: float = 1.001
    """Factor on that estimate where none was found; at least 1."""

    cooling: float = 2.0
    """The temperature falls with this power of the share of the time that is left; at least 0."""

    idle_steps: int = 200
    """
    Runs without one whose layout was tried, after which more must fit or less is asked of memory.

    At least 1.
    """

    worth_placing: float = 1e-4
    """Share of the incumbent's cost that a run must save before its layout is tried; 0 to 1."""

    budget_chance: float = 0.7
    """Chance of a step to change the logical budget; 0 to 1."""

    exponent_chance: float = 0.05
    """Chance of a step to draw another exponent of the distance; 0 to 1."""

    alike_chance: float = 0.5
    """Chance of a step to change the copies of an interval in repeated blocks alike; 0 to 1."""

    few_chance: float = 0.2
    """Chance of a step to change a few weights instead of a share of them; 0 to 1."""

    few: int = 7
    """How many those are at most; at least 1."""

    stretch_chance: float = 0.5
    """Chance of a step to stay within a stretch of the program; 0 to 1."""

    stretch_divisors: tuple[int, int] = (50, 3)
    """Such a stretch has about ops / the first to ops / the second of these; at least 1."""

    check_steps: int = 64
    """Steps from one question whether it is enough to the next; at least 1."""

    def __post_init__(self) -> None:
        check_range(self, "temperature", "cooling", least=0)
        check_range(self, "steep", above=0)
        check_range(self, "steeper", "looser", "tighter", least=1)
        check_range(self, "idle_steps", "few", "stretch_divisors", "check_steps", least=1)
        check_range(self, "layout_share", "worth_placing", "budget_chance", least=0, most=1)
        check_range(self, "exponent_chance", "alike_chance", "few_chance", least=0, most=1)
        check_range(self, "stretch_chance", least=0, most=1)
        if self.stretch_divisors[0] < self.stretch_divisors[1]:
            raise ValueError("stretch_divisors go from the shortest stretch to the longest")


@dataclass(frozen=True)
class MetropolisParams:
    """The Metropolis walk among sequences (`planner.offline.metropolis`, `…moves`, `…trial`)."""

    repairs: int = 8
    """How often a change is mended by another one, at most; at least 0."""

    least_excess: float = 0.002
    """What a byte too many counts at least, as a share of the capacity; at least 0."""

    spread: float = 0.2
    """
    What a byte too many costs at every event, as a share of what it costs at the fullest one.

    At least 0.
    """

    mend_chance: float = 0.3
    """Chance that a change that needs too much is mended although it may be accepted; 0 to 1."""

    recompute_chance: float = 0.35
    """Chance of a change to compute something again for an event that reads it; 0 to 1."""

    move_chance: float = 0.35
    """Chance of a change to move recomputes; else they are taken out. Both at most 1."""

    tries: int = 50
    """Draws of an event until one is a recompute that may be moved or taken out; at least 0."""

    removed_block: float = 0.3
    """Chance of the next recompute to be taken out along with one; 0 to 1."""

    moved_block: float = 0.8
    """Chance of the next recompute to be moved along with one, where any is; as above."""

    moved_block_chance: float = 0.6
    """Chance that any is; 0 to 1."""

    furthest: float = 60.0
    """Events by which recomputes are moved, at most; at least 1."""

    later_chance: float = 0.5
    """Chance that they are moved to later and not to earlier events; 0 to 1."""

    earliest: float = 40.0
    """Events by which recomputes come before the op that needs them, at most; at least 1."""

    early_chance: float = 0.5
    """Chance that they come earlier than right before it; 0 to 1."""

    usually: float = 0.7
    """Chance of the usual chances below instead of the rare ones; 0 to 1."""

    kept_usually: float = 0.0
    """Chance to compute again what an op put in reads and what is kept there anyway; 0 to 1."""

    kept_rarely: float = 0.3
    """The same, rarely; 0 to 1."""

    gone_usually: float = 0.9
    """Chance to compute again what an op put in reads and what is not kept there; 0 to 1."""

    gone_rarely: float = 0.5
    """The same, rarely; 0 to 1."""

    insertion: int = 64
    """Ops that one change puts in at most; at least 1."""

    margins: int = 256
    """Places at which memory may be asked to stay free; at least 0."""

    def __post_init__(self) -> None:
        check_range(self, "repairs", "least_excess", "spread", "tries", "margins", least=0)
        check_range(self, "mend_chance", "recompute_chance", "move_chance", least=0, most=1)
        check_range(self, "removed_block", "moved_block", least=0, most=1)
        check_range(self, "moved_block_chance", "later_chance", least=0, most=1)
        check_range(self, "early_chance", "usually", "kept_usually", least=0, most=1)
        check_range(self, "kept_rarely", "gone_usually", "gone_rarely", least=0, most=1)
        check_range(self, "furthest", "earliest", "insertion", least=1)
        if self.recompute_chance + self.move_chance > 1:
            raise ValueError("recompute_chance and move_chance are at most 1 together")


@dataclass(frozen=True)
class ResequencingParams:
    """The annealing of sequences (`planner.offline.resequence`)."""

    heat: float = 0.4
    """Temperature at the beginning, in mean costs of an op; at least 0."""

    cooling: float = 2.0
    """The temperature falls with this power of the share of the time that is left; at least 0."""

    room_factor: int = 2
    """A sequence may have as many events as the first one times this; at least 1."""

    room: int = 2000
    """And so many more; at least 1."""

    whole: int = 1200
    """Up to so many events all of them may be changed at a time; at least 0."""

    window: int = 300
    """And else so many: steps are faster; at least 1."""

    chunk_seconds: float = 0.01
    """Seconds until another window is taken, about; above 0."""

    first_pace: float = 1000.0
    """Steps a second, before any are measured; above 0."""

    pace_share: float = 0.2
    """What the last chunk counts in the pace; above 0, up to 1."""

    steep: float = 5.0
    """What an arena that is too small by a factor e costs at least, in base costs; above 0."""

    steeper: float = 1.01
    """Factor on that where a sequence does not fit; at least 1."""

    less_steep: float = 1.007
    """Divisor of it where one does; at least 1."""

    patience: int = 50
    """Chunks after which it goes back to the last sequence that fitted; at least 0."""

    layout_share: float = 0.3
    """Share of the time for layouts; 0 to 1."""

    most_work: int = 500_000_000
    """
    Effort of `planner.placement.place` for one layout, at most; at least 0.

    After a failure it is twice as much as before.
    """

    margin: float = 1e-3
    """
    Share of the arena by which less may be live where a layout was fullest that failed.

    0 to 1.
    """

    worth_placing: float = 1e-4
    """Share of the incumbent's cost that a sequence must save to have its layout tried; 0 to 1."""

    check_chunks: int = 64
    """Chunks from one question whether it is enough to the next; at least 1."""

    report_chunks: int = 16
    """Chunks from one report of progress to the next; at least 1."""

    def __post_init__(self) -> None:
        check_range(self, "heat", "cooling", "whole", "patience", "most_work", least=0)
        check_range(self, "room_factor", "room", "window", least=1)
        check_range(self, "check_chunks", "report_chunks", least=1)
        check_range(self, "chunk_seconds", "first_pace", "steep", above=0)
        check_range(self, "steeper", "less_steep", least=1)
        check_range(self, "pace_share", above=0, most=1)
        check_range(self, "layout_share", "margin", "worth_placing", least=0, most=1)


@dataclass(frozen=True)
class CoopOfflineParams:
    """All of coop-offline's parameters; see the groups."""

    clairvoyant: ClairvoyantParams = ClairvoyantParams()
    portfolio: PortfolioParams = PortfolioParams()
    perturbation: PerturbationParams = PerturbationParams()
    climb: ClimbParams = ClimbParams()
    annealing: AnnealingParams = AnnealingParams()
    metropolis: MetropolisParams = MetropolisParams()
    resequencing: ResequencingParams = ResequencingParams()

    weights_share: float = 0.25
    """Share of the time for annealing the weights, before the sequence; 0 to 1."""

    def __post_init__(self) -> None:
        check_range(self, "weights_share", least=0, most=1)


DEFAULTS = CoopOfflineParams()
