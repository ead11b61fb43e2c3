"""Planning time by number of ops: CPU seconds, and the ratio to a simulation in plain Python.

    python -m benchmarks.planning_time [--layers 28,84,285,850] [--methods coop-offline,coop,dtr]
    python -m benchmarks.planning_time --layers 285,1389,2778 --methods coop-offline --alone

Deep GPT steps at a budget of 50 %; a small plan loads the kernels first. Memory is the growth of
the process's largest resident set since before the first graph.
"""

import resource
import time

from benchmarks.python_dtr import PythonDtr
from benchmarks.report import Column, Report, parser, scaled
from benchmarks.synthetic import gpt
from coop_plan.planner import METHODS, plan
from coop_plan.planner.core.problem import Problem

COLUMNS = (
    "ops",
    "method",
    Column("overhead", "overhead %", scaled(100, ".2f")),
    Column("cpu_seconds", "CPU s", ".2f"),
    Column("cpu_us_per_op", "µs/op", ".0f"),
    Column("ratio", "x Python", ".3f"),
    Column("mebibytes", "MiB"),
)


def rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux


def main() -> None:
    command = parser(__doc__, "build/planning_time.csv")
    command.add_argument("--layers", default="28,84,285,850")
    command.add_argument("--methods", default="coop-offline,coop,dtr")
    command.add_argument("--alone", action="store_true", help="without the simulation in Python")
    args = command.parse_args()
    methods = args.methods.split(",")
    unknown = set(methods) - set(METHODS)
    if unknown:
        command.error(f"no such method: {', '.join(sorted(unknown))}")
    for method in methods:
        plan(gpt(2), "min", method=method)
    before = rss()
    report = Report(*COLUMNS)
    for layers in map(int, args.layers.split(",")):
        graph = gpt(layers)
        problem = Problem.from_graph(graph)
        budget = plan(graph, "100%").arena_bytes // 2
        runs: list[tuple[str, float, float, int | None]] = []
        if not args.alone:
            began = time.process_time()
            baseline = PythonDtr(problem, budget).run() / problem.base_cost_us - 1
            runs.append(("dtr in Python", baseline, time.process_time() - began, None))
        for method in methods:
            began = time.process_time()
            made = plan(graph, problem.fixed_bytes + budget, method=method)
            spent = time.process_time() - began
            runs.append((method, made.overhead, spent, (rss() - before) // 1024))
        for method, overhead, spent, memory in runs:
            ratio = None if args.alone else spent / runs[0][2]
            figures = {"cpu_seconds": spent, "cpu_us_per_op": spent / len(graph.ops) * 1e6}
            figures |= {"overhead": overhead, "ratio": ratio, "mebibytes": memory}
            report.add(ops=len(graph.ops), method=method, **figures)
    report.finish(args.csv)


if __name__ == "__main__":
    main()
