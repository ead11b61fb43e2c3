"""`coop-plan compare`: plans of several methods within several budgets."""

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coop_plan.api.cli.exit_codes import (
    EXIT_ERROR,
    EXIT_INFEASIBLE,
    EXIT_TIME,
    OutputError,
    printable,
)
from coop_plan.api.cli.input import read_graph
from coop_plan.api.cli.output import check_writable, write_whole
from coop_plan.api.cli.plan_options import plan_options
from coop_plan.api.cli.progress import show_progress
from coop_plan.planner.options import PlanOptions
from coop_plan.schemas import Graph, InvalidInputError, fingerprint, format_bytes

if TYPE_CHECKING:
    from coop_plan.api.cli.compare_cells import Cell

FIGURES = (
    "budget_bytes",
    "peak_bytes",
    "arena_bytes",
    "base_cost_us",
    "overhead",
    "fragmentation",
    "recomputed_ops",
    "swapped_bytes",
    "lower_bound_us",
    "solve_seconds",
)
PLOT_COLUMNS, PLOT_ROWS = 64, 14
MARKS = "ox+*#@%&"

MAPS_BYTES = 5 << 19
"""Limit on the maps of a report; those of the largest plans are left out."""


@click.command(short_help="Compare methods on several budgets.")
@click.argument("graph")
@click.option(
    "--budgets",
    default="80%,60%,40%,min",
    show_default=True,
    metavar="SIZE,...",
    help="Budgets, each as of `coop-plan plan`.",
)
@click.option(
    "--methods",
    default="coop-offline,coop,dtr",
    show_default=True,
    metavar="METHOD,...",
    help="Methods, as listed by `coop-plan methods`.",
)
@plan_options("time_limit")
@click.option(
    "-o",
    "--output",
    multiple=True,
    metavar="REPORT",
    help="Write a report: a .html, .json or .csv file; may be repeated.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Continue an interrupted comparison: plans that the first .html or .json report has are"
    " not made again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(
    graph: str,
    budgets: str,
    methods: str,
    time_limit: float | None,
    output: tuple[str, ...],
    resume: bool,
    as_json: bool,
) -> None:
    """Plan GRAPH with each method within each budget, in parallel processes.

    The .html report is one file that needs no network: overhead over peak, lower bounds, and the
    memory map of each plan. After Ctrl-C the finished plans are printed and written. Without any
    plan the exit code is 3 if no budget can be met, 4 if the time limit ended a method, and else 1.
    """
    from coop_plan.api.cli.compare_cells import compare as cells_of
    from coop_plan.planner import Progress

    for target in output:
        if Path(target).suffix not in (".html", ".json", ".csv"):
            raise OutputError(f"{target}: a report is a .html, .json or .csv file")
        check_writable(target)
    questions = [
        PlanOptions.of({"budget": budget, "method": method, "time_limit": time_limit})
        for budget in _listed(budgets)
        for method in _listed(methods)
    ]
    document = read_graph(graph)
    structure = fingerprint(document)
    order = {(str(o.budget_), o.method): place for place, o in enumerate(questions)}
    done: list[Cell] = _known(output, structure, time_limit, order) if resume else []
    known = {(cell.asked, cell.method) for cell in done}
    left = [each for each in questions if (str(each.budget_), each.method) not in known]
    interrupted = False
    cells = cells_of(document, left, os.cpu_count() or 1)
    try:
        with show_progress(message=f"{len(left)} plans") as progress:
            for cell in cells:
                done.append(cell)
                message = f"{len(done)} of {len(questions)} plans"
                progress(Progress(message, len(done) / len(questions)))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        cells.close()
    done.sort(key=lambda cell: order[cell.asked, cell.method])
    rows = [_row(cell, structure, time_limit) for cell in done]
    for target in output:
        write_whole(target, _report(target, document, done, rows))
    if as_json:
        click.echo(json.dumps(rows))
    else:
        _print(done)
    if interrupted:
        raise KeyboardInterrupt
    if not any(cell.figures for cell in done):
        states = {cell.state for cell in done}
        late = EXIT_TIME if states <= {"infeasible", "out of time"} else EXIT_ERROR
        raise SystemExit(EXIT_INFEASIBLE if states == {"infeasible"} else late)


def _listed(text: str) -> list[str]:
    found = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise click.UsageError("give at least one budget and one method")
    return found


def _known(
    output: Sequence[str],
    structure: str,
    time_limit: float | None,
    wanted: Mapping[tuple[str, str], int],
) -> list["Cell"]:
    """The answers of an interrupted comparison that its first .html or .json report has.

    Cells that failed, or that had another time limit, are left out.
    """
    reports = [target for target in output if Path(target).suffix in (".html", ".json")]
    if not reports:
        raise click.UsageError("--resume needs the .html or .json report as -o")
    report = next((target for target in reports if Path(target).exists()), None)
    if report is None:
        return []
    text = Path(report).read_text(errors="replace")
    try:
        if report.endswith(".html"):
            text = text.split('id="data">', 1)[1].split("</script>", 1)[0]
        rows = json.loads(text)
        rows = rows["cells"] if isinstance(rows, dict) else rows
        others = [row for row in rows if row["graph"] != structure]
        cells = [_cell(row) for row in rows if row["time_limit"] == time_limit]
    except (ValueError, TypeError, KeyError, IndexError):
        message = "this is no report of coop-plan compare: leave --resume out to replace it"
        raise InvalidInputError(message, source=report) from None
    if others:
        message = "the report is of another graph: leave --resume out, or name another report"
        raise InvalidInputError(message, source=report)
    answers = ("planned", "infeasible")
    return [c for c in cells if (c.asked, c.method) in wanted and c.state in answers]


