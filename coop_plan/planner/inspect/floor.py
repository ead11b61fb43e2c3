"""Memory that no schedule of a graph is below: fixed bytes, working sets, the proved bound."""

from dataclasses import dataclass

from coop_plan.planner.core.memory_bounds import budget_lower_bound, working_set_bound
from coop_plan.planner.core.problem import Problem
from coop_plan.schemas import Graph, Outputs


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


def floor(graph: Graph, alignment: int, outputs: Outputs) -> Floor:
    """The floor of every schedule of `graph`, with transfers over the graph's own link."""
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
