"""
The child process that solves; run as a script, it does not import the planner, to start at once.

Jobs come in on stdin and messages go out on stdout, all pickled plain tuples and dicts; the parent
is `planner.exact.solver.process`, which kills this process when its time is up. So a solver may hang,
print, crash or run out of memory without taking the planner with it.

A job is a dict. To solve: `solver`, `seconds`, `gap` and `relative_gap` to stop at (of the
objective), and the fields of `planner.exact.model.milp.Milp`; answered by `("news", bound, objective)` as
often as there is some, then `("answer", outcome, bound, objective, values)`. To pack blocks:
`seconds`, `capacity`, `same`, and per block `first`, `last`, `height`; answered by `("packed",
offsets)`. To solve with PuLP: `seconds`, `solver` and `pulp`, the problem as a dict; answered by
`("solved", outcome, values by name)`. To schedule with CP-SAT: what `planner.exact.model.intervals`
sends; answered by `("scheduled", outcome, ops in order)`. To relax: the fields of
`planner.exact.model.milp.Milp`, `seconds`, `accuracy` and `start`, what an earlier answer gave of values
and multipliers, or None; answered by `("relaxed", bound, values, multipliers)`. An exception is
`("failure", text)`.
"""

import contextlib
import datetime
import importlib
import os
import pickle
import re
import resource
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, cast

SOLVERS = {
    "highs": "SOLVER_TYPE_HIGHS",
    "scip": "SOLVER_TYPE_GSCIP",
    "cp-sat": "SOLVER_TYPE_CP_SAT",
}

OUTCOMES = {"TERMINATION_REASON_OPTIMAL": "optimal", "TERMINATION_REASON_INFEASIBLE": "infeasible"}

HIGHS_LOG = re.compile(r"%\s+(-?inf|-?[\d.e+]+)\s+(-?inf|-?[\d.e+]+)\s+(?:[\d.]+%|Large)")
"""The dual bound and the best objective in a line of HiGHS's branch-and-bound table."""


def solve(job: dict[str, Any], tell: Callable[[tuple[Any, ...]], None]) -> tuple[Any, ...]:
    """Solve one model with a solver of OR-Tools, on one thread."""
    from ortools.math_opt import callback_pb2, parameters_pb2, result_pb2
    from ortools.math_opt import model_parameters_pb2 as model_parameters
    from ortools.math_opt.core.python import solver as core

    highs = job["solver"] == "highs"
    parameters = parameters_pb2.SolveParametersProto()
    parameters.time_limit.FromTimedelta(datetime.timedelta(seconds=job["seconds"]))
    parameters.absolute_gap_tolerance = job["gap"]
    parameters.relative_gap_tolerance = job["relative_gap"]
    if highs:
        parameters.highs.string_options["parallel"] = "off"
    else:
        parameters.threads = 1

    def read_log(lines: list[str]) -> None:
        for line in lines:
            found = HIGHS_LOG.search(line)
            if found:
                tell(("news", float(found[1]), float(found[2])))

    result = core.solve(
        _proto(job),
        getattr(parameters_pb2, SOLVERS[job["solver"]]),
        parameters_pb2.SolverInitializerProto(),
        parameters,
        model_parameters.ModelSolveParametersProto(),
        read_log if highs else None,
        callback_pb2.CallbackRegistrationProto(),
        None,
        None,
    )
    bounds = result.termination.objective_bounds
    values = None
    for solution in result.solutions:
        primal = solution.primal_solution
        if primal.feasibility_status == 2 and values is None:  # SOLUTION_STATUS_FEASIBLE
            values = [0.0] * len(job["lower"])
            known = primal.variable_values
            for column, value in zip(known.ids, known.values, strict=True):
                values[column] = value
    reason = result_pb2.TerminationReasonProto.Name(result.termination.reason)
    outcome = OUTCOMES.get(reason, "unknown" if values is None else "feasible")
    return "answer", outcome, bounds.dual_bound, bounds.primal_bound, values


