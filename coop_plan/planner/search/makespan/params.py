"""Parameters of the joint search of recomputes and transfers; a field's type is its valid range."""

from dataclasses import dataclass

from coop_plan.planner.core.params import (
    Count,
    Factor,
    Positive,
    PositiveShare,
    Ratio,
    Share,
    Size,
)
from coop_plan.planner.search.compute.params import MoveParams, SequenceParams

MOVES = MoveParams(
    recompute_chance=0.12, prefetch_chance=0.2, convert_chance=0.2, first_run_chance=0.0
)


@dataclass(frozen=True)
class MakespanParams(SequenceParams):
    """Annealing of sequences with prefetch markers (`planner.search.makespan.annealing`)."""

    moves: MoveParams = MOVES
    temperature: Ratio = 0.15
    layout_share: Share = 0.2
    min_saving: Share = 1e-3
    event_factor: Count = 3

    steps: Size = 8_000
    """Metropolis steps of a search without a time limit, plus `steps_per_event` per event."""

    steps_per_event: Size = 560
    """Metropolis steps per event of the longest start sequence."""

    max_event_steps: Size = 100_000_000
    """Most steps times events of such a search, about."""

    events_per_second: Count = 30_000_000
    """Estimate of the events simulated per second: a time limit as a number of searches."""

    max_searches: Count = 60
    """Most searches within a time limit, one after another."""

    temperature_factors: tuple[Positive, ...] = (1.0, 3.0)
    """Factors on the temperature, one per two searches: the best one depends on the graph."""

    any_schedule_divisor: Count = 10
    """Divisor of the search length if any feasible schedule is enough."""

    start_share: Share = 0.55
    """Share of a search for annealing each start; the rest anneals the best result again."""

    final_temperatures: tuple[Positive, ...] = (1.0, 0.3)
    """Factors on the temperature of these final annealings."""

    chunk_events: Count = 400_000
    """Events simulated between two checks of the result."""

    min_chunks: Count = 100
    """Least number of such checks per search."""

    initial_penalty: Positive = 1e-3
    """Initial penalty weight, in base costs per unit of excess: only nearly free evictions pay."""

    initial_penalty_share: PositiveShare = 0.5
    """Share of an annealing in which the penalty weight grows to `penalty`."""

    penalty_growth_infeasible: Factor = 1.3
    """The same, while no chunk has ended feasible."""

    capacity_growth: Factor = 1.0005
    """Growth of the capacity, up to the arena, after a successful layout."""

    max_failed_layouts: Size = 10
    """Most failed layouts of an annealing without a time limit."""

    final_work_factor: Count = 10
    """Factor on the layout effort at the end of the search."""


DEFAULTS = MakespanParams()
