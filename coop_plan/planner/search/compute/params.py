"""Parameters of the Metropolis searches over sequences; the type of a field is its range."""

from dataclasses import dataclass

from coop_plan.planner.core.params import Count, Factor, Params, Ratio, Share, Size


@dataclass(frozen=True)
class MoveParams(Params):
    """
    Moves of a Metropolis search; the default chances are for recomputation alone
    (`planner.search.compute`).
    """

    repairs: Size = 8
    """Upper bound on the repairs of one candidate."""

    least_excess: Ratio = 0.002
    """Lower bound on a positive excess, as a share of the capacity."""

    spread: Ratio = 0.2
    """Weight of the excess of all events beside that of the fullest one."""

    mend_chance: Share = 0.3
    """Chance to repair a candidate that exceeds the memory although it would be accepted."""

    recompute_chance: Share = 0.2
    """Chance of a move that inserts a recompute of an input of an event."""

    move_chance: Share = 0.2
    """Chance of a move that shifts recomputes; the rest of 1 is for removing some."""

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

    resident_usually: Share = 0.0
    """Chance to recompute also an input that is resident at the place of a recompute."""

    resident_rarely: Share = 0.3
    """The same, rarely."""

    evicted_usually: Share = 0.9
    """Chance to recompute also an input that is evicted at the place of a recompute."""

    evicted_rarely: Share = 0.5
    """The same, rarely."""

    insertion: Count = 64
    """Ops that one change puts in at most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recompute_chance + self.move_chance > 1:
            raise ValueError("the chances of kinds of changes are at most 1 together")


@dataclass(frozen=True)
class OrderParams(MoveParams):
    """Parameters of the search over orders of runs, which reserves margins after failed layouts."""

    first_chance: Share = 0.25
    """Chance of a change to move a first run, where the order need not be the program's."""

    to_bound_chance: Share = 0.3
    """Chance that it goes as far as it may, and not some events only."""

    stray_chance: Share = 0.1
    """Chance to keep such a move although it saves nothing and lengthens lifetimes."""

    margins: Size = 256
    """Upper bound on the events with a reserved margin."""


DEFAULTS = OrderParams()
