"""What transfers and overwriting see of the time-point model whose columns they add to."""

from typing import Protocol

from coop_plan.planner.exact.model.milp import Milp
from coop_plan.planner.exact.model.program import Program

Terms = list[tuple[int, float]]
"""A sum of columns: column, coefficient."""


class Segments(Protocol):
    """`planner.exact.model.timepoint.TimePointModel`, as its parts use it."""

    program: Program
    capacity: int
    milp: Milp
    points: list[int]
    cost_unit: float
    x: list[dict[int, int | None]]
    y: list[dict[int, int]]

    def start(self, k: int) -> int: ...
    def kept(self, k: int, t: int) -> tuple[int, Terms]: ...
    def again(self, k: int, t: int) -> Terms: ...
    def taken(self, k: int, source: int) -> list[int]: ...
