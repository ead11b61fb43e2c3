"""`coop-plan export`: a plan in the formats of other tools."""

import click

from coop_plan.api.cli.input import read_graph, read_valid_plan
from coop_plan.api.cli.output import check_writable, write_whole

FORMS = ("perfetto", "chrome-trace", "memory-snapshot", "minimalloc", "csv")


@click.command(short_help="Convert a plan for other tools.")
@click.argument("graph")
@click.argument("plan")
@click.option("--to", "form", required=True, type=click.Choice(FORMS), help="Format of the output.")
@click.option(
    "-o", "--output", required=True, metavar="FILE", help="Write to this file; - is stdout."
)
def export(graph: str, plan: str, form: str, output: str) -> None:
    """Convert PLAN for other tools: the schedule, and the address of each buffer.

    perfetto and chrome-trace are the same JSON, for ui.perfetto.dev and chrome://tracing;
    memory-snapshot is a pickle for pytorch.org/memory_viz; minimalloc is the CSV of MiniMalloc;
    csv has one row for each buffer.
    """
    from coop_plan.planner.inspect import exports

    check_writable(output)
    document = read_graph(graph)
    made = read_valid_plan(document, plan)
    data = exports.EXPORTERS[form](document, made)
    write_whole(output, data)
    click.echo(f"{output}: {len(data):,} bytes", err=True)
