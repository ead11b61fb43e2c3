"""`coop-plan floor`: lower bound on the budget of every plan, without a search."""

import json
from dataclasses import asdict
from typing import Any

import click

from coop_plan.api.cli.exit_codes import printable
from coop_plan.api.cli.input import read_graph
from coop_plan.api.cli.plan_options import parse_plan_options, plan_options
from coop_plan.schemas import format_bytes


@click.command(short_help="Print the proved lower bound on any budget, without a search.")
@click.argument("graph")
@plan_options("outputs", "alignment")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def floor(graph: str, as_json: bool, **values: Any) -> None:
    """Print resident bytes, outputs, the largest working set and a lower bound on any budget.

    The bound holds for every method. It takes milliseconds, since no schedule is searched; the
    smallest budget that a method can meet is that of `coop-plan plan --budget min`.
    """
    from coop_plan.planner.inspect.floor import floor as floor_of

    options = parse_plan_options({"budget": "min", **values})
    found = floor_of(read_graph(graph), options.alignment, options.outputs)
    if as_json:
        click.echo(json.dumps(asdict(found)))
        return
    at = "" if found.op is None else f" of op {found.op} ({found.op_name})"
    if found.op_source:
        at += f", {found.op_source}"
    outside = f", {format_bytes(found.outside_bytes)} outside the arena"
    for name, size, more in (
        ("resident", found.resident_bytes, ""),
        ("outputs", found.output_bytes, outside if found.output_bytes else ""),
        ("largest working set", found.working_set_bytes, at),
        ("budget at least", found.budget_lower_bound_bytes, ", proved"),
    ):
        click.echo(printable(f"{name:<19}  {format_bytes(size)}  ({size} bytes){more}"))
