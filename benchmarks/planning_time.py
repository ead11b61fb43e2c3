"""Planning time against the number of ops: CPU seconds, and as a ratio to a simulation in Python.

    python -m benchmarks.planning_time [--layers 28,84,285,850] [--methods coop-offline,coop,dtr]
    python -m benchmarks.planning_time --layers 285,1389,2778 --methods coop-offline --alone

Deep GPT steps at a budget of 50 %; kernels are loaded by a first small plan. Memory is the largest
resident set of the process so far, above what it was before the first graph.
"""

import argparse
import csv
import resource
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.python_dtr import PythonDtr
from benchmarks.synthetic import gpt
from coop_plan.planner import METHODS, plan
from coop_plan.planner.core.problem import Problem

FIELDS = ("ops", "method", "overhead", "cpu_seconds", "cpu_us_per_op", "ratio", "mebibytes")


def rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux


def main() -> None:
    parser = argparse.ArgumentParser(prog="planning_time", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="28,84,285,850")
    parser.add_argument("--methods", default="coop-offline,coop,dtr")
    parser.add_argument("--alone", action="store_true", help="leave the simulation in Python out")
    parser.add_argument("--csv", type=Path, default=Path("build/planning_time.csv"))
    args = parser.parse_args()
    methods = args.methods.split(",")
    unknown = set(methods) - set(METHODS)
    if unknown:
        parser.error(f"no such method: {', '.join(sorted(unknown))}")
    for method in methods:
        plan(gpt(2), "min", method=method)
    before = rss()
    rows = []
    for layers in map(int, args.layers.split(",")):
        graph = gpt(layers)
        ops = len(graph.ops)
        problem = Problem.from_graph(graph)
        budget = plan(graph, "100%").arena_bytes // 2
        unit = float("nan")
        if not args.alone:
            began = time.process_time()
            baseline = PythonDtr(problem, budget).run() / problem.base_cost_us - 1
            unit = time.process_time() - began
            rows.append((ops, "dtr in Python", baseline, unit, unit / ops * 1e6, 1.0, None))
        for method in methods:
            began = time.process_time()
            made = plan(graph, problem.fixed_bytes + budget, method=method)
            spent = time.process_time() - began
            memory = (rss() - before) // 1024
            rows.append(
                (ops, method, made.overhead, spent, spent / ops * 1e6, spent / unit, memory)
            )
    table = Table(box=None)
    for name in ("ops", "method", "overhead %", "CPU s", "µs/op", "x Python", "MiB"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for ops, method, overhead, spent, per_op, ratio, memory in rows:
        table.add_row(
            str(ops),
            method,
            f"{100 * overhead:.2f}",
            f"{spent:.2f}",
            f"{per_op:.0f}",
            f"{ratio:.3f}",
            "" if memory is None else str(memory),
        )
    Console(width=100, highlight=False).print(table)
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    with args.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(FIELDS)
        writer.writerows(rows)


if __name__ == "__main__":
    main()
