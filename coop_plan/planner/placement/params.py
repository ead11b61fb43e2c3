"""Parameters of placement, one group per module.

The type of a field is its range, see `planner.core.params`.
"""

from dataclasses import dataclass

from coop_plan.planner.core.params import Count, Params, PositiveShare, Share, Size

KEYS = "TWAZUL"
"""Letters of the sort keys; see `planner.placement.keys`."""


def _check_orders(orders: tuple[str, ...]) -> None:
    if not orders or not all(order and set(order) <= set(KEYS) for order in orders):
        raise ValueError(f"orders are {orders}: give at least one, each of letters in {KEYS}")


@dataclass(frozen=True)
class GreedyParams(Params):
    """Parameters of the greedy placements (`planner.placement.greedy`)."""

    orders: tuple[str, ...] = ("TAW", "TW", "WT", "A", "ZW")
    """The plain orders, as letters of sort keys."""

    first_fit_most: Size = 12_000
    """Buffers above which unconstrained instances are packed as skylines only, not by first fit."""

    scan_work: Size = 3_000_000_000
    """Visits of placed buffers by the simple orders without an argument or a time limit: 10 s."""

    memory: Share = 0.95
    """Decay of blame: the share kept from one pass of a chain to the next."""

    strides: tuple[PositiveShare, ...] = (0.1, 0.5)
    """Shares of the order's length by which a blamed buffer moves forward at most."""

    shifts: tuple[PositiveShare, ...] = (0.1, 0.3, 1.0)
    """The same for buffers of the section with the most blame; one is drawn per pass."""

    large: Size = 5_000
    """Buffers above which passes are few and most are given to chains that blame sections."""

    section_rounds: Count = 4
    """Passes of each of those chains per pass of another chain."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_orders(self.orders)


@dataclass(frozen=True)
class RestartParams(Params):
    """Parameters of the exact search (`planner.placement.restarts`, `descend`)."""

    orders: tuple[str, ...] = ("TWA", "TAW", "WAT", "ATW", "UW")
    """The orders of the portfolio, as letters of sort keys."""

    restart_nodes: Count = 500
    """Nodes per unit of Luby's sequence."""

    memory: Share = 0.9
    """Decay of the weights of dead ends: the share kept from one restart to the next."""

    shifts: tuple[PositiveShare, ...] = (0.1, 0.3, 1.0)
    """Shares of the order's length by which the worst section's buffers move; one is drawn."""

    most_pairs: Size = 4_000_000
    """Conflicts of a component above which there is no exact search."""

    most_buffers: Size = 4_000
    """Buffers of an instance above which there is no exact search."""

    work: Size = 300_000_000
    """Work without an argument or a time limit, in visits of live buffers: about 1 s."""

    first_work: Count = 10_000_000
    """Work for one capacity in the descent's first round; each round doubles it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_orders(self.orders)


@dataclass(frozen=True)
class PlacementParams(Params):
    """All parameters of placement: the groups, and the numbers of greedy passes."""

    greedy: GreedyParams = GreedyParams()
    restarts: RestartParams = RestartParams()

    passes: Count = 40
    """Greedy passes before the exact search, at least."""

    small: Size = 500
    """Buffers up to which the exact search is better than further greedy passes."""

    pass_work: Size = 200_000
    """For larger instances: passes times buffers without a time limit, about 0.1 s."""

    long_pass_work: Size = 4_000_000
    """The same with a time limit, about 2 s."""

    quick_passes: Count = 16
    """Greedy passes if no exact search follows."""


DEFAULTS = PlacementParams()
