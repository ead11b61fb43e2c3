"""Data of the memory map as columns of rectangles and moments, small enough for one page."""

from typing import Any, get_args

from coop_plan.planner.inspect.buffers import KINDS, Engine, PlanView, replay_plan
from coop_plan.planner.inspect.explain import tensor_name
from coop_plan.schemas import Graph, Plan


def drawing(graph: Graph, plan: Plan, title: str = "") -> dict[str, Any]:
    """The memory map, figures and title of a plan.

    `map` has columns per rectangle: offset, size (bytes), begin, end (moments), kind (index in
    `KINDS`), op and tensor (positions, −1 for none); and per moment: live bytes of the arena, bytes
    of outputs outside it, engine (index in `Engine`), start and end in µs, and the position of the
    op that runs then or ran last. `resident` lists (kind, bytes).
    """
    figures = {name: value for name, value in plan.to_dict().items() if name != "steps"}
    return {
        "title": title or f"{plan.method}, {plan.overhead:.2%} overhead",
        "figures": figures,
        "map": _map(graph, plan, replay_plan(graph, plan)),
    }


def _map(graph: Graph, plan: Plan, view: PlanView) -> dict[str, Any]:
    return {
        "offset": [rectangle.offset for rectangle in view.rectangles],
        "size": [rectangle.bytes for rectangle in view.rectangles],
        "begin": [rectangle.begin for rectangle in view.rectangles],
        "end": [rectangle.end for rectangle in view.rectangles],
        "kind": [KINDS.index(rectangle.kind) for rectangle in view.rectangles],
        "op": [rectangle.op for rectangle in view.rectangles],
        "tensor": [rectangle.tensor for rectangle in view.rectangles],
        "live": view.live,
        "outside": view.outside,
        "resident": [[kind, size] for kind, size in view.resident.items()],
        "engine": [get_args(Engine).index(moment.engine) for moment in view.moments],
        "runs": _latest_runs(view),
        "begin_us": [round(moment.begin_us, 3) for moment in view.moments],
        "done_us": [round(moment.end_us, 3) for moment in view.moments],
        "end_us": max((moment.end_us for moment in view.moments), default=0.0),
        "peak": view.peak,
        "arena": plan.arena_bytes,
        "budget": plan.budget_bytes,
        **graph_columns(graph),
    }


def _latest_runs(view: PlanView) -> list[int]:
    runs: list[int] = []
    for moment in view.moments:
        runs.append(moment.op if moment.engine == "compute" or not runs else runs[-1])
    return runs


def graph_columns(graph: Graph) -> dict[str, list[str]]:
    """The columns of a map that depend on the graph only."""
    return {
        "names": [tensor_name(graph, t) for t in range(len(graph.tensors))],
        "ops": [op.name for op in graph.ops],
        "sources": [op.source for op in graph.ops],
        "phases": [op.phase for op in graph.ops],
    }
