"""Overhead with a link to the host, compared with recomputation alone, by graph and budget.

    python -m benchmarks.swap_table [FOLDER] [--graphs a,b] [--links 12,25,50] [--method M]
    python -m benchmarks.swap_table --grid --graphs resnet32,unet

Overheads are in percent of the step's compute time; every plan is verified. The overhead of the
prototypes' joint search (`PROTOTYPE`) follows in brackets; `!` marks a plan that costs more. CPU
seconds are of this process, after one plan that loads the compiled kernels. Links are in GB/s each
way.

`--grid` plans at many budgets and links instead, and counts the cells that cost more than one with
a smaller budget or a slower link.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.plan_quality import DATA, TRACED_PEAKS
from benchmarks.report import Report, parser, table
from coop_plan.planner import InfeasibleBudgetError, plan
from coop_plan.schemas import Graph, load_graph

PROTOTYPE: dict[tuple[str, float], tuple[float, dict[float, float]]] = {
    ("unet", 0.6): (6.96, {12: 3.03, 25: 2.93, 50: 0.01}),
    ("unet", 0.5): (9.85, {12: 5.64, 25: 3.63}),
    ("unet", 0.3): (31.5, {12: 16.8, 25: 7.02}),
    ("transformer", 0.5): (5.38, {12: 4.04, 25: 2.30, 50: 0.15}),
    ("transformer", 0.3): (9.03, {12: 6.94, 25: 4.97, 50: 1.88}),
    ("transformer", 0.2): (14.8, {12: 8.94, 25: 6.31, 50: 3.04}),
    ("densenet121", 0.5): (13.0, {12: 8.56, 25: 4.41, 50: 1.22}),
    ("densenet121", 0.3): (19.8, {12: 14.4, 25: 8.96, 50: 2.09}),
    ("resnet32", 0.5): (9.54, {12: 6.27, 25: 3.49, 50: 0.85}),
    ("resnet32", 0.3): (17.7, {12: 14.8, 25: 10.2, 50: 3.32}),
    ("resnet32", 0.2): (21.3, {12: 18.2, 25: 15.3, 50: 5.51}),
    ("roofline_unet", 0.5): (12.87, {12: 12.06, 25: 10.5, 50: 8.31}),
    ("roofline_resnet18", 0.5): (12.09, {12: 11.53, 25: 10.54, 50: 9.64}),
}
"""By graph and share: overhead % of the prototypes, recompute-only and by link (GB/s)."""

GRID_LINKS = (0.0, 3.0, 6.0, 12.0, 18.0, 25.0, 35.0, 50.0, 100.0)
GRID_SHARES = (0.3, 0.4, 0.5, 0.6, 0.8)


@dataclass(frozen=True)
class Point:
    overhead: float | None
    bound: float | None
    swapped_bytes: int
    stall_us: float
    cpu_seconds: float


def measure(graph: Graph, budget: int, link: float, args: argparse.Namespace) -> Point:
    """Plan at this budget with so many GB/s each way."""
    began = time.process_time()
    try:
        made = plan(
            graph,
            budget,
            method=args.method,
            time_limit=args.time_limit,
            outputs="arena",
            alignment=args.alignment,
            link=int(link * 1e9),
        )
    except InfeasibleBudgetError:
        return Point(None, None, 0, 0.0, time.process_time() - began)
    bound = made.lower_bound_us
    return Point(
        100 * made.overhead,
        None if bound is None else 100 * (bound / made.base_cost_us - 1),
        made.swapped_bytes,
        made.prefetch_stall_us + made.offload_stall_us,
        time.process_time() - began,
    )


def cell(point: Point, aim: float | None) -> str:
    """Overhead, the bound in parentheses, the prototype's in brackets."""
    if point.overhead is None:
        return "-"
    bound = "" if point.bound is None else f" ({point.bound:.2f})"
    if aim is None:
        return f"{point.overhead:.2f}{bound}"
    short = "!" if point.overhead > aim + 0.005 else ""
    return f"{point.overhead:.2f}{short}{bound} [{aim:.2f}]"


def grid(name: str, args: argparse.Namespace) -> None:
    """Print overheads by budget and link; `!` marks one that costs more than with less."""
    graph, peak = load(name, args)
    worse = 0
    lines = []
    above = [float("inf")] * len(GRID_LINKS)
    for share in GRID_SHARES:
        row: list[float] = []
        cells: list[str] = []
        for link, less in zip(GRID_LINKS, above, strict=True):
            found = measure(graph, int(share * peak), link, args).overhead
            row.append(float("inf") if found is None else found)
            short = row[-1] > min([less, *row[:-1]]) + 1e-9
            worse += short
            cells.append("-" if found is None else f"{found:.2f}{'!' * short}")
        lines.append([f"{share:g}", *cells])
        above = row
    print(name)
    print(table(["share", *(f"{link:g} GB/s" for link in GRID_LINKS)], lines))
    print(f"{worse} of {len(GRID_SHARES) * len(GRID_LINKS)} cost more than with less")


def load(name: str, args: argparse.Namespace) -> tuple[Graph, int]:
    """Returns a graph, and the peak in bytes that its shares refer to."""
    graph = load_graph(str(args.folder / f"{name}.json"))
    peak = TRACED_PEAKS.get(name)
    if peak is None:
        peak = plan(graph, "100%", outputs="arena", alignment=args.alignment).peak_bytes
    return graph, peak


def main() -> None:
    command = parser(__doc__)
    command.add_argument("folder", nargs="?", type=Path, default=DATA, help="of graphs (*.json)")
    command.add_argument("--graphs", help="names, by commas [default: all of the table]")
    command.add_argument("--shares", help="of the peak, by commas [default: all of the table]")
    command.add_argument("--links", default="12,25,50", help="GB/s each way, by commas")
    command.add_argument("--method", default="coop-offline")
    command.add_argument("--time-limit", type=float, help="seconds a plan")
    command.add_argument("--alignment", type=int, default=512)
    command.add_argument("--grid", action="store_true", help="many budgets and links")
    args = command.parse_args()
    if args.grid:
        for name in (args.graphs or "resnet32,unet,transformer,densenet121").split(","):
            grid(name, args)
        return
    links = [float(link) for link in args.links.split(",")]
    wanted = args.graphs.split(",") if args.graphs else None
    shares = [float(share) for share in args.shares.split(",")] if args.shares else None
    heads = ["graph, share", "recompute only", *(f"{link:g} GB/s" for link in links), "CPU s"]
    report = Report(*heads, title="overhead %", progress=True)
    for (name, share), (alone, aims) in PROTOTYPE.items():
        if (wanted and name not in wanted) or (shares and share not in shares):
            continue
        graph, peak = load(name, args)
        if not report.rows:
            measure(graph, int(share * peak), links[-1], args)  # loads the kernels
        points = [measure(graph, int(share * peak), link, args) for link in (0, *links)]
        expected = [alone, *map(aims.get, links)]
        cells = [f"{name} {share:g}", *map(cell, points, expected)]
        cells.append("/".join(f"{point.cpu_seconds:.1f}" for point in points))
        report.add(**dict(zip(heads, cells, strict=True)))
    report.finish(args.csv)


if __name__ == "__main__":
    main()
