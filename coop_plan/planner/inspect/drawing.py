"""What the memory map draws: columns of rectangles and moments, small enough for one page."""

from typing import Any

from coop_plan.planner.inspect.buffers import KINDS, Look, look_at
from coop_plan.planner.inspect.explain import tensor_name
from coop_plan.schemas import Graph, Plan


def drawing(graph: Graph, plan: Plan, title: str = "") -> dict[str, Any]:
    """
    A plan's map, its figures and a title.

    `map` has a column each of offset, size (bytes), begin, end (moments), kind (in `KINDS`), op and
    tensor (positions, −1: none), and by moment the live bytes and the begin in µs.
    """
    figures = {name: value for name, value in plan.to_dict().items() if name != "steps"}
    return {
        "title": title or f"{plan.method}, {plan.overhead:.2%} overhead",
        "figures": figures,
        "map": _map(graph, plan, look_at(graph, plan)),
    }


def _map(graph: Graph, plan: Plan, look: Look) -> dict[str, Any]:
    outside = look.outside[-1] if look.outside else 0
    made = [moment for moment in look.moments if moment.engine == "compute"]
    return {
        "offset": [held.offset for held in look.held],
        "size": [held.bytes for held in look.held],
        "begin": [held.begin for held in look.held],
        "end": [held.end for held in look.held],
        "kind": [KINDS.index(held.kind) for held in look.held],
        "op": [held.op for held in look.held],
        "tensor": [held.tensor for held in look.held],
        "live": look.live,
        "begin_us": [round(moment.begin_us, 3) for moment in look.moments],
        "end_us": max((moment.end_us for moment in made), default=0.0),
        "peak": look.peak,
        "arena": plan.arena_bytes,
        "budget_arena": plan.budget_bytes - plan.resident_bytes - outside,
        **graph_columns(graph),
    }


def graph_columns(graph: Graph) -> dict[str, list[str]]:
    """The columns of a map that are the graph's, and the same for all its plans."""
    return {
        "names": [tensor_name(graph, t) for t in range(len(graph.tensors))],
        "ops": [op.name for op in graph.ops],
        "sources": [op.source for op in graph.ops],
    }