def _cell(row: Mapping[str, Any]) -> "Cell":
    """The cell of a report's row; the figures of a .json report are in the row itself."""
    from coop_plan.api.cli.compare_cells import Cell

    figures = row.get("figures", row) if row["state"] == "planned" else None
    asked, method, state = row["asked"], row["method"], row["state"]
    return Cell(asked, method, state, figures, row["least_bytes"], row.get("map", ""), row["why"])


def _row(cell: "Cell", structure: str, time_limit: float | None) -> dict[str, Any]:
    figures = cell.figures or {}
    return {
        "asked": cell.asked,
        "method": cell.method,
        "state": cell.state,
        "status": figures.get("status"),
        **{name: figures.get(name) for name in FIGURES},
        "bound": cell.bound,
        "least_bytes": cell.least_bytes,
        "why": cell.why,
        "graph": structure,
        "time_limit": time_limit,
    }


def _report(
    target: str, graph: Graph, cells: "Sequence[Cell]", rows: Sequence[Mapping[str, Any]]
) -> str:
    if target.endswith(".json"):
        return json.dumps(rows, indent=1) + "\n"
    if target.endswith(".csv"):
        text = io.StringIO(newline="")
        names = list(rows[0]) if rows else ["asked", "method", "state"]
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()
    from coop_plan.planner.inspect.drawing import graph_columns
    from coop_plan.web import page

    room = MAPS_BYTES
    maps = [""] * len(cells)
    for place in sorted(range(len(cells)), key=lambda place: len(cells[place].map)):
        room -= len(cells[place].map)
        if room >= 0:
            maps[place] = cells[place].map
    data = {
        "name": graph.name,
        "cells": [
            {**row, "figures": cell.figures, "map": drawn}
            for row, cell, drawn in zip(rows, cells, maps, strict=True)
        ],
        "once": graph_columns(graph),
    }
    return page("report.js", f"Plans for {graph.name or 'a training step'}", data)


def _print(cells: "Sequence[Cell]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("budget", "method"):
        table.add_column(name)
    for name in ("peak", "overhead", "at least", "fragmentation", "smallest", "time"):
        table.add_column(name, justify="right")
    points: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        least = "" if cell.least_bytes is None else format_bytes(cell.least_bytes)
        if cell.figures is None:
            table.add_row(cell.asked, cell.method, cell.state, "", "", "", least, "")
            continue
        figures = cell.figures
        points.setdefault(cell.method, []).append((figures["peak_bytes"], figures["overhead"]))
        table.add_row(
            cell.asked,
            cell.method,
            format_bytes(figures["peak_bytes"]),
            f"{figures['overhead']:.2%}",
            "" if cell.bound is None else f"{cell.bound:z.2%}",
            f"{figures['fragmentation']:.2%}",
            least,
            f"{figures['solve_seconds']:.2f} s",
        )
    Console(width=100, highlight=False).print(table)
    for cell in cells:
        if cell.why:
            click.echo(f"{cell.method} within {cell.asked}: {printable(cell.why)}", err=True)
    if points:
        click.echo()
        click.echo(_scatter(points))


def _scatter(points: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Overhead over peak as text: a mark for each method; the first method hides others."""
    every = [point for row in points.values() for point in row]
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    low, high = min(0.0, *(y for _, y in every)), max(y for _, y in every)
    field = [[" "] * PLOT_COLUMNS for _ in range(PLOT_ROWS)]
    marks = {name: MARKS[place % len(MARKS)] for place, name in enumerate(points)}
    for name, row in reversed(list(points.items())):
        for x, y in row:
            across = round((x - left) / ((right - left) or 1) * (PLOT_COLUMNS - 1))
            up = round((y - low) / ((high - low) or 1) * (PLOT_ROWS - 1))
            field[PLOT_ROWS - 1 - up][across] = marks[name]
    lines = []
    for place, line in enumerate(field):
        label = {0: f"{high:.1%}", PLOT_ROWS - 1: f"{low:.1%}"}.get(place, "")
        lines.append(f"{label:>8} |{''.join(line)}".rstrip())
    lines.append(" " * 9 + "+" + "-" * PLOT_COLUMNS)
    first, last = format_bytes(int(left)), format_bytes(int(right))
    lines.append(" " * 10 + first + last.rjust(PLOT_COLUMNS - len(first)))
    lines.append(
        " " * 10 + "overhead over peak: " + "  ".join(f"{m} {n}" for n, m in marks.items())
    )
    return "\n".join(lines)
