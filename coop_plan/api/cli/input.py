"""Input documents of the commands: files, or - for stdin."""

import sys
from typing import TYPE_CHECKING

from coop_plan.api.cli.exit_codes import EXIT_INVALID, fail

if TYPE_CHECKING:
    from coop_plan.schemas import Graph, Plan


def read_graph(source: str) -> "Graph":
    """The graph in a file."""
    from coop_plan.schemas import load_graph, parse_graph

    return parse_graph(stdin(), "stdin") if source == "-" else load_graph(source)


def read_plan(source: str) -> "Plan":
    """The plan in a file."""
    from coop_plan.schemas import load_plan, parse_plan

    return parse_plan(stdin(), "stdin") if source == "-" else load_plan(source)


def read_valid_plan(graph: "Graph", source: str) -> "Plan":
    """The plan in a file; exits if the plan is not valid for the graph."""
    from coop_plan.planner.verifier import find_faults

    plan = read_plan(source)
    for fault in find_faults(graph, plan):
        fail(f"{source}#{fault.pointer}: {fault.code}: {fault.message}", EXIT_INVALID)
    return plan


def stdin() -> bytes:
    """The bytes of stdin; exits if it is closed."""
    if sys.stdin is None:
        fail("stdin cannot be read: it is closed", EXIT_INVALID)
    return sys.stdin.buffer.read()
