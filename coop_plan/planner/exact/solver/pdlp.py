"""Linear relaxations in the solver process by OR-Tools' PDLP, with a safe bound.

PDLP (Applegate et al., Practical Large-Scale Linear Programming using Primal-Dual Hybrid Gradient,
NeurIPS 2021) ends with approximate values and multipliers. On sparse relaxations with tens of
thousands of cuts it takes a tenth of the simplex's time.
"""

from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coop_plan.planner.exact.model.milp import Milp, Relaxation
from coop_plan.planner.exact.solver.jobs import RelaxMilp

Vector = NDArray[np.float64]


def relax(job: RelaxMilp, seconds: float) -> Relaxation:
    """Solve the relaxation within the time limit (s); there are no values if PDLP gave up."""
    from ortools.pdlp import solve_log_pb2, solvers_pb2
    from ortools.pdlp.python import pdlp

    parameters = solvers_pb2.PrimalDualHybridGradientParams()
    parameters.num_threads = 1
    criteria = parameters.termination_criteria
    criteria.simple_optimality_criteria.eps_optimal_relative = job.accuracy
    criteria.simple_optimality_criteria.eps_optimal_absolute = job.accuracy
    criteria.time_sec_limit = seconds
    start = None
    known = job.start
    if known is not None and known.values is not None and known.multipliers is not None:
        start = pdlp.PrimalAndDualSolution()
        start.primal_solution = known.values
        missing = len(job.milp.row_lower) - len(known.multipliers)
        start.dual_solution = np.pad(known.multipliers, (0, missing))
    program = pdlp.qp_from_mpmodel_proto(_to_proto(job.milp), True)
    result = pdlp.primal_dual_hybrid_gradient(program, parameters, start)
    values, multipliers = np.array(result.primal_solution), np.array(result.dual_solution)
    bound = lagrangian_bound(job.milp, multipliers)
    ended = (
        solve_log_pb2.TERMINATION_REASON_OPTIMAL,
        solve_log_pb2.TERMINATION_REASON_TIME_LIMIT,
    )
    if result.solve_log.termination_reason not in ended or not np.isfinite(bound):
        return Relaxation(bound if np.isfinite(bound) else -inf, None, None)
    return Relaxation(bound, values, multipliers)


def _to_proto(milp: Milp) -> Any:
    """The relaxation as the protocol buffer that PDLP reads without SciPy."""
    from ortools.linear_solver import linear_solver_pb2

    model = linear_solver_pb2.MPModelProto()
    for lower, upper, cost in zip(milp.lower, milp.upper, milp.cost, strict=True):
        model.variable.add(lower_bound=lower, upper_bound=upper, objective_coefficient=cost)
    for lower, upper in zip(milp.row_lower, milp.row_upper, strict=True):
        model.constraint.add(lower_bound=lower, upper_bound=upper)
    entries = milp.entry_row, milp.entry_column, milp.entry_value
    for row, column, value in zip(*entries, strict=True):
        model.constraint[row].var_index.append(column)
        model.constraint[row].coefficient.append(value)
    return model


def lagrangian_bound(milp: Milp, multipliers: Vector) -> float:
    """Lagrangian dual value at any multipliers: a lower bound on the optimum.

    All columns must have finite bounds.
    """
    lower, upper = np.array(milp.row_lower), np.array(milp.row_upper)
    wrong = ((multipliers > 0) & np.isinf(lower)) | ((multipliers < 0) & np.isinf(upper))
    price = np.where(wrong, 0.0, multipliers)
    side = np.where(price > 0, lower, np.where(price < 0, upper, 0.0))
    reduced = np.array(milp.cost)
    entries = np.array(milp.entry_value) * price[np.array(milp.entry_row, dtype=np.intp)]
    np.subtract.at(reduced, np.array(milp.entry_column, dtype=np.intp), entries)
    least = np.minimum(reduced * np.array(milp.lower), reduced * np.array(milp.upper))
    return float(side @ price + least.sum())
