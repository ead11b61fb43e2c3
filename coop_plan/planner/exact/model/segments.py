"""Interface of the time-point model for the files that add columns to it."""

from typing import Protocol

from coop_plan.planner.exact.model.milp import Milp, Terms
from coop_plan.planner.exact.model.program import Program


class Segments(Protocol):
    """The part of `planner.exact.model.timepoint.TimePointModel` that added columns refer to."""

    program: Program
    capacity: int
    milp: Milp
    points: list[int]
    cost_unit: float
    f: dict[int, int]
    x: list[dict[int, int | None]]
    y: list[dict[int, int]]

    def start(self, k: int) -> int: ...
    def cost(self, v: int) -> float: ...
    def kept(self, k: int, t: int) -> tuple[int, Terms]: ...
    def recomputed(self, k: int, t: int) -> Terms: ...
    def inplace_columns(self, k: int, source: int) -> list[int]: ...
