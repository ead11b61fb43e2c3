"""Plan quality by graph, budget and method; every plan is verified.

    python -m benchmarks.plan_quality [FOLDER] [--methods coop,coop-offline] [--shares 0.5,0.3] ...
    python -m benchmarks.plan_quality --leave-one-out [--graphs a,b,c]
    python -m benchmarks.plan_quality --graphs hard:recurrent:3,hard:experts:0:2000

A graph `hard:FAMILY:SEED[:OPS]` is made by `benchmarks.hard_graphs`.

Overheads are in percent of the step's compute time. `free` is Coop's own measure of fragmentation:
the mean share of the budget that is free at forced evictions (online methods only). CPU seconds are
of this process, after one plan that loads the compiled kernels. A proved bound follows its overhead
in parentheses, with `any` if it holds for any order of first runs; without a bound of its own an
overhead is followed by its ratio to the best one. `--leave-one-out` compares coop-offline's
portfolio with the one scoring rule that is best on the other graphs.
"""

import argparse
import math
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path

from benchmarks.hard_graphs import parse_name
from benchmarks.report import parser, table, write_csv
from coop_plan.planner import METHODS, InfeasibleBudgetError, plan
from coop_plan.planner.core.errors import DoesNotFitError, TimeLimitError
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.heuristic.coop_offline import solve_coop_offline
from coop_plan.planner.heuristic.params import DEFAULTS, Rule
from coop_plan.planner.registry import Request
from coop_plan.schemas import Graph, load_graph

DATA = Path(__file__).parents[2] / "shared" / "data" / "graphs"

TRACED_PEAKS = {
    "resnet32": 10_061_314_048,
    "unet": 8_415_815_168,
    "densenet121": 11_021_068_288,
    "transformer": 9_864_438_784,
    "unroll_gan": 260_367_872,
    "lstm": 5_595_133_440,
}
"""Traced peaks in bytes, of which budgets are shares; of other graphs: keep-everything's peak."""


@dataclass(frozen=True)
class Row:
    graph: str
    ops: int
    method: str
    share: str
    budget_bytes: int
    overhead: float | None
    overhead_bound: float | None
    bound_model: str | None
    recomputed_ops: int | None
    fragmentation: float | None
    free_at_evictions: float | None
    evictions: int | None
    min_feasible_share: float | None
    cpu_seconds: float
    cpu_us_per_op: float


def measure(
    graph: Graph, peak: int, share: str, method: str, off: tuple[str, ...], args: argparse.Namespace
) -> Row:
    """One row of the CSV file; an infeasible budget has no overhead."""
    budget = "min" if share == "min" else int(float(share) * peak)
    began = time.process_time()
    minimum = overhead = bound = model = recomputed = fragmentation = free = evictions = None
    budget_bytes = budget if isinstance(budget, int) else 0
    try:
        made = plan(
            graph,
            budget,
            method=method,
            outputs=args.outputs,
            alignment=args.alignment,
            switches=dict.fromkeys(off, False),
            time_limit=args.time_limit,
            smallest=True,
            host_budget=0,  # bounds are for recomputation alone
        )
        overhead, recomputed = made.overhead, made.recomputed_ops
        evictions = made.evictions
        if made.lower_bound_us is not None:
            bound, model = made.lower_bound_us / made.base_cost_us - 1, made.lower_bound_model
        fragmentation, free = made.fragmentation, made.eviction_free_ratio
        budget_bytes = made.budget_bytes
        if share == "min":
            minimum = made.budget_bytes / peak
    except InfeasibleBudgetError as error:
        minimum = error.min_feasible_bytes / peak
    except TimeLimitError:
        pass  # no plan in that time
    spent = time.process_time() - began
    return Row(
        graph.name,
        len(graph.ops),
        " no ".join((method, *off)),
        share,
        budget_bytes,
        overhead,
        bound,
        model,
        recomputed,
        fragmentation,
        free,
        evictions,
        minimum,
        spent,
        spent / len(graph.ops) * 1e6,
    )


def variants(args: argparse.Namespace) -> list[tuple[str, tuple[str, ...]]]:
    """The methods to run; under --ablate also with each of their switches off."""
    chosen = args.methods.split(",")
    rows: list[tuple[str, tuple[str, ...]]] = []
    for method in chosen:
        rows.append((method, ()))
        if args.ablate:
            switches = tuple(METHODS[method].switches)
            rows += [(method, (switch,)) for switch in switches]
            rows += [(method, switches)] if len(switches) > 1 else []
    return rows


