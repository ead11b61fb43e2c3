"""Jobs and results of a solver process: one frozen type each, sent as pickles.

| job         | solved by                        | result                                  |
| ----------- | -------------------------------- | --------------------------------------- |
| `SolveMilp` | `milp_solvers`, OR-Tools MathOpt | `SolveProgress` while it runs, `Answer` |
| `SolvePulp` | `milp_solvers`, PuLP             | `PulpAnswer`                            |
| `RelaxMilp` | `pdlp`, or `simplex` (HiGHS)     | `Relaxation`                            |

An exception in a solver is a `Failure`. The time limit is sent along with a job and is no part of
it. This module loads neither NumPy nor a kernel, so that the process starts at once.
"""

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
class Failure:
    """Text of the exception that ended a job."""

    text: str


Job = SolveMilp | RelaxMilp | SolvePulp
JobAnswer = Answer | Relaxation | PulpAnswer
