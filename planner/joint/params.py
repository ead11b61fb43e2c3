"""The parameters of the walk and of the joint search; the type of a field is its range."""

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


@dataclass(frozen=True)
class MoveParams(Params):
    """The walk and its moves; the chances of its kinds of changes are those of `TRANSFERS`."""

    repairs: Size = 8
    """How often a change is mended by another one, at most."""

    least_excess: Ratio = 0.002
    """What a byte too many counts at least, as a share of the capacity."""

    spread: Ratio = 0.2
    """What a byte too many costs at every event, as a share of what it costs at the fullest one."""

    mend_chance: Share = 0.3
    """Chance that a change that needs too much is mended although it may be accepted."""

    recompute_chance: Share = 0.12
    """Chance of a change to compute something again for an event that reads it."""

    fetch_chance: Share = 0.2
    """Chance of a change to fetch something for an event that reads it."""

    convert_chance: Share = 0.2
    """Chance of a change to fetch what is computed again, or to compute again what is fetched."""

    move_chance: Share = 0.25
    """Chance of a change to move events that are no first runs."""

    retime_chance: Share = 0.02
    """Chance of a change to time all copies anew; what is left of 1 is to take events out."""

    tries: Size = 50
    """Draws of an event until one is no first run."""

    removed_block: Share = 0.3
    """Chance of the next event to be taken out along with one."""

    moved_block: Share = 0.8
    """Chance of the next event to be moved along with one, where any is."""

    moved_block_chance: Share = 0.6
    """Chance that any is."""

    furthest: Factor = 60.0
    """Events by which events are moved, at most."""

    later_chance: Share = 0.5
    """Chance that they are moved to later and not to earlier events."""

    earliest: Factor = 40.0
    """Events by which recomputes come before the op that needs them, at most."""

    early_chance: Share = 0.5
    """Chance that they come earlier than right before it."""

    usually: Share = 0.7
    """Chance of the usual chances below instead of the rare ones."""

    kept_usually: Share = 0.0
    """Chance to compute again what an op put in reads and what is kept there anyway."""

    kept_rarely: Share = 0.3
    """The same, rarely."""

    gone_usually: Share = 0.9
    """Chance to compute again what an op put in reads and what is not kept there."""

    gone_rarely: Share = 0.5
    """The same, rarely."""

    fetched_chance: Share = 0.5
    """Chance to fetch instead what has been copied to the host."""

    punctual_chance: Share = 0.5
    """Chance that a copy is given just the time that it takes; else up to twice as much."""

    link_price: Ratio = 0.3
    """What time of an engine is taken to be worth on average, of compute, where room is made."""

    insertion: Count = 64
    """Ops that one change puts in at most."""

    margins: Size = 256
    """Places at which memory may be asked to stay free."""

    def __post_init__(self) -> None:
        super().__post_init__()
        chances = self.recompute_chance + self.fetch_chance + self.convert_chance
        if chances + self.move_chance + self.retime_chance > 1:
            raise ValueError("the chances of kinds of changes are at most 1 together")


TRANSFERS = MoveParams()
"""Recomputes and transfers as one."""

RECOMPUTES = MoveParams(
    recompute_chance=0.35,
    fetch_chance=0.0,
    convert_chance=0.0,
    move_chance=0.35,
    retime_chance=0.0,
)
"""The walk without a link."""


@dataclass(frozen=True)
class JointParams(Params):
    """The annealing of sequences with copies (`planner.joint.search`)."""

    moves: MoveParams = TRANSFERS

    heat: Ratio = 0.15
    """Temperature at the beginning, in mean costs of an op."""

    cooling: Ratio = 2.0
    """The temperature falls with this power of what is left of the search."""

    steps: Size = 8_000
    """The search's length without a time limit, in steps, and so many more:"""

    steps_per_event: Size = 35
    """for each event of a sequence."""

    events: Size = 80_000_000
    """The same in events gone through, at most, about."""

    hurried: Count = 10
    """The search is shorter by this factor where any schedule will do."""

    start_share: Share = 0.4
    """Share of the search for all of its starts, before the best one is annealed once more."""

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
    What an arena that is too small by a factor e costs to begin with, in base costs.

    So little that at first only room is made that costs next to nothing.
    """

    softly: PositiveShare = 0.5
    """Share of an annealing until it costs `steep`."""

    steep: Positive = 5.0
    """What it costs at least from then on."""

    steeper: Factor = 1.01
    """Factor on that where a sequence does not fit."""

    less_steep: Factor = 1.007
    """Divisor of it where one does."""

    patience: Size = 50
    """Chunks after which it goes back to the last sequence that fitted."""

    tighter: Factor = 1.001
    """Divisor of the bytes to plan within where a layout of as many was not found."""

    looser: Factor = 1.0005
    """Factor on them where one was, up to the arena."""

    worth_placing: Share = 1e-3
    """Share of the incumbent's cost a sequence must save to have its layout tried on the way."""


DEFAULTS = JointParams()
