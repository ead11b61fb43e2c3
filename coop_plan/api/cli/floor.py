"""`coop-plan floor`: lower bound on the budget of every plan, without a search."""

import json
from dataclasses import asdict, dataclass
from typing import Any

import click

from coop_plan.api.cli.exit_codes import printable
from coop_plan.api.cli.input import read_graph
from coop_plan.api.cli.plan_options import parse_plan_options, plan_options
from coop_plan.schemas import Graph, Outputs, format_bytes


@dataclass(frozen=True)
class Floor:
    """Sizes in bytes, found without a search for a schedule.

    The op, None without ops, has the largest working set if each op runs in its smallest variant.
    """

    resident_bytes: int
    output_bytes: int
    outside_bytes: int
    """The bytes of `output_bytes` that are allocated outside the arena."""
    op: int | None
    op_name: str
    op_source: str
    working_set_bytes: int
    budget_lower_bound_bytes: int


def floor_of(graph: Graph, alignment: int, outputs: Outputs) -> Floor:
    """The floor of every schedule of `graph`, with transfers over the graph's own link."""
    from coop_plan.planner.core.memory_bounds import budget_lower_bound, working_set_bound
    from coop_plan.planner.core.problem import Problem

    problem = Problem.from_graph(graph, alignment, outputs)
    at, working_set = working_set_bound(problem)
    op = graph.ops[at] if at >= 0 else None
    return Floor(
        resident_bytes=problem.resident_bytes,
        output_bytes=sum(t.bytes for t in graph.tensors if t.kind == "output"),
        outside_bytes=problem.outside_bytes,
        op=None if op is None else op.id,
        op_name="" if op is None else op.name,
        op_source="" if op is None else op.source,
        working_set_bytes=working_set,
        budget_lower_bound_bytes=budget_lower_bound(problem),
    )


@click.command(short_help="Print the proved lower bound on any budget, without a search.")
@click.argument("graph")
@plan_options("outputs", "alignment")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def floor(graph: str, as_json: bool, **values: Any) -> None:
    """Print resident bytes, outputs, the largest working set and a lower bound on any budget.

    The bound holds for every method. It takes milliseconds, since no schedule is searched; the
    smallest budget that a method can meet is that of `coop-plan plan --budget min`.
    """
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
