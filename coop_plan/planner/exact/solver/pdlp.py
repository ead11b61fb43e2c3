"""Linear relaxations in the solver process by OR-Tools' PDLP, with a safe bound.

PDLP (Applegate et al., Practical Large-Scale Linear Programming using Primal-Dual Hybrid Gradient,
NeurIPS 2021) ends with approximate values and multipliers. On sparse relaxations with tens of
thousands of cuts it takes a tenth of the simplex's time.
"""

import numpy as np
from numpy.typing import NDArray

from coop_plan.planner.exact.model.milp import INFINITY, Milp, Relaxation
from coop_plan.planner.exact.solver.jobs import RelaxMilp

Vector = NDArray[np.float64]


class Relaxations:
    """Relaxations of one program that gains rows; existing rows are not built again."""

    def __init__(self) -> None:
        from ortools.linear_solver import linear_solver_pb2

        self._model = linear_solver_pb2.MPModelProto()
        self._entries = 0

    def solve(self, job: RelaxMilp, seconds: float) -> Relaxation:
        """Solve within the time limit (s); there are no values if PDLP gave up."""
        from ortools.pdlp import solve_log_pb2, solvers_pb2
        from ortools.pdlp.python import pdlp

        self._grow(job.milp)
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
        program = pdlp.qp_from_mpmodel_proto(self._model, True)
        result = pdlp.primal_dual_hybrid_gradient(program, parameters, start)
        values, multipliers = np.array(result.primal_solution), np.array(result.dual_solution)
        bound = lagrangian_bound(job.milp, multipliers)
        ended = (
            solve_log_pb2.TERMINATION_REASON_OPTIMAL,
            solve_log_pb2.TERMINATION_REASON_TIME_LIMIT,
        )
        if result.solve_log.termination_reason not in ended or not np.isfinite(bound):
            return Relaxation(bound if np.isfinite(bound) else -INFINITY, None, None)
        return Relaxation(bound, values, multipliers)

    def _grow(self, milp: Milp) -> None:
        """Append the new rows to the protocol buffer that PDLP reads without SciPy."""
        model = self._model
        if not model.variable:
            for lower, upper, cost in zip(milp.lower, milp.upper, milp.cost, strict=True):
                model.variable.add(lower_bound=lower, upper_bound=upper, objective_coefficient=cost)
        old = len(model.constraint)
        columns: list[list[int]] = [[] for _ in milp.row_lower[old:]]
        values: list[list[float]] = [[] for _ in columns]
        matrix = milp.entry_row, milp.entry_column, milp.entry_value
        for row, column, value in zip(*(part[self._entries :] for part in matrix), strict=True):
            columns[row - old].append(column)
            values[row - old].append(value)
        bounds = milp.row_lower[old:], milp.row_upper[old:]
        for lower, upper, column, value in zip(*bounds, columns, values, strict=True):
            model.constraint.add(
                lower_bound=lower, upper_bound=upper, var_index=column, coefficient=value
            )
        self._entries = len(milp.entry_row)


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
