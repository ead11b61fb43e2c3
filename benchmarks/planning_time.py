"""Planning time and memory by number of ops: CPU seconds, µs an op, and the process's peak.

    python -m benchmarks.planning_time [GRAPH ...] [--methods coop-offline,coop,dtr,python-dtr]
    python -m benchmarks.planning_time [GRAPH ...] --min

GRAPH is `gpt:LAYERS` (36 ops a layer), a name of `benchmarks.hard_graphs` or a file; without any,
GPT to 300 000 ops and four hard families to 100 000. The budget is half of keep-everything's arena.
Each row has a process of its own, whose first plan loads the kernels. `growth` is µs an op over
those of the same family and method at about 10 000 ops. `python-dtr` is a simulation in plain
Python. With `--min` a row has the smallest budget, its proved bound, and the CPU time of its search
in plans within half of the arena.
"""

import resource
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.hard_graphs import parse_name
from benchmarks.python_dtr import PythonDtr
from benchmarks.report import Column, Report, parser, scaled
from benchmarks.synthetic import gpt
from coop_plan.planner import METHODS, plan
from coop_plan.planner.core.problem import Problem
from coop_plan.schemas import Graph, parse_graph

PYTHON = "python-dtr"

SEEDS = {"unrolled": 1, "experts": 2, "layered": 1, "recurrent": 1}
"""A seed per family; experts of seed 1 cannot meet half of the arena."""

GRAPHS = (
    *(f"gpt:{layers}" for layers in (28, 285, 834, 2778, 8334)),
    *(
        f"hard:{family}:{seed}:{ops}"
        for family, seed in SEEDS.items()
        for ops in (1_000, 10_000, 30_000, 100_000)
    ),
)

REFERENCE_OPS = range(8_000, 12_000)
"""Ops of the graphs that `growth` refers to."""

COLUMNS = (
    "graph",
    "ops",
    "method",
    Column("overhead", "overhead %", scaled(100, ".2f")),
    Column("cpu_seconds", "CPU s", ".2f"),
    Column("cpu_us_per_op", "µs/op", ".0f"),
    Column("growth", form=".2f"),
    Column("mebibytes", "MiB"),
)


MIN_COLUMNS = (
    "graph",
    "ops",
    Column("budget_bytes", "min, bytes"),
    Column("bound_bytes", "at least"),
    Column("overhead", "overhead %", scaled(100, ".2f")),
    Column("cpu_seconds", "CPU s", ".2f"),
    Column("plan_cpu_seconds", "of a plan", ".2f"),
    Column("plans", form=".1f"),
)


def graph_of(name: str) -> Graph:
    """The graph of a name or a file; raises ValueError if there is none."""
    if name.endswith(".json"):
        return parse_graph(Path(name).read_bytes())
    kind, _, layers = name.partition(":")
    return gpt(int(layers)) if kind == "gpt" else parse_name(name)


def measure(case: tuple[str, str]) -> dict[str, Any]:
    """Row of one graph and method, in a process of its own."""
    name, method = case
    if method != PYTHON:
        plan(gpt(2), "60%", method=method)  # loads the kernels
    graph = graph_of(name)
    problem = Problem.from_graph(graph)
    budget = plan(graph, "100%", method="keep-all").arena_bytes // 2
    began = time.process_time()
    if method == PYTHON:
        overhead = PythonDtr(problem, budget).run() / problem.base_cost_us - 1
    else:
        overhead = plan(graph, problem.fixed_bytes + budget, method=method).overhead
    spent = time.process_time() - began
    figures = {"cpu_seconds": spent, "cpu_us_per_op": spent / len(graph.ops) * 1e6}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
    about = {"graph": name, "ops": len(graph.ops), "method": method, "overhead": overhead}
    return about | figures | {"mebibytes": peak // 1024}


def measure_min(name: str) -> dict[str, Any]:
    """Row of the search for a graph's smallest budget, in a process of its own."""
    graph, small = graph_of(name), gpt(4)
    for budget in ("60%", "min"):  # loads the kernels
        plan(small, budget, link="25GB/s" if graph.device.linked else None)
    problem = Problem.from_graph(graph)
    half = plan(graph, "100%", method="keep-all").arena_bytes // 2
    began = time.process_time()
    plan(graph, problem.fixed_bytes + half)
    spent = time.process_time() - began
    began = time.process_time()
    made = plan(graph, "min")
    searched = time.process_time() - began
    return {
        "graph": Path(name).stem,
        "ops": len(graph.ops),
        "budget_bytes": made.budget_bytes,
        "bound_bytes": made.budget_lower_bound_bytes,
        "overhead": made.overhead,
        "cpu_seconds": searched,
        "plan_cpu_seconds": spent,
        "plans": searched / spent,
    }


def add_growth(rows: list[dict[str, Any]]) -> None:
    """Set `growth` of each row, if its family and method have a row of about 10 000 ops."""

    def series(row: dict[str, Any]) -> tuple[str, str]:
        name = str(row["graph"])
        family = name.split(":")[0] if name.startswith("gpt") else name.rpartition(":")[0]
        return family, row["method"]

    known = {series(row): row["cpu_us_per_op"] for row in rows if row["ops"] in REFERENCE_OPS}
    for row in rows:
        if series(row) in known:
            row["growth"] = row["cpu_us_per_op"] / known[series(row)]


def main() -> None:
    command = parser(__doc__, "build/planning_time.csv")
    command.add_argument("graphs", nargs="*", metavar="GRAPH", default=GRAPHS)
    command.add_argument("--methods", default="coop-offline")
    command.add_argument("--min", action="store_true", help="search the smallest budget")
    args = command.parse_args()
    methods = args.methods.split(",")
    unknown = set(methods).difference(METHODS, {PYTHON})
    if unknown:
        command.error(f"no such method: {', '.join(sorted(unknown))}")
    report = Report(*(MIN_COLUMNS if args.min else COLUMNS), progress=True)
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        if args.min:
            for row in pool.imap(measure_min, args.graphs):
                report.add(**row)
            report.finish(args.csv)
            return
        for row in pool.imap(
            measure, [(name, method) for name in args.graphs for method in methods]
        ):
            report.add(**row)
    add_growth(report.rows)
    report.finish(args.csv)


if __name__ == "__main__":
    main()
