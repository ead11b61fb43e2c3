"""Input documents of the commands: files, or - for stdin; gzip is unpacked."""

import sys
from collections.abc import Callable
from typing import TypeVar

from coop_plan.api.cli.exit_codes import EXIT_INVALID, fail
from coop_plan.api.cli.file_kinds import check_kind
from coop_plan.schemas import Graph, InvalidInputError, Plan, parse_graph, parse_plan
from coop_plan.schemas._parse import read_bytes, unpacked

D = TypeVar("D")


def read_graph(source: str) -> Graph:
    """The graph in a file."""
    return _parsed(source, parse_graph, "graph")


def read_plan(source: str) -> Plan:
    """The plan in a file."""
    return _parsed(source, parse_plan, "plan")


def _parsed(source: str, parse: Callable[[bytes, str], D], kind: str) -> D:
    """The document in a file; one of another kind is named for what it is."""
    data, name = read_input(source)
    try:
        return parse(data, name)
    except InvalidInputError:
        check_kind(data, name, kind)
        raise


def read_valid_plan(graph: Graph, source: str) -> Plan:
    """The plan in a file; exits if the plan is not valid for the graph."""
    from coop_plan.planner.verifier import find_faults

    plan = read_plan(source)
    for fault in find_faults(graph, plan):
        fail(f"{source}#{fault.pointer}: {fault.code}: {fault.message}", EXIT_INVALID)
    return plan


def read_input(source: str) -> tuple[bytes, str]:
    """The unpacked bytes of a file or of stdin, and its name in errors."""
    if source != "-":
        return read_bytes(source), source
    if sys.stdin is None:
        fail("stdin cannot be read: it is closed", EXIT_INVALID)
    return unpacked(sys.stdin.buffer.read(), "stdin"), "stdin"
