"""`coop-plan show`: the memory map of a plan, in a page or a picture."""

from pathlib import Path

import click

from coop_plan.api.cli.input import read_graph, read_valid_plan


@click.command(short_help="Draw the memory map of plans.")
@click.argument("graph")
@click.argument("plans", metavar="PLAN [PLAN]", nargs=-1, required=True)
@click.option("-o", "--output", default="map.html", show_default=True, metavar="MAP")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["html", "png", "svg"]),
    help="Else as MAP ends.",
)
def show(graph: str, plans: tuple[str, ...], output: str, kind: str | None) -> None:
    """Draw the memory map of PLAN: addresses upwards, steps to the right, a rectangle a buffer.

    The page needs no network; it shows a buffer's tensor, op, module and line, and two plans side
    by side. png and svg are of one plan.
    """
    from coop_plan.api.cli.memory_map import check_drawable, draw_plan, draw_plans
    from coop_plan.api.cli.output import OutputError

    if kind is not None and Path(output).suffix != f".{kind}":
        output = str(Path(output).with_suffix(f".{kind}"))
    check_drawable(output)
    if len(plans) > 2:
        raise click.UsageError("one plan is shown, or two side by side")
    if len(plans) == 2 and not output.lower().endswith(".html"):
        raise OutputError(f"{output}: two plans are shown in a .html")
    document = read_graph(graph)
    made = [read_valid_plan(document, source) for source in plans]
    if output.lower().endswith(".html"):
        draw_plans(output, document, dict(zip(plans, made, strict=True)))
    else:
        draw_plan(output, document, made[0])
    click.echo(f"{output}: {Path(output).stat().st_size:,} bytes", err=True)
