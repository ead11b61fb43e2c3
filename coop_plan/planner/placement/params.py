"""
The parameters of placement, one group for each of its parts.

The type of a field is its range, see `planner.core.params`.
"""

from dataclasses import dataclass

from coop_plan.planner.core.params import Count, Params, PositiveShare, Share, Size

KEYS = "TWAZUL"
"""Letters of the sort keys that an order is made of; see `planner.placement.keys`."""


def _check_orders(orders: tuple[str, ...]) -> None:
    if not orders or not all(order and set(order) <= set(KEYS) for order in orders):
        raise ValueError(f"orders must be some, each of letters in {KEYS}")


@dataclass(frozen=True)
class GreedyParams(Params):
    """The greedy placements (`planner.placement.greedy`)."""

    orders: tuple[str, ...] = ("TAW", "TW", "WT", "A", "ZW")
    """The plain orders, as letters of sort keys."""

    first_fit_most: Size = 20_000
    """Larger instances (buffers) get skylines only, if they can, not first fit."""

    memory: Share = 0.95
    """Share of the blame kept from one pass of a chain to the next."""

    strides: tuple[PositiveShare, ...] = (0.1, 0.5)
    """Shares of the order's length by which one blame moves a buffer forward."""

    shifts: tuple[PositiveShare, ...] = (0.1, 0.3, 1.0)
    """The same for the buffers of the section with the most blame, one drawn."""

    large: Size = 5_000
    """Larger instances get few passes in all, so more to chains that blame sections."""

    section_rounds: Count = 4
    """Passes of those to one of each other chain."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_orders(self.orders)


@dataclass(frozen=True)
class RestartParams(Params):
    """The exact search (`planner.placement.restarts`, `planner.placement.descend`)."""

    orders: tuple[str, ...] = ("TWA", "TAW", "WAT", "ATW", "UW")
    """The portfolio's orders, as letters of sort keys."""

    restart_nodes: Count = 500
    """One unit of Luby's sequence, in nodes."""

    memory: Share = 0.9
    """Share of the dead ends' weights kept from one restart to the next."""

    shifts: tuple[PositiveShare, ...] = (0.1, 0.3, 1.0)
    """Shares of the order's length by which the worst section's buffers move forward, one drawn."""

    most_pairs: Size = 4_000_000
    """Components with more conflicts are left to the greedy placements."""

    most_buffers: Size = 4_000
    """Instances of more buffers get no exact search."""

    work: Size = 300_000_000
    """The effort where neither it nor a time limit is given, in looks at live buffers: some 1 s."""

    first_work: Count = 10_000_000
    """Work for one capacity in the descent's first round; each round doubles it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_orders(self.orders)


@dataclass(frozen=True)
class PlacementParams(Params):
    """All of placement's parameters: the groups, and how many greedy placements to try."""

    greedy: GreedyParams = GreedyParams()
    restarts: RestartParams = RestartParams()

    passes: Count = 40
    """Greedy placements tried before the search, at least."""

    small: Size = 500
    """Up to so many buffers the search is worth more than further greedy placements."""

    pass_work: Size = 200_000
    """Larger ones: passes times buffers without a time limit, some 0.1 s."""

    long_pass_work: Size = 4_000_000
    """The same with a time limit, some 2 s."""

    quick_passes: Count = 16
    """Greedy placements where no search follows."""


DEFAULTS = PlacementParams()
