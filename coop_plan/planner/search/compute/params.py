"""The parameters of walks among sequences; the type of a field is its range."""

from dataclasses import dataclass

from coop_plan.planner.core.params import Count, Factor, Params, Ratio, Share, Size


@dataclass(frozen=True)
class MoveParams(Params):
    """A walk and its moves; the chances are those of orders of runs (`planner.search.compute`)."""

    repairs: Size = 8
    """How often a change is mended by another one, at most."""

    least_excess: Ratio = 0.002
    """What a byte too many counts at least, as a share of the capacity."""

    spread: Ratio = 0.2
    """What a byte too many costs at every event, as a share of what it costs at the fullest one."""

    mend_chance: Share = 0.3
    """Chance that a change that needs too much is mended although it may be accepted."""

    recompute_chance: Share = 0.2
    """Chance of a change to compute something again for an event that reads it."""

    move_chance: Share = 0.2
    """Chance of a change to move recomputes; what is left of 1 is to take some out."""

    tries: Size = 50
    """Draws of an event until one is no first run, or is one where that is asked for."""

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

    insertion: Count = 64
    """Ops that one change puts in at most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recompute_chance + self.move_chance > 1:
            raise ValueError("the chances of kinds of changes are at most 1 together")


@dataclass(frozen=True)
class OrderParams(MoveParams):
    """The walk among orders of runs, which leaves memory free where it is asked to."""

    first_chance: Share = 0.25
    """Chance of a change to move a first run, where the order need not be the program's."""

    to_bound_chance: Share = 0.3
    """Chance that it goes as far as it may, and not some events only."""

    stray_chance: Share = 0.1
    """Chance to keep such a move although it saves nothing and tensors live longer."""

    margins: Size = 256
    """Places at which memory may be asked to stay free."""


DEFAULTS = OrderParams()
