"""A mixed-integer linear program as plain lists, and what a solver answered."""

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the solver's process, which starts for every plan, needs no NumPy for a MILP
    import numpy as np
    from numpy.typing import NDArray

INFINITY = math.inf

Terms = list[tuple[int, float]]
"""A linear expression: (column, coefficient) pairs, each column at most once."""


@dataclass
class Milp:
    """
    Minimise cost · x, rows between their bounds. Columns and rows are numbered from 0.

    `entry_row`, `entry_column` and `entry_value` hold the matrix, one entry each.
    """

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    entry_row: list[int] = field(default_factory=list)
    entry_column: list[int] = field(default_factory=list)
    entry_value: list[float] = field(default_factory=list)

    def copy(self) -> "Milp":
        """A copy of its own."""
        return Milp(**{name: list(values) for name, values in vars(self).items()})

    def binary(self, cost: float = 0.0) -> int:
        """A new 0-1 column; returns its number."""
        return self.column(0.0, 1.0, cost, integer=True)

    def column(self, lower: float, upper: float, cost: float, *, integer: bool) -> int:
        """A new column; returns its number."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.cost.append(cost)
        self.integer.append(integer)
        return len(self.lower) - 1

    def row(self, terms: list[tuple[int, float]], lower: float, upper: float) -> int:
        """A new row, lower ≤ Σ value · column ≤ upper; each column at most once."""
        number = len(self.row_lower)
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        for column, value in terms:
            self.entry_row.append(number)
            self.entry_column.append(column)
            self.entry_value.append(value)
        return number


class Outcome(Enum):
    """How a solve ended."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Answer:
    """
    What a solver found: `values` per column (None without a solution), and a proved lower bound.

    Bound and objective are in the program's own units of cost.
    """

    outcome: Outcome
    bound: float
    objective: float
    values: list[float] | None


@dataclass(frozen=True)
class Relaxation:
    """
    What is known of a program whose columns need not be integers.

    The bound is proved; `values` per column and `multipliers` per row are about right, and None
    where there are none.
    """

    bound: float
    values: "NDArray[np.float64] | None"
    multipliers: "NDArray[np.float64] | None"
