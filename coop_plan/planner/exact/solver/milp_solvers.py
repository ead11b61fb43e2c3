"""MILP solvers of the solver process: OR-Tools' MathOpt, and the solvers of PuLP."""

import datetime
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from coop_plan.planner.exact.model.milp import Answer, Milp, Outcome
from coop_plan.planner.exact.solver.jobs import PulpAnswer, SolveMilp, SolveProgress, SolvePulp


def solve_milp(job: SolveMilp, seconds: float, progress: Callable[[SolveProgress], None]) -> Answer:
    """Solve a program with a solver of OR-Tools, on one thread; only HiGHS reports progress.

    HiGHS fails on a few tiny programs with an error of its own (`kError`): SCIP solves those.
    """
    from pybind11_abseil.status import StatusNotOk  # of OR-Tools

    begin = time.monotonic()
    try:
        return _solve(job, seconds, progress)
    except StatusNotOk:
        if job.solver != "highs":
            raise
        left = max(0.0, seconds - (time.monotonic() - begin))
        return _solve(replace(job, solver="scip"), left, progress)


def _solve(job: SolveMilp, seconds: float, progress: Callable[[SolveProgress], None]) -> Answer:
    from ortools.math_opt import parameters_pb2, result_pb2

    highs = job.solver == "highs"
    parameters = parameters_pb2.SolveParametersProto()
    parameters.absolute_gap_tolerance = job.gap
    parameters.relative_gap_tolerance = job.relative_gap
    if job.nodes:
        parameters.node_limit = job.nodes
    if highs:
        parameters.highs.string_options["parallel"] = "off"
    else:
        parameters.threads = 1

    def read_log(lines: list[str]) -> None:
        for line in lines:
            # Dual bound and best objective of a line of HiGHS's branch-and-bound table.
            number = r"(-?inf|-?[\d.e+]+)"
            found = re.search(rf"%\s+{number}\s+{number}\s+(?:[\d.]+%|Large)", line)
            if found:
                progress(SolveProgress(float(found[1]), float(found[2])))

    model = to_proto(job.milp)
    result = run_mathopt(model, job.solver, parameters, seconds, read_log if highs else None)
    bounds = result.termination.objective_bounds
    values = None
    for solution in result.solutions:
        primal = solution.primal_solution
        if primal.feasibility_status == 2 and values is None:  # SOLUTION_STATUS_FEASIBLE
            values = [0.0] * len(job.milp.lower)
            solution_values = primal.variable_values
            for column, value in zip(solution_values.ids, solution_values.values, strict=True):
                values[column] = value
    reason = result_pb2.TerminationReasonProto.Name(result.termination.reason)
    outcome = Outcome.UNKNOWN if values is None else Outcome.FEASIBLE
    if reason in ("TERMINATION_REASON_OPTIMAL", "TERMINATION_REASON_INFEASIBLE"):
        outcome = Outcome[reason.removeprefix("TERMINATION_REASON_")]
    return Answer(outcome, bounds.dual_bound, bounds.primal_bound, values)


def run_mathopt(
    model: Any,
    solver: str,
    parameters: Any,
    seconds: float,
    read_log: Callable[[list[str]], None] | None = None,
) -> Any:
    """Result of a MathOpt solver on a model within a time limit (s), all as protocol buffers."""
    from ortools.math_opt import callback_pb2, model_parameters_pb2, parameters_pb2
    from ortools.math_opt.core.python import solver as core

    names = {"highs": "HIGHS", "scip": "GSCIP", "cp-sat": "CP_SAT"}
    kind = getattr(parameters_pb2, f"SOLVER_TYPE_{names[solver]}")
    parameters.time_limit.FromTimedelta(datetime.timedelta(seconds=min(seconds, 1e6)))
    initializer = parameters_pb2.SolverInitializerProto()
    options = model_parameters_pb2.ModelSolveParametersProto()
    callbacks = callback_pb2.CallbackRegistrationProto()
    return core.solve(
        model, kind, initializer, parameters, options, read_log, callbacks, None, None
    )


def to_proto(milp: Milp) -> Any:
    """The program as MathOpt's protocol buffer, filled by column as its Python API is too slow."""
    from ortools.math_opt import model_pb2

    model = model_pb2.ModelProto()
    model.variables.ids.extend(range(len(milp.lower)))
    model.variables.lower_bounds.extend(milp.lower)
    model.variables.upper_bounds.extend(milp.upper)
    model.variables.integers.extend(milp.integer)
    priced = [column for column, cost in enumerate(milp.cost) if cost]
    model.objective.linear_coefficients.ids.extend(priced)
    model.objective.linear_coefficients.values.extend(milp.cost[column] for column in priced)
    model.linear_constraints.ids.extend(range(len(milp.row_lower)))
    model.linear_constraints.lower_bounds.extend(milp.row_lower)
    model.linear_constraints.upper_bounds.extend(milp.row_upper)
    matrix = model.linear_constraint_matrix  # MathOpt wants it sorted by row, then column
    entries = zip(milp.entry_row, milp.entry_column, milp.entry_value, strict=True)
    rows, columns, values = zip(*sorted(entries), strict=True) if milp.entry_row else ((),) * 3
    matrix.row_ids.extend(rows)
    matrix.column_ids.extend(columns)
    matrix.coefficients.extend(values)
    return model


def solve_pulp(job: SolvePulp, seconds: float) -> PulpAnswer:
    """Solve a PuLP problem with the job's PuLP solver, on one thread."""
    import pulp

    variables, problem = pulp.LpProblem.fromDict(job.problem)
    options = {"msg": False, "timeLimit": seconds, "threads": 1}
    status = problem.solve(pulp.getSolver(job.solver, **options))
    if status == pulp.LpStatusInfeasible:
        return PulpAnswer(Outcome.INFEASIBLE, None)
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return PulpAnswer(Outcome.UNKNOWN, None)
    optimal = problem.sol_status == pulp.LpSolutionOptimal
    values = {name: variable.value() for name, variable in variables.items()}
    return PulpAnswer(Outcome.OPTIMAL if optimal else Outcome.FEASIBLE, values)
