"""Linear relaxations in the solver process by HiGHS, where first-order methods converge slowly."""

from math import inf

import numpy as np

from coop_plan.planner.exact.model.milp import Relaxation
from coop_plan.planner.exact.solver.jobs import RelaxMilp
from coop_plan.planner.exact.solver.milp_solvers import run_mathopt, to_proto
from coop_plan.planner.exact.solver.pdlp import lagrangian_bound


def relax(job: RelaxMilp, seconds: float) -> Relaxation:
    """
    Solve the relaxation by simplex within the time limit (s); the bound is −∞ if that is too short.

    The bound follows from the multipliers alone and is valid however inexact they are.
    """
    from ortools.math_opt import parameters_pb2

    parameters = parameters_pb2.SolveParametersProto()
    parameters.highs.string_options["parallel"] = "off"
    model = to_proto(job.milp)
    columns, rows = len(job.milp.lower), len(job.milp.row_lower)
    del model.variables.integers[:]
    model.variables.integers.extend([False] * columns)
    result = run_mathopt(model, "highs", parameters, seconds)
    if not result.solutions or result.solutions[0].primal_solution.feasibility_status != 2:
        return Relaxation(-inf, None, None)
    solution = result.solutions[0]
    values, multipliers = np.zeros(columns), np.zeros(rows)
    values[solution.primal_solution.variable_values.ids] = (
        solution.primal_solution.variable_values.values
    )
    multipliers[solution.dual_solution.dual_values.ids] = solution.dual_solution.dual_values.values
    return Relaxation(lagrangian_bound(job.milp, multipliers), values, multipliers)
