"""The parameters of the search over variants; the type of a field is its range."""

from dataclasses import dataclass

from coop_plan.planner.core.params import Count, Factor, Params, Seconds, Share, Size


@dataclass(frozen=True)
class VariantParams(Params):
    """Starts, and the large neighbourhood search from them (`planner.exact.primal.variant_search`)."""

    exchanges: Count = 24
    """
    Sets of variants tried, one change at a time, where no program is solved; in haste on small steps.
    """

    neighbourhoods: Count = 8
    """Neighbourhoods solved at most, where no time limit was given."""

    nodes: Count = 20
    """Nodes of branch and bound of one of these at most; a time limit has no such end."""

    default_variants_share: Share = 0.1
    """Share of the time for the default variants alone, with which it begins."""

    reorder_share: Share = 0.1
    """Share of the time for other orders of first runs, with which it ends."""

    bound_share: Share = 0.4
    """Share of the time that `optimal` gives to the bound, before it searches."""

    solve_share: Share = 0.2
    """Share of the time left that one of its solves takes, once there is a schedule."""

    size_shares: tuple[Share, ...] = (0.5, 1.0, 0.25)
    """
    Rules: per op the cheapest variant whose working set is this share at most of the arena without the
    outputs that are there.
    """

    quick_rules: Count = 3
    """Rules tried where any schedule will do."""

    bound_points: Count = 12
    """Time points of the whole program at first: few, as what is solved has the better bound."""

    gap_share: Share = 0.2
    """Share of the gap to which the whole program is solved as long as it grows."""

    points: Count = 30
    """Time points of the program of which neighbourhoods are solved, to begin with."""

    max_points: Count = 90
    """And at most."""

    points_per_round: Count = 4
    """Points added where what was read out did not fit."""

    first_width: Share = 0.12
    """Share of the program that is set free at first."""

    widen: Factor = 1.1
    """Factor on that share after a neighbourhood that was solved."""

    narrow: Share = 0.7
    """And after one that was not, in its time or with its nodes."""

    min_width: Share = 0.04
    """The share is no less."""

    max_width: Share = 0.7
    """And no more."""

    repair_rounds: Size = 40
    """Neighbourhoods solved around what is too full in a solution of the whole program, at most."""

    max_read_excess: Share = 0.01
    """Of solutions of neighbourhoods none is read that costs more by this share than the best."""

    step_seconds: Seconds = 3.0
    """Time limit of one neighbourhood."""

    relative_gap: Share = 1e-3
    """Share of the objective to which a neighbourhood is solved."""

    patience: Count = 5
    """Neighbourhoods without success after which it ends, where no time limit was given."""

    small_ops: Count = 60
    """
    Up to so many ops every one of them is a time point; without a time limit there is no program,
    whose process takes longer to start than these take to plan.
    """

    margin: Share = 0.002
    """Share of the arena by which the search stays below it for each layout that was not found."""

    max_margin: Share = 0.04
    """And at most."""

    reselection_rounds: Count = 3
    """Rounds of changes of single runs."""


@dataclass(frozen=True)
class MonetParams(Params):
    """The integer program of the paper (see `planner.exact.monet`)."""

    max_variables: Size = 100_000
    """More are refused."""

    default_seconds: Seconds = 3600.0
    """Time limit of a request without one."""


DEFAULTS = VariantParams()
MONET = MonetParams()