def solve_pulp(job: dict[str, Any], _: object) -> tuple[Any, ...]:
    """Solve a PuLP problem with the solver of that name, on one thread."""
    import pulp

    variables, problem = pulp.LpProblem.fromDict(job["pulp"])
    options = {"msg": False, "timeLimit": job["seconds"], "threads": 1}
    status = problem.solve(pulp.getSolver(job["solver"], **options))
    if status == pulp.LpStatusInfeasible:
        return "solved", "infeasible", None
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return "solved", "unknown", None
    optimal = problem.sol_status == pulp.LpSolutionOptimal
    values = {name: variable.value() for name, variable in variables.items()}
    return "solved", "optimal" if optimal else "feasible", values


def pack(job: dict[str, Any], _: object) -> tuple[Any, ...]:
    """See `planner.exact.solver.worker_cp`."""
    return cast("tuple[Any, ...]", importlib.import_module("worker_cp").pack(job))


def intervals(job: dict[str, Any], _: object) -> tuple[Any, ...]:
    """See `planner.exact.solver.worker_cp`."""
    return cast("tuple[Any, ...]", importlib.import_module("worker_cp").intervals(job))


def relax(job: dict[str, Any], _: object) -> tuple[Any, ...]:
    """See `planner.exact.solver.worker_lp`."""
    return cast("tuple[Any, ...]", importlib.import_module("worker_lp").relax(job))


def _proto(job: dict[str, Any]) -> Any:
    """The job as MathOpt's protocol buffer, filled column-wise: its Python API is too slow."""
    from ortools.math_opt import model_pb2

    model = model_pb2.ModelProto()
    model.variables.ids.extend(range(len(job["lower"])))
    model.variables.lower_bounds.extend(job["lower"])
    model.variables.upper_bounds.extend(job["upper"])
    model.variables.integers.extend(job["integer"])
    priced = [column for column, cost in enumerate(job["cost"]) if cost]
    model.objective.linear_coefficients.ids.extend(priced)
    model.objective.linear_coefficients.values.extend(job["cost"][column] for column in priced)
    model.linear_constraints.ids.extend(range(len(job["row_lower"])))
    model.linear_constraints.lower_bounds.extend(job["row_lower"])
    model.linear_constraints.upper_bounds.extend(job["row_upper"])
    matrix = model.linear_constraint_matrix  # MathOpt wants it sorted by row, then column
    entries = zip(job["entry_row"], job["entry_column"], job["entry_value"], strict=True)
    rows, columns, values = zip(*sorted(entries), strict=True) if job["entry_row"] else ((),) * 3
    matrix.row_ids.extend(rows)
    matrix.column_ids.extend(columns)
    matrix.coefficients.extend(values)
    return model


KINDS: dict[str, Callable[[dict[str, Any], Any], tuple[Any, ...]]] = {
    "pulp": solve_pulp,
    "height": pack,
    "copies": intervals,
    "accuracy": relax,
    "row_lower": solve,
}
"""Which function answers a job that has this key."""


def connect(memory: int) -> Callable[[object], None]:
    """Bound this process's memory (bytes), and keep stdout for what the result sends."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    messages = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a solver may print

    def send(message: object) -> None:
        pickle.dump(message, messages)
        messages.flush()

    return send


def serve(jobs: BinaryIO, send: Callable[[object], None]) -> None:
    """Answer jobs until the stream ends."""
    while True:
        try:
            job = pickle.load(jobs)  # noqa: S301  (written by our own parent process)
        except EOFError:
            return
        try:
            answer = KINDS[next(kind for kind in KINDS if kind in job)](job, send)
        except MemoryError:
            return
        except Exception as error:
            answer = "failure", f"{type(error).__name__}: {error}"
        send(answer)


def main() -> None:
    """Serve the parent."""
    send = connect(int(sys.argv[1]))
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        serve(sys.stdin.buffer, send)


if __name__ == "__main__":
    main()
