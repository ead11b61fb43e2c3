"""
What a solver's process is asked, and what it answers: one frozen type each, sent as pickles.

| job                 | solved by                        | answer                                 |
| ------------------- | -------------------------------- | -------------------------------------- |
| `SolveMilp`         | `milp_solvers`, OR-Tools MathOpt | `News` while it runs, then `Answer`    |
| `SolvePulp`         | `milp_solvers`, PuLP             | `PulpAnswer`                           |
| `RelaxMilp`         | `pdlp`, OR-Tools PDLP, or HiGHS  | `Relaxation`                           |
| `PackBlocks`        | `cp_sat`, OR-Tools CP-SAT        | `Packing`                              |
| `ScheduleIntervals` | `cp_sat`, OR-Tools CP-SAT        | `IntervalSchedule`                     |

An exception while solving is a `Failure`. A job says nothing of time: how long it may take is sent
along with it. Nothing here loads NumPy or a kernel, so that the process starts at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coop_plan.planner.exact.model.milp import Answer, Milp, Outcome, Relaxation


@dataclass(frozen=True)
class SolveMilp:
    """
    Solve a program with `solver`, "highs", "scip" or "cp-sat".

    It stops at `gap`, in units of the objective, at `relative_gap`, a share of it, or after so many
    `nodes` of branch and bound (0: any number).
    """

    milp: Milp
    solver: str = "highs"
    gap: float = 0.0
    relative_gap: float = 0.0
    nodes: int = 0


@dataclass(frozen=True)
class SolveProgress:
    """A proved bound and the best objective so far, while a solve runs."""

    bound: float
    objective: float


@dataclass(frozen=True)
class RelaxMilp:
    """
    Solve the relaxation of a program to a relative accuracy; 0: to its optimum, by simplex.

    Every column must have finite bounds. `start` is the answer to the same program, or to one with
    fewer rows.
    """

    milp: Milp
    accuracy: float
    start: Relaxation | None = None


@dataclass(frozen=True)
class SolvePulp:
    """Solve a PuLP problem, as `LpProblem.toDict()` gives it, with PuLP's solver of that name."""

    problem: dict[str, Any]
    solver: str


@dataclass(frozen=True)
class PulpAnswer:
    """How that ended, and values by name if there are any."""

    outcome: Outcome
    values: dict[str, float] | None


@dataclass(frozen=True)
class PackBlocks:
    """
    Find offsets at which no two blocks overlap, in time and address.

    Lifetimes are half-open, `first` to `last`; heights and capacity are in one unit of the
    caller's. `same` are pairs of blocks that lie at one offset.
    """

    first: list[int]
    last: list[int]
    height: list[int]
    same_offset: list[tuple[int, int]]
    capacity: int


@dataclass(frozen=True)
class Packing:
    """Offsets in the unit of the job, or None if none were found in time."""

    offsets: list[int] | None


@dataclass(frozen=True)
class ScheduleIntervals:
    """
    Find the cheapest schedule by retention intervals (see `planner.exact.primal.intervals`).

    By op: `copies` (runs it may have), the tensors it `reads` and `makes`, in-place `pairs`
    (output, input), the inputs that end with its runs (`overwritten`), `until` (the last position
    before which it can run again), `cost` (µs), `workspace`, and the tensors that only a run after
    the first one makes in the arena (`again`). `size` is by tensor; `kept` are the tensors that the
    end of the step reads. Sizes and capacity are in one unit. With `joint` every interval has an
    address too.
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
    """How that ended, and the ops in the order they run if there is a schedule."""

    outcome: Outcome
    ops: list[int] | None


@dataclass(frozen=True)
class Failure:
    """The exception that ended a job, as text."""

    text: str


Job = SolveMilp | RelaxMilp | SolvePulp | PackBlocks | ScheduleIntervals
JobAnswer = Answer | Relaxation | PulpAnswer | Packing | IntervalSchedule
