"""`coop-plan export`: a plan for other tools."""

import sys

import click

from coop_plan.api.cli.input import read_graph, read_valid_plan

FORMS = ("perfetto", "chrome-trace", "memory-snapshot", "minimalloc", "csv")


@click.command(short_help="Write a plan for other tools.")
@click.argument("graph")
@click.argument("plan")
@click.option("--to", "form", required=True, type=click.Choice(FORMS), help="For which tool.")
@click.option("-o", "--output", required=True, metavar="FILE", help="- is stdout.")
def export(graph: str, plan: str, form: str, output: str) -> None:
    """Write PLAN for other tools: what runs when, and what lies where.

    perfetto and chrome-trace are one JSON trace, for ui.perfetto.dev and chrome://tracing;
    memory-snapshot is a pickle for pytorch.org/memory_viz; minimalloc is the CSV of MiniMalloc;
    csv has a row a buffer.
    """
    from coop_plan.api.cli.output import check_writable, write_whole
    from coop_plan.planner.inspect import exports

    check_writable(output)
    document = read_graph(graph)
    made = read_valid_plan(document, plan)
    data = exports.EXPORTERS[form](document, made)
    if output == "-":
        sys.stdout.buffer.write(data)
        return
    write_whole(output, data)
    click.echo(f"{output}: {len(data):,} bytes", err=True)
