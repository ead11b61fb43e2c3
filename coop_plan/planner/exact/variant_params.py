"""Parameters of the search over variants and of `monet`; a field's annotated type is its range."""

from dataclasses import dataclass

from coop_plan.planner.core.params import Count, Params, Seconds, Share, Size


@dataclass(frozen=True)
class VariantParams(Params):
    """Start assignments and neighbourhood search over variants (see `primal.variant_search`)."""

    exchanges: Count = 24
    """Exchanges of one variant that hill climbing evaluates if no program is solved."""

    neighbourhoods: Count = 8
    """Maximum number of neighbourhoods without a time limit."""

    nodes: Count = 20
    """Branch-and-bound node limit of a neighbourhood without a time limit."""

    joint_shares: tuple[Share, ...] = (0.1, 0.5, 0.4, 0.4, 0.9)
    """With transfers, shares of the time left: for the default variants, the search without
    transfers, the plans of its variants and of the relaxed program's, and the best plan.
    """

    default_variants_share: Share = 0.1
    """Share of the time for the first schedule, in default variants only."""

    reorder_share: Share = 0.1
    """Share of the time for other orders of first runs, at the end."""

    bound_share: Share = 0.4
    """Share of the time left for the lower bound, before the neighbourhood search."""

    solve_share: Share = 0.2
    """Share of the time left for one solve of the whole program, once a schedule exists."""

    size_shares: tuple[Share, ...] = (0.5, 1.0, 0.25)
    """Start rules: each op gets its cheapest variant whose working set is at most this share of the
    arena less the outputs already resident.
    """

    quick_rules: Count = 3
    """Start rules evaluated if any schedule suffices."""

    bound_points: Count = 12
    """
    Time points of the whole program at first; few, as a program solved to optimality bounds better.
    """

    gap_share: Share = 0.2
    """Share of the current gap to which the whole program is solved while it is refined."""

    points: Count = 30
    """Initial time points of the program whose neighbourhoods are solved."""

    max_points: Count = 90
    """Maximum number of time points of the program."""

    points_per_round: Count = 4
    """Time points (or cuts) added after a readout that does not fit."""

    repair_rounds: Size = 40
    """Most neighbourhoods solved around overfull segments of the whole program's solution."""

    max_read_excess: Share = 0.01
    """Solutions are read out if they cost at most this share more than the best schedule."""

    small_ops: Count = 60
    """Up to this many ops every op is a time point; programs are solved with a limit only."""

    margin: Share = 0.002
    """Share of the arena left free for each layout that failed."""

    max_margin: Share = 0.04
    """Upper limit of the share left free."""

    reselection_rounds: Count = 3
    """Maximum passes of the local search over the variants of single runs."""


@dataclass(frozen=True)
class MonetParams(Params):
    """The paper's integer program (see `planner.exact.monet`)."""

    max_variables: Size = 100_000
    """Programs with more variables are rejected."""

    default_seconds: Seconds = 3600.0
    """Time limit of a request that sets none, s."""


DEFAULTS = VariantParams()
MONET = MonetParams()
