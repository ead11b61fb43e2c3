"""Plan quality: graphs × budgets × methods, each plan verified, as a table and as CSV.

    python -m benchmarks.plan_quality [FOLDER] [--methods coop,coop-offline] [--shares 0.5,0.3] ...

Overheads are in percent of the step's compute time; `free` is Coop's own measure of fragmentation
(mean share of the budget that is free at forced evictions, online methods only); CPU seconds are of
this process, after one plan that loads the compiled kernels.
"""

import argparse
import csv
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from planner import METHODS, InfeasibleBudgetError, plan
from schemas import Graph, load_graph

DATA = Path(__file__).parents[2] / "shared" / "data" / "graphs"

TRACED_PEAKS = {
    "resnet32": 10_061_314_048,
    "unet": 8_415_815_168,
    "densenet121": 11_021_068_288,
    "transformer": 9_864_438_784,
}
"""Bytes; what shares of the real traces refer to. Other graphs: the peak of keep-everything."""


@dataclass(frozen=True)
class Row:
    graph: str
    ops: int
    method: str
    share: str
    budget_bytes: int
    overhead: float | None
    recomputed_ops: int | None
    fragmentation: float | None
    free_at_evictions: float | None
    min_feasible_share: float | None
    cpu_seconds: float
    cpu_us_per_op: float


def measure(
    graph: Graph, peak: int, share: str, method: str, off: tuple[str, ...], args: argparse.Namespace
) -> Row:
    """One point of the table; an infeasible budget has no overhead."""
    budget = "min" if share == "min" else int(float(share) * peak)
    began = time.process_time()
    minimum = overhead = recomputed = fragmentation = free = None
    budget_bytes = budget if isinstance(budget, int) else 0
    try:
        made = plan(
            graph,
            budget,
            method=method,
            outputs=args.outputs,
            alignment=args.alignment,
            switches=dict.fromkeys(off, False),
        )
        overhead, recomputed = made.overhead, made.recomputed_ops
        fragmentation, free = made.fragmentation, made.eviction_free_ratio
        budget_bytes = made.budget_bytes
        if share == "min":
            minimum = made.budget_bytes / peak
    except InfeasibleBudgetError as error:
        minimum = error.min_feasible_bytes / peak
    spent = time.process_time() - began
    return Row(
        graph.name,
        len(graph.ops),
        " no ".join((method, *off)),
        share,
        budget_bytes,
        overhead,
        recomputed,
        fragmentation,
        free,
        minimum,
        spent,
        spent / len(graph.ops) * 1e6,
    )


def variants(args: argparse.Namespace) -> list[tuple[str, tuple[str, ...]]]:
    """The methods to run, with each of their switches off as well under --ablate."""
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
    """A block per graph: methods down, shares across."""
    shares = list(dict.fromkeys(row.share for row in rows))
    for graph in dict.fromkeys(row.graph for row in rows):
        mine = [row for row in rows if row.graph == graph]
        table = Table(title=f"{graph}, {mine[0].ops} ops", title_justify="left", box=None)
        table.add_column("overhead %")
        for share in shares:
            table.add_column(share, justify="right")
        for name in ("fragm. %", "free %", "CPU s", "µs/op"):
            table.add_column(name, justify="right")
        for method in dict.fromkeys(row.method for row in mine):
            line = [row for row in mine if row.method == method]
            cells = [_cell(row) for share in shares for row in line if row.share == share]
            fragments = [r.fragmentation for r in line if r.fragmentation is not None]
            free = [r.free_at_evictions for r in line if r.free_at_evictions is not None]
            seconds = [row.cpu_seconds for row in line if row.share != "min"] or [0.0]
            table.add_row(
                method,
                *cells,
                f"{100 * max(fragments):.2f}" if fragments else "",
                f"{100 * sum(free) / len(free):.1f}" if free else "",
                f"{sum(seconds) / len(seconds):.2f}",
                f"{sum(seconds) / len(seconds) / mine[0].ops * 1e6:.0f}",
            )
        Console(width=120, highlight=False).print(table)


def _cell(row: Row) -> str:
    if row.overhead is None:
        return "-"
    at = "" if row.min_feasible_share is None else f" @{row.min_feasible_share:.3f}"
    return f"{100 * row.overhead:.2f}{at}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="plan_quality", description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=DATA, help="of graphs (*.json)")
    parser.add_argument("--graphs", help="names, by commas; all of the folder otherwise")
    parser.add_argument("--methods", default="coop-offline,coop,dtr,dte")
    parser.add_argument("--shares", default="0.8,0.6,0.5,0.4,0.3,min", help="of the peak")
    parser.add_argument("--outputs", choices=["outside", "arena"], default="arena")
    parser.add_argument("--alignment", type=int, default=512)
    parser.add_argument("--ablate", action="store_true", help="each switch of a method off as well")
    parser.add_argument("--csv", type=Path, default=Path("build/plan_quality.csv"))
    args = parser.parse_args()
    unknown = set(args.methods.split(",")) - set(METHODS)
    if unknown:
        parser.error(f"no such method: {', '.join(sorted(unknown))}")
    wanted = args.graphs.split(",") if args.graphs else None
    paths = [p for p in sorted(args.folder.glob("*.json")) if not wanted or p.stem in wanted]
    if not paths:
        parser.error(f"no graphs in {args.folder}")
    rows = []
    for path in paths:
        graph = load_graph(str(path)).model_copy(update={"name": path.stem})
        keep = plan(graph, "100%", outputs=args.outputs, alignment=args.alignment)
        peak = TRACED_PEAKS.get(path.stem, keep.peak_bytes)
        for method, off in variants(args):
            if not rows:
                plan(graph, "min", method=method, outputs=args.outputs, alignment=args.alignment)
            rows += [
                measure(graph, peak, share, method, off, args) for share in args.shares.split(",")
            ]
        show([row for row in rows if row.graph == path.stem])
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    with args.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    print(f"shares of the peak, outputs {args.outputs}; {len(rows)} rows in {args.csv}")


if __name__ == "__main__":
    main()
