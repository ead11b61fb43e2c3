"""Input documents of the commands: files, or - for stdin; gzip is unpacked."""

import sys
from typing import TYPE_CHECKING

from coop_plan.api.cli.exit_codes import EXIT_INVALID, fail
from coop_plan.schemas.errors import InvalidInputError

if TYPE_CHECKING:
    from coop_plan.schemas import Graph, Plan


def read_graph(source: str) -> "Graph":
    """The graph in a file."""
    from coop_plan.schemas import parse_graph

    data, name = read_input(source)
    try:
        return parse_graph(data, name)
    except InvalidInputError:
        _check_kind(data, name, "graph")
        raise


def read_plan(source: str) -> "Plan":
    """The plan in a file."""
    from coop_plan.schemas import parse_plan

    data, name = read_input(source)
    try:
        return parse_plan(data, name)
    except InvalidInputError:
        _check_kind(data, name, "plan")
        raise


def _check_kind(data: bytes, name: str, wanted: str) -> None:
    from coop_plan.api.cli.file_kinds import check_kind

    check_kind(data, name, wanted)


def read_valid_plan(graph: "Graph", source: str) -> "Plan":
    """The plan in a file; exits if the plan is not valid for the graph."""
    from coop_plan.planner.verifier import find_faults

    plan = read_plan(source)
    for fault in find_faults(graph, plan):
        fail(f"{source}#{fault.pointer}: {fault.code}: {fault.message}", EXIT_INVALID)
    return plan


def read_input(source: str) -> tuple[bytes, str]:
    """The unpacked bytes of a file or of stdin, and its name in errors."""
    from coop_plan.schemas._parse import read_bytes, unpacked

    if source != "-":
        return read_bytes(source), source
    if sys.stdin is None:
        fail("stdin cannot be read: it is closed", EXIT_INVALID)
    return unpacked(sys.stdin.buffer.read(), "stdin"), "stdin"
