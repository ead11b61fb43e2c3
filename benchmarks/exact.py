"""
Exact planners: overhead, proved bound, gap and CPU seconds by graph and budget.

    python -m benchmarks.exact table DIR         the known optima, by optimal and checkmate
    python -m benchmarks.exact traces DIR        real traces at 0.8 … 0.3 of their peaks
    python -m benchmarks.exact tight GRAPH...    any graphs just above the smallest budget
    python -m benchmarks.exact solvers DIR       the same models solved by CBC, HiGHS, SCIP, CP-SAT
    python -m benchmarks.exact files GRAPH...    any graphs, at --budget

A GRAPH that is a number is a synthetic GPT of so many layers. DIR has the graphs as
`coop-plan/graph/1`. One process and one solver thread run at a time. CPU seconds include the
solver's process.
"""

import itertools
import resource
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.plan_quality import TRACED_PEAKS
from benchmarks.report import Column, Report, parser
from benchmarks.synthetic import gpt
from coop_plan.planner import InfeasibleBudgetError, Problem, plan
from coop_plan.planner.core.errors import TimeLimitError
from coop_plan.planner.exact.incumbent import Incumbent
from coop_plan.planner.exact.model.milp import Milp, Outcome
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.timepoint import COST_SCALE, TimePointModel
from coop_plan.planner.exact.refine import Refinement
from coop_plan.planner.exact.solver.process import SolverProcess
from coop_plan.planner.keep_all import keep_all_schedule
from coop_plan.planner.placement.layout import lay_out
from coop_plan.schemas import Graph, InvalidInputError, load_graph

KNOWN = [
    ("chain_unit_16", 0.5, 27.27),
    ("chain_vgg_32", 0.5, 3.075),
    ("roofline_resnet18", 0.5, 12.088),
    ("roofline_resnet18", 0.7, 5.071),
    ("roofline_unet", 0.5, 12.873),
    ("roofline_unet", 0.4, 16.86),
    ("roofline_unet", 0.7, 6.339),
    ("roofline_gpt2_4", 0.6, 17.283),
    ("roofline_gpt2_4", 0.7, 10.097),
    ("roofline_gpt2_12", 0.5, 14.83),
    ("roofline_gpt2_12", 0.35, 24.65),
]
"""Graph, share of keep-everything's peak, optimum in % overhead."""

TRACES = ("resnet32", "unet", "densenet121", "transformer")
SHARES = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
TIGHT = (1.0, 1.02, 1.05, 1.1, 1.2)
"""Budgets near the smallest, as multiples of it without resident bytes."""

CHECKMATE_OPS = 40


def cpu_seconds() -> float:
    """CPU time of this process and of its ended children."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


PERCENT = ".3%"
FIGURES = (
    Column("overhead", form=PERCENT),
    Column("bound", form=PERCENT),
    Column("gap", form=PERCENT),
    "status",
    Column("cpu_seconds", "CPU s", ".1f"),
)


def measure(graph: Graph, budget: str | int, method: str, limit: float | None, **options) -> dict:
    """Figures of one row; `host_budget=0` because bounds are for recomputation alone."""
    before = cpu_seconds()
    limit = None if method == "coop-offline" else limit
    try:
        made = plan(graph, budget, method=method, time_limit=limit, host_budget=0, **options)
    except (InfeasibleBudgetError, TimeLimitError, InvalidInputError) as error:
        return {"status": str(error)[:60], "cpu_seconds": cpu_seconds() - before}
    found = {"overhead": made.overhead, "status": made.status}
    if made.lower_bound_us is not None:
        found["bound"] = made.lower_bound_us / made.base_cost_us - 1
        found["gap"] = made.cost_us / made.lower_bound_us - 1
    return {**found, "cpu_seconds": cpu_seconds() - before}


def optima(folder: Path, limit: float) -> Report:
    """Known optima."""
    report = Report("graph", "share", "known", "method", *FIGURES, progress=True)
    for name, share, known in KNOWN:
        graph = load_graph(str(folder / f"{name}.json"))
        for method in ("coop-offline", "optimal", "checkmate"):
            if method != "checkmate" or len(graph.ops) <= CHECKMATE_OPS:
                figures = measure(graph, f"{share:.0%}", method, limit, alignment=1)
                report.add(graph=name, share=share, known=f"{known}%", method=method, **figures)
    return report


def traces(folder: Path, limit: float) -> Report:
    """Recorded traces, outputs in the arena."""
    report = Report("graph", "share", "method", *FIGURES, progress=True)
    for name in TRACES:
        graph = load_graph(str(folder / f"{name}.json"))
        for share, method in itertools.product(SHARES, ("coop-offline", "auto")):
            options = {"alignment": 1, "outputs": "arena"}
            figures = measure(graph, int(share * TRACED_PEAKS[name]), method, limit, **options)
            report.add(graph=name, share=share, method=method, **figures)
    return report


def tight(graphs: Iterable[tuple[str, Graph]], limit: float) -> Report:
    """Any graphs at coop-offline's smallest budget and a little above, outputs in the arena."""
    report = Report("graph", "ops", "times_the_smallest", "method", *FIGURES, progress=True)
    options = {"alignment": 1, "outputs": "arena"}
    for name, graph in graphs:
        least = plan(graph, "min", **options)
        for factor in TIGHT:
            above = int(factor * (least.budget_bytes - least.resident_bytes))
            figures = measure(graph, least.resident_bytes + above, "auto", limit, **options)
            about = {"graph": name, "ops": len(graph.ops), "method": "auto"}
            report.add(**about, times_the_smallest=factor, **figures)
    return report


