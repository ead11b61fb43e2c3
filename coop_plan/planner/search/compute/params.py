"""Parameters of the Metropolis searches over sequences; the type of a field is its valid range."""

from dataclasses import dataclass

from coop_plan.planner.core.params import (
    Count,
    Factor,
    Params,
    Positive,
    Ratio,
    Share,
    Size,
    values_class,
)


@dataclass(frozen=True)
class SequenceParams(Params):
    """Annealing of a sequence of events."""

    temperature: Ratio = 0.4
    """Initial temperature, in mean costs of an op."""

    cooling: Ratio = 2.0
    """Exponent of the temperature in the remaining share of the search."""

    penalty: Positive = 5.0
    """Least penalty weight, in base costs per unit of memory excess."""

    penalty_growth: Factor = 1.01
    """Growth of the penalty weight after a chunk that ends infeasible."""

    layout_share: Share = 0.3
    """Most share of the time for layouts."""

    min_saving: Share = 1e-4
    """Least saving, as a share of the incumbent's cost, for which a layout is tried."""

    event_factor: Count = 2
    """Most events of a sequence, as a multiple of the longest start, plus `extra_events`."""

    extra_events: Count = 2000
    """Events added to that limit."""

    penalty_decay: Factor = 1.007
    """Divisor of the penalty weight after a chunk that ends feasible."""

    limit_reduction: Share = 4e-3
    """Reduction of the limit on live bytes after a failed layout, as a share of it."""

    patience: Size = 50
    """Longest infeasible streak, in chunks, before a restart from a feasible sequence."""


@dataclass(frozen=True)
class MoveParams(Params):
    """Moves and repairs of both searches; the defaults are those of `planner.search.compute`.

    A group is a run of adjacent events, none of which is the first run of its op.
    """

    max_repairs: Size = 8
    """Most repairs of one candidate."""

    min_excess: Ratio = 0.002
    """Least memory excess of a candidate above the capacity, as a share of the capacity."""

    total_excess_weight: Ratio = 0.2
    """Weight of the excess summed over all events, relative to the excess at the peak."""

    repair_chance: Share = 0.3
    """Probability of repairing a candidate above the capacity that would be accepted as it is."""

    recompute_chance: Share = 0.2
    """Probability of a move that recomputes an input of an event."""

    prefetch_chance: Share = 0.0
    """Probability of a move that prefetches an input of an event."""

    convert_chance: Share = 0.0
    """Probability of a move that turns a recompute into a prefetch or the reverse."""

    move_chance: Share = 0.2
    """Probability of a move that shifts events; the rest, up to 1, removes some."""

    max_draws: Size = 50
    """Most random draws of an event until one is (or is not) a first run, as the move requires."""

    remove_more_chance: Share = 0.3
    """Probability of removing one more event of a group; group length is geometric."""

    move_more_chance: Share = 0.8
    """Probability of moving one more event of a group, if a group is moved."""

    move_group_chance: Share = 0.6
    """Probability of moving a group and not a single event."""

    max_move: Factor = 60.0
    """Longest distance of a move, in events; distances are log-uniform."""

    move_later_chance: Share = 0.5
    """Probability of moving events towards the end of the sequence."""

    max_lead: Factor = 40.0
    """Most events between a recompute and the event it is for; log-uniform."""

    lead_chance: Share = 0.5
    """Probability of a recompute earlier than directly before the event it is for."""

    usual_chance: Share = 0.7
    """Probability of the `_usual` rate below; otherwise the `_rare` rate applies."""

    recompute_live_usual: Share = 0.0
    """Probability of recomputing an input of an inserted op although it is live."""

    recompute_live_rare: Share = 0.3
    """The same, at the rare rate."""

    recompute_evicted_usual: Share = 0.9
    """Probability of recomputing an evicted input of an inserted op, not extending its lifetime."""

    recompute_evicted_rare: Share = 0.5
    """The same, at the rare rate."""

    max_insertion: Count = 64
    """Most ops that one move inserts."""

    prefetch_input_chance: Share = 0.5
    """Probability of prefetching an input of an inserted op instead of recomputing it."""

    copy_time_weight: Ratio = 0.3
    """Mean cost of 1 µs of a copy engine, in µs of compute, in a repair's choice."""

    first_run_chance: Share = 0.25
    """Probability of moving the first run of an op; 0 keeps them in program order."""

    to_bound_chance: Share = 0.3
    """Probability of moving a first run as far as its dependencies allow."""

    drift_chance: Share = 0.1
    """Probability of accepting a first-run move that saves nothing and lengthens lifetimes."""

    max_margins: Size = 256
    """Most events at which extra memory can be kept free."""

    def __post_init__(self) -> None:
        super().__post_init__()
        chances = self.recompute_chance + self.prefetch_chance + self.convert_chance
        if chances + self.move_chance > 1:
            raise ValueError(
                "the sum of recompute, prefetch, convert and move_chance must be at most 1"
            )


MoveValues = values_class(MoveParams)

DEFAULTS = MoveParams()