def show(rows: list[Row]) -> None:
    """Print a graph's table: methods down, shares across."""
    shares = list(dict.fromkeys(row.share for row in rows))
    bounds: dict[str, float] = {}
    for row in rows:
        if row.share != "min" and row.overhead_bound is not None:
            bounds[row.share] = max(bounds.get(row.share, 0.0), row.overhead_bound)
    lines = []
    for method in dict.fromkeys(row.method for row in rows):
        line = [row for row in rows if row.method == method]
        cells = [_cell(row, bounds) for share in shares for row in line if row.share == share]
        fragments = [r.fragmentation for r in line if r.fragmentation is not None]
        free = [r.free_at_evictions for r in line if r.free_at_evictions is not None]
        evicted = [r.evictions for r in line if r.evictions is not None]
        seconds = [row.cpu_seconds for row in line if row.share != "min"] or [0.0]
        cells += [
            f"{100 * max(fragments):.2f}" if fragments else "",
            f"{100 * sum(free) / len(free):.1f}" if free else "",
            f"{sum(evicted) / len(evicted):.0f}" if evicted else "",
            f"{sum(seconds) / len(seconds):.2f}",
            f"{sum(seconds) / len(seconds) / rows[0].ops * 1e6:.0f}",
        ]
        lines.append([method, *cells])
    heads = ["overhead %", *shares, "fragm. %", "free %", "evicted", "CPU s", "µs/op"]
    print(f"{rows[0].graph}, {rows[0].ops} ops")
    print(table(heads, lines))


def _cell(row: Row, bounds: dict[str, float]) -> str:
    """Overhead with its own bound, else its ratio to the best bound of the share."""
    if row.overhead is None:
        return "-"
    at = "" if row.min_feasible_share is None else f" @{row.min_feasible_share:.3f}"
    any_order = " any" if row.bound_model == "any" else ""
    bound = "" if row.overhead_bound is None else f" ({100 * row.overhead_bound:.2f}{any_order})"
    if not bound and bounds.get(row.share, 0.0) > 0:
        bound = f" x{row.overhead / bounds[row.share]:.2f}"
    return f"{100 * row.overhead:.2f}{bound}{at}"


def leave_one_out(graphs: dict[str, tuple[Graph, int]], args: argparse.Namespace) -> None:
    """Print each graph with the one rule that is best on the others, and with the portfolio."""
    shares = [float(share) for share in args.shares.split(",") if share != "min"]

    def overheads(name: str, rules: tuple[Rule, ...]) -> list[float]:
        graph, peak = graphs[name]
        problem = Problem.from_graph(graph, args.alignment, args.outputs, host_budget=0)
        params = replace(DEFAULTS, rules=rules)
        found = []
        for share in shares:
            request = Request(int(share * peak) - problem.fixed_bytes)
            try:
                cost = solve_coop_offline(problem, request, params).placed.cost_us
            except DoesNotFitError:
                cost = math.inf
            found.append(cost / problem.base_cost_us - 1)
        return found

    rules = DEFAULTS.rules
    single = {name: {rule: overheads(name, (rule,)) for rule in rules} for name in graphs}
    lines = []
    for name in graphs:
        others = [other for other in graphs if other != name]
        rule = min(
            rules,
            key=lambda rule: sum(min(x, 10.0) for other in others for x in single[other][rule]),
        )
        for label, found in ((str(rule), single[name][rule]), ("all", overheads(name, rules))):
            lines.append([name, label, *(f"{100 * x:.2f}" for x in found)])
    print("leave one out: overhead %")
    print(table(["graph", "rule (alpha, cap, foresee)", *map(str, shares)], lines))


def main() -> None:
    command = parser(__doc__, "build/plan_quality.csv")
    command.add_argument("folder", nargs="?", type=Path, default=DATA, help="of graphs (*.json)")
    command.add_argument("--graphs", help="names, by commas, of files or hard:FAMILY:SEED[:OPS]")
    command.add_argument("--methods", default="coop-offline,coop,dtr,dte")
    command.add_argument("--shares", default="0.8,0.6,0.5,0.4,0.3,min", help="of the peak")
    command.add_argument("--outputs", choices=["outside", "arena"], default="arena")
    command.add_argument("--alignment", type=int, default=512)
    command.add_argument("--ablate", action="store_true", help="also with each switch off")
    command.add_argument("--time-limit", type=float, help="seconds a plan")
    command.add_argument("--leave-one-out", action="store_true")
    args = command.parse_args()
    unknown = set(args.methods.split(",")) - set(METHODS)
    if unknown:
        command.error(f"no such method: {', '.join(sorted(unknown))}")
    wanted = args.graphs.split(",") if args.graphs else None
    paths = [p for p in sorted(args.folder.glob("*.json")) if not wanted or p.stem in wanted]
    steps = {p.stem: load_graph(str(p)) for p in paths}
    try:
        steps |= {name: parse_name(name) for name in wanted or () if name.startswith("hard:")}
    except ValueError as error:
        command.error(str(error))
    if not steps:
        command.error(f"no graphs in {args.folder}")
    graphs = {}
    for name, step in steps.items():
        graph = step.model_copy(update={"name": name})
        keep = plan(graph, "100%", outputs=args.outputs, alignment=args.alignment)
        graphs[name] = graph, TRACED_PEAKS.get(name, keep.peak_bytes)
    if args.leave_one_out:
        leave_one_out(graphs, args)
        return
    rows = []
    for name, (graph, peak) in graphs.items():
        for method, off in variants(args):
            if not rows:
                plan(graph, "min", method=method, outputs=args.outputs, alignment=args.alignment)
            rows += [
                measure(graph, peak, share, method, off, args) for share in args.shares.split(",")
            ]
        show([row for row in rows if row.graph == name])
    print(f"shares of the peak, outputs {args.outputs}; {len(rows)} rows")
    write_csv(args.csv, [field.name for field in fields(Row)], map(vars, rows))


if __name__ == "__main__":
    main()