def files(graphs: Iterable[tuple[str, Graph]], budgets: list[str], limit: float) -> Report:
    """Any graphs at these budgets."""
    report = Report("graph", "ops", "budget", "method", *FIGURES, progress=True)
    for name, graph in graphs:
        for budget, method in itertools.product(budgets, ("coop-offline", "optimal")):
            figures = measure(graph, budget, method, limit)
            report.add(graph=name, ops=len(graph.ops), budget=budget, method=method, **figures)
    return report


def models(graph: Graph, share: float, limit: float) -> Iterator[tuple[int, Milp, float]]:
    """The models of successive rounds: time points, model, and the base cost in its units."""
    problem = Problem.from_graph(graph, 1)
    everything, _ = lay_out(keep_all_schedule(problem))
    arena = int((problem.fixed_bytes + everything.arena_bytes) * share) - problem.fixed_bytes
    program = Program.of(problem)
    capacity = program.problem.rounded(arena)
    with SolverProcess() as process:
        rounds = Refinement(
            program, process, None, Incumbent(problem, arena), capacity, time.monotonic() + limit
        )
        while True:
            model = TimePointModel(program, capacity, rounds.points, rounds.cuts)
            yield len(rounds.points), model.milp, COST_SCALE
            readout = rounds.round()
            if readout is None or not readout.overflows or not rounds.refine(readout.overflows):
                return


def solvers(folder: Path, limit: float) -> Report:
    """The last round's model of each known optimum, solved by each solver."""
    report = Report(
        *("graph", "share", "time_points", "columns", "solver"),
        *(Column("overhead", form=PERCENT), Column("bound", form=PERCENT)),
        Column("cpu_seconds", "CPU s", ".1f"),
        progress=True,
    )
    for name, share, _ in KNOWN:
        graph = load_graph(str(folder / f"{name}.json"))
        points, milp, scale = list(models(graph, share, limit))[-1]
        for solver in ("highs", "scip", "cp-sat", "cbc"):
            before = cpu_seconds()
            with SolverProcess() as process:
                until = time.monotonic() + limit
                if solver == "cbc":
                    found = process.solve_pulp(as_pulp(milp), until, "PULP_CBC_CMD")
                    objective = None if found.values is None else objective_of(milp, found.values)
                    bound = objective if found.outcome is Outcome.OPTIMAL else None
                else:
                    answer = process.solve(milp, until, solver=solver, gap=1e-6 * scale)
                    objective = answer.objective if answer.values else None
                    bound = answer.bound
            report.add(
                graph=name,
                share=share,
                time_points=points,
                solver=solver,
                columns=len(milp.lower),
                overhead=None if objective is None else objective / scale,
                bound=None if bound is None else bound / scale,
                cpu_seconds=cpu_seconds() - before,
            )
    return report


def objective_of(milp: Milp, values: dict[str, float]) -> float:
    return sum(cost * values.get(f"x{j}", 0.0) for j, cost in enumerate(milp.cost))


def as_pulp(milp: Milp) -> dict:
    """The model as PuLP's `LpProblem.toDict()`."""
    rows: list[list[dict]] = [[] for _ in milp.row_lower]
    for row, column, value in zip(milp.entry_row, milp.entry_column, milp.entry_value, strict=True):
        rows[row].append({"name": f"x{column}", "value": value})
    constraints = []
    for terms, lower, upper in zip(rows, milp.row_lower, milp.row_upper, strict=True):
        for sense, limit in ((1, lower), (-1, upper)):
            if abs(limit) != float("inf"):
                fields = {"sense": sense, "coefficients": terms, "pi": None, "constant": -limit}
                constraints.append({"name": None, **fields})
    variables = [
        {"name": f"x{j}", "cat": "Integer" if integer else "Continuous"}
        | {"lowBound": lower, "upBound": upper, "varValue": None, "dj": None}
        for j, (integer, lower, upper) in enumerate(
            zip(milp.integer, milp.lower, milp.upper, strict=True)
        )
    ]
    costs = [{"name": f"x{j}", "value": cost} for j, cost in enumerate(milp.cost)]
    return {
        "parameters": {"name": "model", "sense": 1, "status": 0, "sol_status": 0},
        "objective": {"name": None, "coefficients": costs},
        "variables": variables,
        "constraints": constraints,
        "sos1": [],
        "sos2": [],
    }


def main() -> None:
    command = parser(__doc__)
    command.add_argument("what", choices=["table", "traces", "solvers", "tight", "files"])
    command.add_argument("paths", nargs="+", help="DIR, graphs, or numbers of layers of a GPT")
    command.add_argument("--budget", nargs="+", default=["50%"])
    command.add_argument("--time-limit", type=float, default=60.0, metavar="S")
    arguments = command.parse_args()
    graphs = (
        (f"GPT, {path} layers", gpt(int(path)))
        if path.isdigit()
        else (Path(path).stem, load_graph(path))
        for path in arguments.paths
    )
    folder, limit = Path(arguments.paths[0]), arguments.time_limit
    reports = {
        "table": lambda: optima(folder, limit),
        "traces": lambda: traces(folder, limit),
        "solvers": lambda: solvers(folder, limit),
        "tight": lambda: tight(graphs, limit),
        "files": lambda: files(graphs, arguments.budget, limit),
    }
    reports[arguments.what]().finish(arguments.csv)


if __name__ == "__main__":
    main()
