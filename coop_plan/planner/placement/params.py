"""Parameters of placement that more than one caller sets; a field's type is its valid range."""

from dataclasses import dataclass

from coop_plan.planner.core.params import Count, Params, Size


@dataclass(frozen=True)
class PlacementParams(Params):
    """Limits of placement."""

    most_buffers: Size = 4_000
    """Buffers of an instance above which there is no exact search."""

    work: Size = 300_000_000
    """Work without an argument or a time limit, in visits of live buffers: about 1 s."""

    quick_passes: Count = 16
    """Greedy passes if no exact search follows."""


DEFAULTS = PlacementParams()
