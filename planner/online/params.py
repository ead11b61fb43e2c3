"""The parameters of the online methods."""

from dataclasses import dataclass

from coop_plan.planner.core.ranges import check_range


@dataclass(frozen=True)
class OnlineParams:
    """What `coop`, `dtr` and `dte` leave open."""

    min_staleness_us: float = 1e-3
    """A tensor touched just now has no staleness; this keeps its cost finite. µs, above 0."""

    max_recomputes_per_op: int = 30
    """
    More recomputed ops than this many times the program is thrashing, and counts as no fit.

    At least 0.
    """

    first_record: int = 4
    """
    Events that the record has room for at first, as a factor on the program's ops; at least 1.

    A run that outgrows it is made again with twice the room.
    """

    chunk_ops: int = 256
    """Ops between two looks at the clock; at least 1."""

    def __post_init__(self) -> None:
        check_range(self, "min_staleness_us", above=0)
        check_range(self, "max_recomputes_per_op", least=0)
        check_range(self, "first_record", "chunk_ops", least=1)


DEFAULTS = OnlineParams()
