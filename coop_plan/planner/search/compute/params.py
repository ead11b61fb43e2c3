"""Parameters of moves that differ by search or by test; other numbers are where they are used."""

from typing import NamedTuple


class MoveParams(NamedTuple):
    """Moves and repairs of both searches; the defaults are those of `planner.search.compute`.

    A move shifts events with probability 0.2. The rest of the chances of moves, up to 1, is that of
    removing recomputes and markers.
    """

    max_repairs: int = 8
    """Most repairs of one candidate."""

    recompute_chance: float = 0.2
    """Probability of a move that recomputes an input of an event."""

    prefetch_chance: float = 0.0
    """Probability of a move that prefetches an input of an event."""

    convert_chance: float = 0.0
    """Probability of a move that turns a recompute into a prefetch or the reverse."""

    max_insertion: int = 64
    """Most ops that one move inserts."""

    first_run_chance: float = 0.25
    """Probability of moving the first run of an op; 0 keeps them in program order."""

    drift_chance: float = 0.1
    """Probability of accepting a first-run move that saves nothing and lengthens lifetimes."""
