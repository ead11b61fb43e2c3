"""Path cuts: they stop the relaxation of the time-point model from recomputing fractions of ops.

Let tensor t be needed after τ_j and not after τ_k, and let t, t₁, …, t_m be a path of the graph
against its edges: each is an input of the op that makes the one before it. Then one of them was
still resident at τ_j, or the op v that makes the last one is recomputed in between. If ops have
variants, each of them reads the input. Then

    Σ_i X[j, t_i] + Σ_{j<i≤k} Y[i, v] ≥ 1        (≥ X[l, t], j < l ≤ k, where t is only resident)

With transfers, one of them may also have been prefetched. Then the left side has, for each of them,
the smaller of Σ_{j<l≤k} L[l, t_i] and G[j, t_i] as well, as the first one prefetched was on the
host before.

Within one segment the model implies the cut. Over several segments it does not, if variables may be
fractions: a tenth of an input that stays resident pays for a tenth of its op in each of ten
segments. Each separation step finds a shortest path.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from math import inf
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from coop_plan.planner.exact.model.milp import Milp, Relaxation
from coop_plan.planner.exact.model.separation import RelaxedSolution, most_violated
from coop_plan.planner.exact.model.timepoint import TimePointModel
from coop_plan.planner.exact.params import DEFAULTS

Vector = NDArray[np.float64]

MAX_CUTS = 3000
"""Maximum number of cuts added before the relaxation is solved again."""

Relax = Callable[[Milp, float, float, Relaxation | None], Relaxation]
"""Signature of `SolverProcess.relax` and of its counterpart in the bounding process."""


@dataclass(frozen=True)
class Path:
    """A cut between the time points at positions `low` and `high`.

    `tensors` begins with the one needed: by a first run, or as a resident of position
    `resident_at`. For those in `via_host_copy` the cut counts the host copy G, for others the
    prefetches L.
    """

    low: int
    high: int
    resident_at: int | None
    tensors: tuple[int, ...]
    via_host_copy: frozenset[int] = frozenset()


@dataclass
class PathCuts:
    """Cuts found so far; they hold for every model with their time points.

    Cuts are added from `min_violation` on.
    """

    min_violation: float = DEFAULTS.min_violation
    paths: list[Path] = field(default_factory=list)

    def strengthen(
        self,
        relax: Relax,
        model: TimePointModel,
        deadline: float,
        report: Callable[[float], None] | None = None,
    ) -> float:
        """Add cuts to the model until its relaxation gains no more; returns the best bound.

        Cuts that are slack in the last relaxation are removed. The bound is −∞ if none was proved
        by `deadline` (a `time.monotonic` value, s). Each bound is passed to `report`.
        """
        relaxed = model.milp.copy()
        for path in self.paths:
            _add(relaxed, model, path)
        bound = -inf
        last: Relaxation | None = None
        # (relative accuracy of the relaxation, least relative gain of a round): a round that gains
        # less moves on to the next pair; after the last one separation ends. Bounds are valid at
        # any accuracy.
        precision = [(1e-2, 2e-2), (3e-3, 5e-3), (1e-3, 5e-4), (1e-3, 5e-4)]
        stalled = 0
        solved = 0
        # PDLP is slow with transfers.
        simplex = model.transfers is not None and len(model.milp.lower) <= 60_000
        while stalled < len(precision) and time.monotonic() < deadline:
            solved += 1
            accuracy, progress = precision[stalled]
            if simplex:
                accuracy = 0.0
            answer = relax(relaxed, deadline, accuracy, last)
            gained = solved == 1 or answer.bound >= bound + progress * abs(bound)
            bound = max(bound, answer.bound)
            if report is not None:
                report(answer.bound)
            if answer.values is None:
                break
            last = answer
            found = _violated(model, answer.values, set(self.paths), deadline, self.min_violation)
            for path in found:
                _add(relaxed, model, path)
            self.paths += found
            if simplex and not found:
                break
            if not found or not gained:
                stalled += 1
        if last is not None and last.values is not None:
            slack = [_slack(model, path, last.values) for path in self.paths]
            kept = zip(self.paths, slack, strict=True)
            self.paths = [path for path, value in kept if value < self.min_violation]
        for path in self.paths:
            _add(model.milp, model, path)
        return bound


def _terms(model: TimePointModel, path: Path) -> tuple[dict[int, float], float]:
    """Left side of a cut without its constants, and its right side."""
    low, high = model.points.index(path.low), model.points.index(path.high)
    terms: dict[int, float] = {}
    demand = 1.0
    if path.resident_at is not None:
        column = model.x[model.points.index(path.resident_at)][path.tensors[0]]
        if column is not None:
            terms[column], demand = -1.0, 0.0
    for t in path.tensors:
        constant, kept = model.kept(low + 1, t)
        demand -= constant
        for column, value in kept:
            terms[column] = terms.get(column, 0.0) + value
        if model.transfers is not None:
            back = model.transfers.prefetch_columns(low, high, t, copied=t in path.via_host_copy)
            terms |= dict.fromkeys(back, 1.0)
    for k in range(low + 1, high + 1):
        terms |= dict(model.recomputed(k, path.tensors[-1]))
    return terms, demand


def _add(milp: Milp, model: TimePointModel, path: Path) -> None:
    terms, demand = _terms(model, path)
    milp.row([(column, value) for column, value in terms.items() if value], demand, inf)


def _slack(model: TimePointModel, path: Path, values: Vector) -> float:
    terms, demand = _terms(model, path)
    return float(sum(value * values[column] for column, value in terms.items()) - demand)


def _via_host_copy(model: TimePointModel, path: Path, values: Vector) -> frozenset[int]:
    """Tensors of a path for which the host copy is smaller than the prefetches."""
    low, high = model.points.index(path.low), model.points.index(path.high)
    transfers = model.transfers
    assert transfers is not None
    return frozenset(
        t
        for t in path.tensors
        if sum(values[transfers.prefetch_columns(low, high, t, copied=True)])
        < sum(values[transfers.prefetch_columns(low, high, t, copied=False)])
    )


def _violated(
    model: TimePointModel,
    values: Vector,
    known: Collection[Path],
    deadline: float,
    min_violation: float,
) -> list[Path]:
    """The most violated new cuts over all pairs of time points, the worst first."""
    solution = RelaxedSolution.of(model, values)
    found = []
    for low, start in enumerate(model.points[:-2]):
        amounts, cuts, tensors = most_violated(solution, low, min_violation)
        found += [(-amount, start, cuts[i : i + 2], tensors) for i, amount in enumerate(amounts)]
        if time.monotonic() > deadline:
            break
    found.sort(key=itemgetter(0))
    chosen: list[Path] = []
    for _, start, ((high, first, begin), (_, _, end)), tensors in found:
        point = model.points[high]
        path = Path(start, point, None if first else point, tuple(tensors[begin:end].tolist()))
        if model.transfers is not None:
            path = replace(path, via_host_copy=_via_host_copy(model, path, values))
        if path not in known:
            chosen.append(path)
        if len(chosen) == MAX_CUTS:
            break
    return chosen
