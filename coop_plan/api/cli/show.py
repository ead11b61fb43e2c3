"""`coop-plan show`: the memory map of a plan, as a page or a picture."""

from pathlib import Path

import click

from coop_plan.api.cli.exit_codes import OutputError
from coop_plan.api.cli.input import read_graph, read_valid_plan


@click.command(short_help="Draw the memory map of plans.")
@click.argument("graph")
@click.argument("plans", metavar="PLAN [PLAN]", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    default="map.html",
    show_default=True,
    metavar="MAP",
    help="Write the map here.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["html", "png", "svg"]),
    help="Format of the map.  [default: from the suffix of MAP]",
)
def show(graph: str, plans: tuple[str, ...], output: str, kind: str | None) -> None:
    """Draw the memory map of PLAN: addresses over steps, with a rectangle for each buffer.

    html is an interactive page that needs no network: it names each buffer's tensor, op, module
    and source line, and shows up to two plans side by side. png and svg show one plan.
    """
    from coop_plan.api.cli.memory_map import check_drawable, draw_plan, draw_plans

    if kind is not None and Path(output).suffix != f".{kind}":
        output = str(Path(output).with_suffix(f".{kind}"))
    check_drawable(output)
    if len(plans) > 2:
        raise click.UsageError("show takes one or two plans")
    if len(plans) == 2 and not output.lower().endswith(".html"):
        raise OutputError(f"{output}: a map of two plans must be a .html file")
    document = read_graph(graph)
    made = [read_valid_plan(document, source) for source in plans]
    if output.lower().endswith(".html"):
        draw_plans(output, document, dict(zip(plans, made, strict=True)))
    else:
        draw_plan(output, document, made[0])
    click.echo(f"{output}: {Path(output).stat().st_size:,} bytes", err=True)
