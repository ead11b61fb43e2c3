"""The parameters of placement, one group for each of its parts."""

from dataclasses import dataclass

from coop_plan.planner.core.ranges import check_range

KEYS = "TWAZUL"
"""Letters of the sort keys that an order is made of; see `planner.placement.keys`."""


def _check_orders(orders: tuple[str, ...]) -> None:
    if not orders or not all(order and set(order) <= set(KEYS) for order in orders):
        raise ValueError(f"orders must be some, each of letters in {KEYS}")


@dataclass(frozen=True)
class GreedyParams:
    """The greedy placements (`planner.placement.greedy`)."""

    orders: tuple[str, ...] = ("TAW", "TW", "WT", "A", "ZW")
    """The plain orders, as letters of sort keys; at least one."""

    first_fit_most: int = 20_000
    """Larger instances (buffers) get skylines only, if they can, not first fit; at least 0."""

    memory: float = 0.95
    """Share of the blame kept from one pass of a chain to the next; 0 to 1."""

    strides: tuple[float, ...] = (0.1, 0.5)
    """Shares of the order's length by which one blame moves a buffer forward; above 0, up to 1."""

    shifts: tuple[float, ...] = (0.1, 0.3, 1.0)
    """The same for the buffers of the section with the most blame, one drawn; above 0, up to 1."""

    large: int = 5_000
    """Larger instances get few passes in all, so more to chains that blame sections; 0 or more."""

    section_rounds: int = 4
    """Passes of those to one of each other chain; at least 1."""

    def __post_init__(self) -> None:
        _check_orders(self.orders)
        check_range(self, "first_fit_most", "large", least=0)
        check_range(self, "memory", least=0, most=1)
        check_range(self, "strides", "shifts", above=0, most=1)
        check_range(self, "section_rounds", least=1)


@dataclass(frozen=True)
class RestartParams:
    """The exact search (`planner.placement.restarts`, `planner.placement.descend`)."""

    orders: tuple[str, ...] = ("TWA", "TAW", "WAT", "ATW", "UW")
    """The portfolio's orders, as letters of sort keys; at least one."""

    restart_nodes: int = 500
    """One unit of Luby's sequence, in nodes; at least 1."""

    memory: float = 0.9
    """Share of the dead ends' weights kept from one restart to the next; 0 to 1."""

    shifts: tuple[float, ...] = (0.1, 0.3, 1.0)
    """
    Shares of the order's length by which the worst section's buffers move forward, one drawn.

    Above 0, up to 1.
    """

    most_pairs: int = 4_000_000
    """Components with more conflicts are left to the greedy placements; at least 0."""

    most_buffers: int = 4_000
    """Instances of more buffers get no exact search; at least 0."""

    work: int = 300_000_000
    """
    The effort where neither it nor a time limit is given, in looks at live buffers: some 1 s.

    At least 0.
    """

    first_work: int = 10_000_000
    """Work for one capacity in the descent's first round; each round doubles it; at least 1."""

    def __post_init__(self) -> None:
        _check_orders(self.orders)
        check_range(self, "restart_nodes", "first_work", least=1)
        check_range(self, "memory", least=0, most=1)
        check_range(self, "shifts", above=0, most=1)
        check_range(self, "most_pairs", "most_buffers", "work", least=0)


@dataclass(frozen=True)
class PlacementParams:
    """All of placement's parameters: the groups, and how many greedy placements to try."""

    greedy: GreedyParams = GreedyParams()
    restarts: RestartParams = RestartParams()

    passes: int = 40
    """Greedy placements tried before the search, at least; at least 1."""

    small: int = 500
    """Up to so many buffers the search is worth more than further greedy placements; 0 or more."""

    pass_work: int = 200_000
    """Larger ones: passes times buffers without a time limit, some 0.1 s; at least 0."""

    long_pass_work: int = 4_000_000
    """The same with a time limit, some 2 s; at least 0."""

    quick_passes: int = 16
    """Greedy placements where no search follows; at least 1."""

    def __post_init__(self) -> None:
        check_range(self, "passes", "quick_passes", least=1)
        check_range(self, "small", "pass_work", "long_pass_work", least=0)


DEFAULTS = PlacementParams()
