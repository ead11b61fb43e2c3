"""The parameters of the joint search; the type of a field is its range."""

from dataclasses import dataclass

from coop_plan.planner.core.params import (
    Count,
    Factor,
    Params,
    Positive,
    PositiveShare,
    Ratio,
    Share,
    Size,
)
from coop_plan.planner.search.compute.params import MoveParams


@dataclass(frozen=True)
class MarkParams(MoveParams):
    """Parameters of the search with prefetch markers, and of its moves."""

    recompute_chance: Share = 0.12
    """Chance of a change to compute something again for an event that reads it."""

    fetch_chance: Share = 0.2
    """Chance of a change to fetch something for an event that reads it."""

    convert_chance: Share = 0.2
    """Chance of a change to fetch what is computed again, or to compute again what is fetched."""

    move_chance: Share = 0.2
    """Chance of a change to move recomputes; what is left of 1 is to take events out."""

    fetched_chance: Share = 0.5
    """Chance to fetch what an op put in reads, instead of computing it again."""

    link_price: Ratio = 0.3
    """Value of a copy engine's time in repairs, as a share of compute time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        chances = self.recompute_chance + self.fetch_chance + self.convert_chance
        if chances + self.move_chance > 1:
            raise ValueError("the chances of kinds of changes are at most 1 together")


@dataclass(frozen=True)
class JointParams(Params):
    """The annealing of sequences with marks (`planner.search.makespan.annealing`)."""

    moves: MarkParams = MarkParams()

    temperature: Ratio = 0.15
    """Temperature at the beginning, in mean costs of an op."""

    cooling: Ratio = 2.0
    """The temperature falls with this power of what is left of the search."""

    steps: Size = 8_000
    """The search's length without a time limit, in steps, and so many more:"""

    steps_per_event: Size = 560
    """for each event of a sequence."""

    events: Size = 100_000_000
    """The same in events gone through, at most, about."""

    events_per_second: Count = 30_000_000
    """About how many of them a second is."""

    searches: Count = 60
    """With a time limit it is searched as often as there is time for, so often at most; on small
    graphs for longer, then."""

    hotter: tuple[Positive, ...] = (1.0, 3.0)
    """Factors on the temperature, in turn: which is better is another one on each graph."""

    hurried: Count = 10
    """The search is shorter by this factor where any schedule will do."""

    start_share: Share = 0.55
    """Share of the search for all of its starts, before the best one is annealed again:"""

    last_temperatures: tuple[Positive, ...] = (1.0, 0.3)
    """once for each of these factors on the temperature."""

    chunk_events: Count = 400_000
    """Events gone through from one look at the result to the next."""

    chunks: Count = 100
    """Such looks at least."""

    room_factor: Count = 3
    """A sequence may have as many events as the first one times this."""

    room: Count = 2000
    """And so many more."""

    soft: Positive = 1e-3
    """
    Initial penalty for live bytes of e times the arena, in base costs.

    So little that at first only room is made that costs next to nothing.
    """

    softly: PositiveShare = 0.5
    """Share of an annealing until it costs `penalty`."""

    penalty: Positive = 5.0
    """Lower bound on the penalty afterwards."""

    penalty_growth: Factor = 1.01
    """Factor on that where a sequence does not fit;"""

    steepest: Factor = 1.3
    """where none did so far."""

    penalty_decay: Factor = 1.007
    """Divisor of it where one does."""

    patience: Size = 50
    """Chunks after which it goes back to the last sequence that fitted."""

    tighter: Factor = 1.001
    """Divisor of the bytes to plan within where a layout of as many was not found."""

    looser: Factor = 1.0005
    """Factor on them where one was, up to the arena."""

    worth_placing: Share = 1e-3
    """Share of the incumbent's cost a sequence must save to have its layout tried on the way."""

    layouts: Size = 10
    """Layouts that may fail on the way of an annealing without a time limit."""

    layout_share: Share = 0.2
    """Share of its time for layouts with one."""

    last_work: Count = 10
    """Factor on the effort of a layout for the end of the search."""


DEFAULTS = JointParams()
