"""
What `planner.exact.worker` does for relaxations: OR-Tools' PDLP, and a bound that needs no trust.

PDLP (Applegate et al., Practical Large-Scale Linear Programming using Primal-Dual Hybrid Gradient,
NeurIPS 2021) ends with a solution and multipliers that are about right. On the sparse relaxations
with tens of thousands of cuts it takes a tenth of the simplex's time.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def relax(job: dict[str, Any]) -> tuple[Any, ...]:
    """`("relaxed", bound, values, multipliers)`; without values where PDLP gave up."""
    from ortools.pdlp import solve_log_pb2, solvers_pb2
    from ortools.pdlp.python import pdlp

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
        start.dual_solution = np.pad(multipliers, (0, len(job["row_lower"]) - len(multipliers)))
    program = pdlp.qp_from_mpmodel_proto(_proto(job), True)
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


def _proto(job: dict[str, Any]) -> Any:
    """The job as the protocol buffer that PDLP reads without SciPy."""
    from ortools.linear_solver import linear_solver_pb2

    model = linear_solver_pb2.MPModelProto()
    for lower, upper, cost in zip(job["lower"], job["upper"], job["cost"], strict=True):
        model.variable.add(lower_bound=lower, upper_bound=upper, objective_coefficient=cost)
    columns: list[list[int]] = [[] for _ in job["row_lower"]]
    values: list[list[float]] = [[] for _ in job["row_lower"]]
    entries = zip(job["entry_row"], job["entry_column"], job["entry_value"], strict=True)
    for row, column, value in entries:
        columns[row].append(column)
        values[row].append(value)
    rows = zip(job["row_lower"], job["row_upper"], columns, values, strict=True)
    for lower, upper, column, value in rows:
        model.constraint.add(
            lower_bound=lower, upper_bound=upper, var_index=column, coefficient=value
        )
    return model
