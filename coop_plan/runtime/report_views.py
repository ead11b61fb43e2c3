"""Views of a report: table, notebook page and TensorBoard scalars."""

import html
from typing import Protocol

from coop_plan.planner.inspect.drawing import drawing
from coop_plan.runtime.reports import StepReport
from coop_plan.schemas import format_bytes
from coop_plan.web import page


class ScalarWriter(Protocol):
    """Interface of `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Write one number."""


def rows(report: StepReport) -> list[tuple[str, str, str]]:
    """Rows of name, planned and measured figure; empty text stands for no figure."""
    overhead = report.measured_overhead
    makespan = report.measured_makespan_us
    return [
        ("budget", format_bytes(report.budget_bytes), ""),
        ("peak", format_bytes(report.peak_bytes), format_bytes(report.measured_peak_bytes)),
        (
            "arena",
            format_bytes(report.planned_arena_bytes),
            format_bytes(report.measured_arena_bytes),
        ),
        ("resident", format_bytes(report.resident_bytes), ""),
        ("outside the plan", "", format_bytes(report.outside_bytes)),
        (
            "overhead",
            f"{report.planned_overhead:.2%}",
            "" if overhead is None else f"{overhead:.2%}",
        ),
        (
            "step",
            f"{report.plan.cost_us / 1e3:.2f} ms",
            "" if makespan is None else f"{makespan / 1e3:.2f} ms",
        ),
    ]


def print_report(report: StepReport) -> None:
    """Print the table of a report."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=_title(report), box=None, pad_edge=False, title_justify="left")
    for name in ("", "planned", "measured"):
        table.add_column(name, justify="left" if not name else "right")
    for row in rows(report):
        table.add_row(*row)
    Console(highlight=False).print(table)


def html_of(report: StepReport) -> str:
    """Table and memory map of a report, for a notebook."""
    cells = "".join(
        "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>"
        for row in rows(report)
    )
    drawn = drawing(report.graph, report.plan, report.name)
    frame = html.escape(page("show.js", f"Memory of {report.name}", {"drawings": [drawn]}))
    return (
        f"<p>{html.escape(_title(report))}</p>"
        f"<table><tr><th></th><th>planned</th><th>measured</th></tr>{cells}</table>"
        f'<iframe title="memory map" sandbox="allow-scripts" srcdoc="{frame}"'
        ' style="width:100%;height:46rem;border:0"></iframe>'
    )


def write_scalars(report: StepReport, writer: ScalarWriter, step: int) -> None:
    """Write the last step's figures, in bytes, shares and µs, as `coop/{name}/...`."""
    scalars = {
        "budget_bytes": report.budget_bytes,
        "planned_peak_bytes": report.peak_bytes,
        "measured_peak_bytes": report.measured_peak_bytes,
        "outside_bytes": report.outside_bytes,
        "measured_overhead": report.measured_overhead,
        "measured_makespan_us": report.measured_makespan_us,
    }
    for name, value in scalars.items():
        if value is not None:
            writer.add_scalar(f"coop/{report.name}/{name}", float(value), step)


def _title(report: StepReport) -> str:
    return f"{report.name}: {report.method} ({report.status}), {report.steps_run} steps run"
