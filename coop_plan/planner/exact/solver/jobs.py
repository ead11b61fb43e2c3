"""Jobs and results of a solver process: one frozen type each, sent as pickles.

| job                 | solved by                        | result                                  |
| ------------------- | -------------------------------- | --------------------------------------- |
| `SolveMilp`         | `milp_solvers`, OR-Tools MathOpt | `SolveProgress` while it runs, `Answer` |
| `SolvePulp`         | `milp_solvers`, PuLP             | `PulpAnswer`                            |
| `RelaxMilp`         | `pdlp`, or `simplex` (HiGHS)     | `Relaxation`                            |
| `PackBlocks`        | `cp_sat`, OR-Tools CP-SAT        | `Packing`                               |
| `ScheduleIntervals` | `cp_sat`, OR-Tools CP-SAT        | `IntervalSchedule`                      |

An exception in a solver is a `Failure`. The time limit is sent along with a job and is no part of
it. This module loads neither NumPy nor a kernel, so that the process starts at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coop_plan.planner.exact.model.milp import Answer, Milp, Outcome, Relaxation


@dataclass(frozen=True)
class SolveMilp:
    """Solve a program with `solver`: "highs", "scip" or "cp-sat".

    The solve stops at the absolute `gap`, at `relative_gap`, or after `nodes` branch-and-bound
    nodes (0: no limit).
    """

    milp: Milp
    solver: str = "highs"
    gap: float = 0.0
    relative_gap: float = 0.0
    nodes: int = 0


@dataclass(frozen=True)
class SolveProgress:
    """Proved bound and best objective of a running solve."""

    bound: float
    objective: float


@dataclass(frozen=True)
class RelaxMilp:
    """
    Solve the linear relaxation of a program to a relative accuracy; 0: to optimality, by simplex.

    Every column must have finite bounds. `start` is the result of the same program, or of one with
    fewer rows.
    """

    milp: Milp
    accuracy: float
    start: Relaxation | None = None


@dataclass(frozen=True)
class SolvePulp:
    """Solve a PuLP problem, given as `LpProblem.toDict()`, with this PuLP solver."""

    problem: dict[str, Any]
    solver: str


@dataclass(frozen=True)
class PulpAnswer:
    """Outcome, and values by variable name if there is a solution."""

    outcome: Outcome
    values: dict[str, float] | None


@dataclass(frozen=True)
class PackBlocks:
    """Find offsets at which no two blocks overlap in time and address.

    Lifetimes are half-open, `first` to `last`; heights and capacity are in one unit of the caller.
    `same_offset` lists pairs of blocks that share one offset.
    """

    first: list[int]
    last: list[int]
    height: list[int]
    same_offset: list[tuple[int, int]]
    capacity: int


@dataclass(frozen=True)
class Packing:
    """Offsets in the job's unit; None if none were found in time."""

    offsets: list[int] | None


@dataclass(frozen=True)
class ScheduleIntervals:
    """Find the cheapest schedule by retention intervals (see `planner.exact.primal.intervals`).

    By op: `copies` (maximum runs), the tensors it `reads` and `makes`, `inplace_pairs` (output,
    input), the inputs that its runs end (`overwritten`), `until` (the last position before which it
    can be recomputed), `cost` (µs), `workspace`, and `rerun_outputs`, which only a recompute makes
    in the arena. `size` is by tensor; `step_outputs` are read at the end of the step. Sizes and
    capacity are in one unit. With `joint` every interval has an address, too.
    """

    capacity: int
    joint: bool
    copies: list[int]
    reads: Sequence[Sequence[int]]
    makes: Sequence[Sequence[int]]
    inplace_pairs: Sequence[Sequence[tuple[int, int]]]
    overwritten: Sequence[Sequence[int]]
    step_outputs: Sequence[int]
    until: list[int]
    cost: Sequence[float]
    workspace: list[int]
    size: list[int]
    rerun_outputs: list[list[int]]


@dataclass(frozen=True)
class IntervalSchedule:
    """Outcome, and the ops in the order of their runs if there is a schedule."""

    outcome: Outcome
    ops: list[int] | None


@dataclass(frozen=True)
class Failure:
    """Text of the exception that ended a job."""

    text: str


Job = SolveMilp | RelaxMilp | SolvePulp | PackBlocks | ScheduleIntervals
JobAnswer = Answer | Relaxation | PulpAnswer | Packing | IntervalSchedule
