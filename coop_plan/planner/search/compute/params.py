"""Parameters of moves that differ by search or by test; the type of a field is its valid range.

Other numbers of moves and repairs are where they are used.
"""

from dataclasses import dataclass

from coop_plan.planner.core.params import Count, Params, Share, Size, values_class

MOVE_CHANCE = 0.2
"""Probability of a move that shifts events."""


@dataclass(frozen=True)
class MoveParams(Params):
    """Moves and repairs of both searches; the defaults are those of `planner.search.compute`.

    The rest of the chances of moves, up to 1, is that of removing recomputes and markers.
    """

    max_repairs: Size = 8
    """Most repairs of one candidate."""

    recompute_chance: Share = 0.2
    """Probability of a move that recomputes an input of an event."""

    prefetch_chance: Share = 0.0
    """Probability of a move that prefetches an input of an event."""

    convert_chance: Share = 0.0
    """Probability of a move that turns a recompute into a prefetch or the reverse."""

    max_insertion: Count = 64
    """Most ops that one move inserts."""

    first_run_chance: Share = 0.25
    """Probability of moving the first run of an op; 0 keeps them in program order."""

    drift_chance: Share = 0.1
    """Probability of accepting a first-run move that saves nothing and lengthens lifetimes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        chances = self.recompute_chance + self.prefetch_chance + self.convert_chance
        if chances + MOVE_CHANCE > 1:
            most = 1 - MOVE_CHANCE
            raise ValueError(f"recompute, prefetch and convert_chance must sum to at most {most}")


MoveValues = values_class(MoveParams)

DEFAULTS = MoveParams()
