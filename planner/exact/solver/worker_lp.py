"""
What `planner.exact.solver.worker` does for relaxations: OR-Tools' PDLP, and a bound that needs no trust.

PDLP (Applegate et al., Practical Large-Scale Linear Programming using Primal-Dual Hybrid Gradient,
NeurIPS 2021) ends with a solution and multipliers that are about right. On the sparse relaxations
with tens of thousands of cuts it takes a tenth of the simplex's time.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


class Relaxations:
    """Relaxations of one program that gets more and more rows; the old ones are not sent again."""

    def __init__(self) -> None:
        from ortools.linear_solver import linear_solver_pb2

        self._model = linear_solver_pb2.MPModelProto()
        self._entries = 0

    def solve(self, job: dict[str, Any]) -> tuple[Any, ...]:
        """`("relaxed", bound, values, multipliers)`; without values where PDLP gave up."""
        from ortools.pdlp import solve_log_pb2, solvers_pb2
        from ortools.pdlp.python import pdlp

        self._grow(job)
        parameters = solvers_pb2.PrimalDualHybridGradientParams()
        parameters.num_threads = 1
        criteria = parameters.termination_criteria
        criteria.simple_optimality_criteria.eps_optimal_relative = job["accuracy"]
        criteria.simple_optimality_criteria.eps_optimal_absolute = job["accuracy"]
        criteria.time_sec_limit = job["seconds"]
        start = None
        if job["start"] is not None:
            start = pdlp.PrimalAndDualSolution()
            values, multipliers = job["start"]
            start.primal_solution = values
            missing = len(job["row_lower"]) - len(multipliers)
            start.dual_solution = np.pad(multipliers, (0, missing))
        program = pdlp.qp_from_mpmodel_proto(self._model, True)
        result = pdlp.primal_dual_hybrid_gradient(program, parameters, start)
        values, multipliers = np.array(result.primal_solution), np.array(result.dual_solution)
        bound = lagrangian_bound(job, multipliers)
        ended = (
            solve_log_pb2.TERMINATION_REASON_OPTIMAL,
            solve_log_pb2.TERMINATION_REASON_TIME_LIMIT,
        )
        if result.solve_log.termination_reason not in ended or not np.isfinite(bound):
            return "relaxed", bound if np.isfinite(bound) else -np.inf, None, None
        return "relaxed", bound, values, multipliers

    def _grow(self, job: dict[str, Any]) -> None:
        """Make the protocol buffer that PDLP reads without SciPy the whole job."""
        model = self._model
        if not model.variable:
            for lower, upper, cost in zip(job["lower"], job["upper"], job["cost"], strict=True):
                model.variable.add(lower_bound=lower, upper_bound=upper, objective_coefficient=cost)
        old = len(model.constraint)
        columns: list[list[int]] = [[] for _ in job["row_lower"][old:]]
        values: list[list[float]] = [[] for _ in columns]
        fields = ("entry_row", "entry_column", "entry_value")
        entries = zip(*(job[name][self._entries :] for name in fields), strict=True)
        for row, column, value in entries:
            columns[row - old].append(column)
            values[row - old].append(value)
        bounds = job["row_lower"][old:], job["row_upper"][old:]
        for lower, upper, column, value in zip(*bounds, columns, values, strict=True):
            model.constraint.add(
                lower_bound=lower, upper_bound=upper, var_index=column, coefficient=value
            )
        self._entries = len(job["entry_row"])


def relax(job: dict[str, Any]) -> tuple[Any, ...]:
    """The relaxation of a single program, as `Relaxations.solve`."""
    return Relaxations().solve(job)


def lagrangian_bound(job: dict[str, Any], multipliers: Vector) -> float:
    """
    The least cost with rows priced at the multipliers: a lower bound, whatever they are.

    All columns must have finite bounds.
    """
    lower, upper = np.array(job["row_lower"]), np.array(job["row_upper"])
    wrong = ((multipliers > 0) & np.isinf(lower)) | ((multipliers < 0) & np.isinf(upper))
    price = np.where(wrong, 0.0, multipliers)
    side = np.where(price > 0, lower, np.where(price < 0, upper, 0.0))
    reduced = np.array(job["cost"])
    entries = np.array(job["entry_value"]) * price[np.array(job["entry_row"], dtype=np.intp)]
    np.subtract.at(reduced, np.array(job["entry_column"], dtype=np.intp), entries)
    least = np.minimum(reduced * np.array(job["lower"]), reduced * np.array(job["upper"]))
    return float(side @ price + least.sum())
