"""
Path cuts: what keeps the relaxation of the time-point model from computing fractions of ops.

Let tensor t be needed after τ_j and not after τ_k, and let t, t₁, …, t_m be a path of the graph
against its edges: each is an input of the op that makes the one before it. Then one of them was
still there at τ_j, or the op v that makes the last one is computed again in between:

    Σ_i X[j, t_i] + Σ_{j<i≤k} Y[i, v] ≥ 1        (≥ X[l, t], j < l ≤ k, where t is only resident)

Within one segment that follows from the model. Over several it does not, when variables may be
fractions: a tenth of an input that stays resident pays for a tenth of its op in each of ten
segments. The cuts are separated one shortest path at a time.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.exact.milp import INFINITY, Milp, Relaxation
from planner.exact.timepoint import TimePointModel

Vector = NDArray[np.float64]

Relax = Callable[[Milp, float, float, Relaxation | None], Relaxation]
"""`planner.exact.solving.SolverProcess.relax`, or the same in this process."""

VIOLATION = 0.02
"""Cuts that are violated by less are not worth a row."""

CUTS_PER_INTERVAL = 40
CUTS_PER_OP = 2
"""How many cuts between the same two time points end at the same op, in one go."""

ACCURACY = 1e-3
"""Relative accuracy of relaxations; what they prove does not depend on it."""

PROGRESS = 5e-4
"""Share of the bound by which a round must raise it for another one to follow."""

QUICK_ACCURACY, QUICK_PROGRESS = 1e-2, 2e-2
"""The same where it has to be quick."""

PATIENCE = 2
"""Rounds without such progress before it ends."""


@dataclass(frozen=True)
class Path:
    """
    A cut between the time points at positions `low` and `high`.

    `tensors` begins with the one that is needed: by a first run, or resident at position `at`.
    """

    low: int
    high: int
    at: int | None
    tensors: tuple[int, ...]


@dataclass
class PathCuts:
    """
    The cuts found so far; they hold for every model with their time points.

    `quick` ones are for comparing models, not for a good bound; `rounds` may limit how often the
    relaxation is solved.
    """

    paths: list[Path] = field(default_factory=list)
    quick: bool = False
    rounds: int | None = None

    def strengthen(
        self,
        relax: Relax,
        model: TimePointModel,
        deadline: float,
        tell: Callable[[float], None] | None = None,
    ) -> float:
        """
        Add cuts to the model until its relaxation gains no more; the best bound of a relaxation.

        Cuts that are not tight in the last one are forgotten. The bound is −∞ where none was
        proved by `deadline` (a `time.monotonic` value, s). `tell` hears of every bound.
        """
        relaxed = model.milp.copy()
        for path in self.paths:
            _add(relaxed, model, path)
        bound = -INFINITY
        last: Relaxation | None = None
        accuracy, progress = (
            (QUICK_ACCURACY, QUICK_PROGRESS) if self.quick else (ACCURACY, PROGRESS)
        )
        stalled = 0
        solved = 0
        while stalled < PATIENCE and time.monotonic() < deadline:
            solved += 1
            answer = relax(relaxed, deadline, accuracy, last)
            if answer.bound < bound + progress * abs(bound):
                stalled += 1
            bound = max(bound, answer.bound)
            if tell is not None:
                tell(answer.bound)
            if answer.values is None:
                break
            last = answer
            known = set(self.paths)
            if solved == self.rounds:
                break
            found = [p for p in _violated(model, answer.values, deadline) if p not in known]
            if not found:
                break
            for path in found:
                _add(relaxed, model, path)
            self.paths += found
        if last is not None and last.values is not None:
            values = last.values
            self.paths = [path for path in self.paths if _slack(model, path, values) < VIOLATION]
        for path in self.paths:
            _add(model.milp, model, path)
        return bound


def _terms(model: TimePointModel, path: Path) -> tuple[dict[int, float], float]:
    """The left side of a cut without its constants, and its right side."""
    low, high = model.points.index(path.low), model.points.index(path.high)
    terms: dict[int, float] = {}
    demand = 1.0
    if path.at is not None:
        column = model.x[model.points.index(path.at)][path.tensors[0]]
        if column is not None:
            terms[column], demand = -1.0, 0.0
    for t in path.tensors:
        constant, kept = model.kept(low + 1, t)
        demand -= constant
        for column, value in kept:
            terms[column] = terms.get(column, 0.0) + value
    maker = model.program.problem.producer[path.tensors[-1]]
    for k in range(low + 1, high + 1):
        if maker in model.y[k]:
            terms[model.y[k][maker]] = 1.0
    return terms, demand


def _add(milp: Milp, model: TimePointModel, path: Path) -> None:
    terms, demand = _terms(model, path)
    milp.row([(column, value) for column, value in terms.items() if value], demand, INFINITY)


def _slack(model: TimePointModel, path: Path, values: Vector) -> float:
    terms, demand = _terms(model, path)
    return float(sum(value * values[column] for column, value in terms.items()) - demand)


def _violated(model: TimePointModel, values: Vector, deadline: float) -> Iterator[Path]:
    """For every two time points, the worst cuts between them."""
    for low in range(len(model.points) - 2):
        interval = _Interval(model, low, values)
        for high in range(low + 1, len(model.points)):
            interval.extend(high)
            if high > low + 1:
                yield from interval.cuts()
        if time.monotonic() > deadline:
            return


class _Interval:
    """
    What follows τ_low, up to a time point that moves on.

    `again` is Σ Y so far by op, `kept` X at τ_low by tensor, `needed` how much of a tensor was
    asked for since then. Where that was before the last segment, tighter cuts end there; so only
    `fresh` demands make cuts: how much, of which tensor, and where it is resident if that is not
    for a first run.
    """

    def __init__(self, model: TimePointModel, low: int, values: Vector) -> None:
        self.model = model
        self.values = values
        self.low = low
        self.start = model.points[low]
        self.high = low
        self.again: dict[int, float] = {}
        self.kept: dict[int, float] = {}
        self.needed: dict[int, float] = {}
        self.fresh: list[tuple[float, int, int | None]] = []

    def extend(self, high: int) -> None:
        """Add the segment that ends at time point number `high`."""
        model, producer = self.model, self.model.program.problem.producer
        self.high = high
        for op, column in model.y[high].items():
            if op < self.start:
                self.again[op] = self.again.get(op, 0.0) + self.values[column]
        demands = {t: self.values[c] for t, c in model.x[high].items() if c is not None}
        first = set(model.read_in(high))
        demands |= dict.fromkeys(first, 1.0)
        self.fresh = [
            (amount, t, None if t in first else model.points[high])
            for t, amount in demands.items()
            if producer[t] < self.start and amount > self.needed.get(t, 0.0)
        ]
        self.needed |= {t: amount for amount, t, _ in self.fresh}

    def _kept(self, t: int) -> float:
        if t not in self.kept:
            constant, terms = self.model.kept(self.low + 1, t)
            self.kept[t] = constant + sum(v * self.values[column] for column, v in terms)
        return self.kept[t]

    def cuts(self) -> Iterator[Path]:
        """The most violated cuts, few of them ending at one op."""
        program = self.model.program
        producer = program.problem.producer
        most: dict[int, float] = {}  # op → how much of it can be had again
        through: dict[int, int | None] = {}  # op → the input that limits it, or the op itself
        for op in sorted(self.again):
            most[op], through[op] = self.again[op], None
            for t in program.reads[op]:
                there = self._kept(t) + most.get(producer[t], 0.0)
                if there < most[op] - 1e-9:
                    most[op], through[op] = there, t
        violated = sorted(
            (-short, t, at)
            for amount, t, at in self.fresh
            if (short := amount - self._kept(t) - most.get(producer[t], 0.0)) > VIOLATION
        )
        ending: dict[tuple[int, bool], int] = {}
        for _, t, at in violated[: 4 * CUTS_PER_INTERVAL]:
            tensors = [t]
            while (step := through.get(producer[tensors[-1]])) is not None:
                tensors.append(step)
            end = producer[tensors[-1]], at is None
            ending[end] = ending.get(end, 0) + 1
            if ending[end] <= CUTS_PER_OP:
                yield Path(self.start, self.model.points[self.high], at, tuple(tensors))
