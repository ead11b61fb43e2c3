"""
The exact planners measured: overhead, proved bound, gap and CPU seconds per graph and budget.

    python -m benchmarks.exact table DIR         the known optima, by optimal and checkmate
    python -m benchmarks.exact traces DIR        real traces at 0.8 … 0.3 of their peaks
    python -m benchmarks.exact tight GRAPH...    any graphs, just above the smallest budget
    python -m benchmarks.exact solvers DIR       the same models solved by CBC, HiGHS, SCIP, CP-SAT
    python -m benchmarks.exact files GRAPH...    any graphs, at --budget

Where GRAPH is a number, it is a synthetic GPT of so many layers.

DIR holds the graphs as `coop-plan/graph/1`. One process and one solver thread at a time; CPU
seconds include the solver's process.
"""

import argparse
import resource
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

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

TRACES = {
    "resnet32": 10061314048,
    "unet": 8415815168,
    "densenet121": 11021068288,
    "transformer": 9864438784,
}
"""Real traces and their traced peaks in bytes, of which budgets are shares."""

SHARES = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
TIGHT = (1.0, 1.02, 1.05, 1.1, 1.2)
"""Budgets near the smallest, as multiples of it beside resident bytes."""

CHECKMATE_OPS = 40


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def measure(graph: Graph, budget: str | int, method: str, limit: float | None, **options) -> str:
    """One table row's figures: overhead %, bound %, gap %, status, CPU seconds."""
    before = cpu_seconds()
    try:
        # Bounds are for recomputation alone, so that is what is asked for.
        made = plan(graph, budget, method=method, time_limit=limit, host_budget=0, **options)
    except (InfeasibleBudgetError, TimeLimitError, InvalidInputError) as error:
        return f"- | - | - | {str(error)[:60]} | {cpu_seconds() - before:.1f}"
    used = cpu_seconds() - before
    overhead = f"{made.overhead:.3%}"
    if made.lower_bound_us is None:
        return f"{overhead} | - | - | {made.status} | {used:.1f}"
    bound = made.lower_bound_us / made.base_cost_us - 1
    gap = made.cost_us / made.lower_bound_us - 1
    return f"{overhead} | {bound:.3%} | {gap:.3%} | {made.status} | {used:.1f}"


def header(*columns: str) -> None:
    titles = [*columns, "overhead", "bound", "gap", "status", "CPU s"]
    print("| " + " | ".join(titles) + " |")
    print("|" + " --- |" * len(titles))


def table(folder: Path, limit: float) -> None:
    """The known optima."""
    header("graph", "budget / peak", "known", "method")
    for name, share, known in KNOWN:
        graph = load_graph(str(folder / f"{name}.json"))
        for method in ("coop-offline", "optimal", "checkmate"):
            if method == "checkmate" and len(graph.ops) > CHECKMATE_OPS:
                continue
            seconds = None if method == "coop-offline" else limit
            figures = measure(graph, f"{share:.0%}", method, seconds, alignment=1)
            print(f"| {name} | {share} | {known}% | {method} | {figures} |", flush=True)


def traces(folder: Path, limit: float) -> None:
    """Real traces, outputs in the arena."""
    header("trace", "share of its peak", "method")
    for name, peak in TRACES.items():
        graph = load_graph(str(folder / f"{name}.json"))
        for share in SHARES:
            for method in ("coop-offline", "auto"):
                seconds = None if method == "coop-offline" else limit
                figures = measure(
                    graph, int(share * peak), method, seconds, alignment=1, outputs="arena"
                )
                print(f"| {name} | {share} | {method} | {figures} |", flush=True)


def tight(graphs: Iterable[tuple[str, Graph]], limit: float) -> None:
    """Any graphs at coop-offline's smallest budget and a little above, outputs in the arena."""
    header("graph", "ops", "times the smallest", "method")
    for name, graph in graphs:
        least = plan(graph, "min", alignment=1, outputs="arena")
        for factor in TIGHT:
            budget = least.resident_bytes + int(
                factor * (least.budget_bytes - least.resident_bytes)
            )
            figures = measure(graph, budget, "auto", limit, alignment=1, outputs="arena")
            print(f"| {name} | {len(graph.ops)} | {factor} | auto | {figures} |", flush=True)


def files(graphs: Iterable[tuple[str, Graph]], budgets: list[str], limit: float) -> None:
    """Any graphs by name."""
    header("graph", "ops", "budget", "method")
    for name, graph in graphs:
        for budget in budgets:
            for method in ("coop-offline", "optimal"):
                seconds = None if method == "coop-offline" else limit
                figures = measure(graph, budget, method, seconds)
                print(
                    f"| {name} | {len(graph.ops)} | {budget} | {method} | {figures} |", flush=True
                )


def models(graph: Graph, share: float, limit: float) -> Iterator[tuple[int, Milp, float]]:
    """The models of successive rounds: time points, model, and the base cost in its units."""
    problem = Problem.from_graph(graph, 1)
    everything, _ = lay_out(keep_all_schedule(problem))
    arena = int((problem.fixed_bytes + everything.arena_bytes) * share) - problem.fixed_bytes
    program = Program.of(problem)
    capacity = program.problem.rounded(arena)
    with SolverProcess() as process:
        rounds = Refinement(
            program, process, Incumbent(problem, arena), capacity, time.monotonic() + limit
        )
        while True:
            model = TimePointModel(program, capacity, rounds.points, rounds.cuts)
            yield len(rounds.points), model.milp, COST_SCALE
            readout = rounds.round()
            if readout is None or not readout.overflows or not rounds.refine(readout.overflows):
                return


def solvers(folder: Path, limit: float) -> None:
    """The last round's model of each known optimum, side by side."""
    print("| graph | budget / peak | time points | columns | solver | overhead | bound | CPU s |")
    print("|" + " --- |" * 8)
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
            shown = ["-" if x is None else f"{x / scale:.3%}" for x in (objective, bound)]
            used = cpu_seconds() - before
            row = f"| {name} | {share} | {points} | {len(milp.lower)} | {solver} | {shown[0]}"
            print(f"{row} | {shown[1]} | {used:.1f} |", flush=True)


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
        {
            "name": f"x{j}",
            "cat": "Integer" if milp.integer[j] else "Continuous",
            "lowBound": milp.lower[j],
            "upBound": milp.upper[j],
            "varValue": None,
            "dj": None,
        }
        for j in range(len(milp.lower))
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["table", "traces", "solvers", "tight", "files"])
    parser.add_argument("paths", nargs="+", help="DIR, graphs, or numbers of layers of a GPT")
    parser.add_argument("--budget", nargs="+", default=["50%"])
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S")
    arguments = parser.parse_args()
    if arguments.what in ("files", "tight"):
        graphs = (
            (f"GPT, {path} layers", gpt(int(path)))
            if path.isdigit()
            else (Path(path).stem, load_graph(path))
            for path in arguments.paths
        )
        if arguments.what == "tight":
            tight(graphs, arguments.time_limit)
        else:
            files(graphs, arguments.budget, arguments.time_limit)
        return
    measures = {"table": table, "traces": traces, "solvers": solvers}
    measures[arguments.what](Path(arguments.paths[0]), arguments.time_limit)


if __name__ == "__main__":
    main()
