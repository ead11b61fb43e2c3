"""Mixed-integer linear program as plain lists, and results of its solution."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the solver's process, which starts for every plan, needs no NumPy for a MILP
    import numpy as np
    from numpy.typing import NDArray

ROUNDING = 1e-9
"""Relative slack of memory rows, so that scaling by the capacity cuts off no solution."""

Terms = list[tuple[int, float]]
"""A linear expression: (column, coefficient) pairs, each column at most once."""


@dataclass
class Milp:
    """Minimise cost · x subject to row bounds; columns and rows are numbered from 0.

    `entry_row`, `entry_column` and `entry_value` hold the matrix in coordinate form.
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
        """Deep copy of the program."""
        return Milp(**{name: list(values) for name, values in vars(self).items()})

    def binary(self, cost: float = 0.0) -> int:
        """Add a 0-1 column; returns its number."""
        return self.column(0.0, 1.0, cost, integer=True)

    def column(self, lower: float, upper: float, cost: float, *, integer: bool) -> int:
        """Add a column; returns its number."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.cost.append(cost)
        self.integer.append(integer)
        return len(self.lower) - 1

    def row(self, terms: list[tuple[int, float]], lower: float, upper: float) -> int:
        """Add the row lower ≤ Σ value · column ≤ upper (distinct columns); returns its number."""
        number = len(self.row_lower)
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        for column, value in terms:
            self.entry_row.append(number)
            self.entry_column.append(column)
            self.entry_value.append(value)
        return number

    def match(self, pairs: Iterable[tuple[tuple[int, int], int]]) -> None:
        """Rows Σ column ≤ 1 per output and per input of ((output, input), column) pairs."""
        pairs = list(pairs)
        for side in (0, 1):
            for t in {pair[side] for pair, _ in pairs}:
                same = [(column, 1.0) for pair, column in pairs if pair[side] == t]
                if len(same) > 1:
                    self.row(same, -inf, 1.0)

    def rounded_rows(self, weights: dict[int, int], room: int, finest: int) -> list[int]:
        """Rows Σ ⌊weight / s⌋ · column ≤ ⌊room / s⌋ (Chvátal, 1973) for weights s ≥ room / finest.

        Without them, half of a tensor fits where only half of it has room. Returns their numbers.
        """
        sizes = sorted({w for w in weights.values() if w * finest >= max(room, 1)})
        rows = []
        for s in sizes:
            terms = [(c, float(w // s)) for c, w in weights.items() if w // s]
            rows.append(self.row(terms, -inf, room // s))
        return rows


class Outcome(Enum):
    """Termination status of a solve."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Answer:
    """Result of a solve: `values` per column (None without a solution) and a proved lower bound.

    Bound and objective are in the program's units of cost.
    """

    outcome: Outcome
    bound: float
    objective: float
    values: list[float] | None


@dataclass(frozen=True)
class Relaxation:
    """Result of a linear relaxation.

    The bound is proved; `values` per column and `multipliers` per row are approximate, or None.
    """

    bound: float
    values: "NDArray[np.float64] | None"
    multipliers: "NDArray[np.float64] | None"
