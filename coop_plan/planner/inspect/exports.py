"""Exports of a plan for other tools: Perfetto, PyTorch's memory viewer, MiniMalloc, CSV."""

import csv
import io
import json
import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from coop_plan.planner.inspect.buffers import Moment, PlanView, Rectangle, replay_plan
from coop_plan.planner.inspect.explain import split_source, tensor_name
from coop_plan.schemas import Graph, Plan

TRACKS = {"compute": 1, "offload": 2, "prefetch": 3, "wait": 1, "host": 4}


def trace(graph: Graph, plan: Plan) -> bytes:
    """The timeline as Chrome's JSON trace events, which Perfetto opens as well.

    One track per engine, and counters of the bytes in use; times are µs since the first step.
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    view = replay_plan(graph, plan)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": graph.name or "step"}}
    ]
    names = {1: "compute", 2: "device to host", 3: "host to device", 4: "host"}
    events += [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": names[tid]}}
        for tid in sorted({TRACKS[moment.engine] for moment in view.moments})
    ]
    fixed = plan.resident_bytes
    for at, moment in enumerate(view.moments):
        if moment.engine == "wait" and moment.end_us <= moment.begin_us:
            continue
        name, details = _event(graph, moment)
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": TRACKS[moment.engine],
                "ts": moment.begin_us,
                "dur": moment.end_us - moment.begin_us,
                "name": name,
                "cat": moment.engine,
                "args": details,
            }
        )
        if moment.engine == "compute":
            live = {"arena": view.live[at], "outside": view.outside[at], "resident": fixed}
            events.append(
                {"ph": "C", "pid": 1, "ts": moment.begin_us, "name": "bytes in use", "args": live}
            )
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode()


def _event(graph: Graph, moment: Moment) -> tuple[str, dict[str, Any]]:
    if moment.engine in ("compute", "host"):
        op = graph.ops[moment.op]
        return op.name, {"op": op.id, "source": op.source, "again": moment.rerun}
    tensor = tensor_name(graph, moment.tensor)
    return f"{moment.engine} {tensor}", {"bytes": moment.bytes}


BASE = 1 << 40
"""Address of the arena in a snapshot; any address that a device could have."""


def memory_snapshot(graph: Graph, plan: Plan) -> bytes:
    """A pickle as of `torch.cuda.memory._dump_snapshot`, for https://pytorch.org/memory_viz.

    The arena is one segment. Every buffer and workspace is allocated and freed at its address, with
    its op, module and line as stack frames.
    """
    view = replay_plan(graph, plan)
    order = [(rectangle.begin, 1, rectangle) for rectangle in view.rectangles if rectangle.bytes]
    order += [
        (rectangle.end, 0, rectangle)
        for rectangle in view.rectangles
        if rectangle.bytes and rectangle.end < len(view.moments)
    ]
    order.sort(key=lambda entry: entry[:2])  # frees before allocations of the same moment
    segment = {"action": "segment_alloc", "addr": BASE, "size": plan.arena_bytes, "stream": 0}
    events: list[dict[str, Any]] = [segment | {"frames": [], "time_us": 0}]
    for moment, begins, rectangle in order:
        event = {
            "addr": BASE + rectangle.offset,
            "size": rectangle.bytes,
            "stream": 0,
            "frames": _frames(graph, rectangle),
            "time_us": int(view.moments[moment].begin_us),
        }
        actions = ("alloc",) if begins else ("free_requested", "free_completed")
        events += [event | {"action": action} for action in actions]
    snapshot = {"segments": [_segment(graph, plan, view)], "device_traces": [events]}
    return pickle.dumps(snapshot)


def _frames(graph: Graph, rectangle: Rectangle) -> list[dict[str, Any]]:
    tensor = "workspace" if rectangle.tensor < 0 else tensor_name(graph, rectangle.tensor)
    first = {"name": f"{tensor} ({rectangle.kind})", "filename": "coop-plan", "line": 0}
    if rectangle.op < 0:
        return [first]
    op = graph.ops[rectangle.op]
    module, line = split_source(op.source)
    found = re.fullmatch(r"(.+):(\d+)", line)
    file, number = (found[1], int(found[2])) if found else (op.source, 0)
    named = f"{op.name} {module}".rstrip()
    return [first, {"name": named, "filename": file or "coop-plan", "line": number}]


def _segment(graph: Graph, plan: Plan, view: PlanView) -> dict[str, Any]:
    """The arena's segment at the end of the step."""
    last = sorted(
        (
            rectangle
            for rectangle in view.rectangles
            if rectangle.end == len(view.moments) and rectangle.bytes
        ),
        key=lambda rectangle: rectangle.offset,
    )
    blocks: list[dict[str, Any]] = []
    at = 0

    def add(size: int, requested: int, state: str, frames: list[dict[str, Any]]) -> None:
        nonlocal at
        if size > 0:
            place = {"address": BASE + at, "size": size, "requested_size": requested}
            blocks.append(place | {"state": state, "frames": frames})
            at += size

    for rectangle in last:
        add(rectangle.offset - at, 0, "inactive", [])
        frames = _frames(graph, rectangle)
        add(rectangle.bytes, rectangle.bytes, "active_allocated", frames)
    add(plan.arena_bytes - at, 0, "inactive", [])
    used = sum(rectangle.bytes for rectangle in last)
    return {
        "device": 0,
        "address": BASE,
        "total_size": plan.arena_bytes,
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def minimalloc(graph: Graph, plan: Plan) -> bytes:
    """Buffers and workspaces in MiniMalloc's CSV: lifetimes [lower, upper) in moments, and offsets.

    The format of https://github.com/google/minimalloc, which `coop-plan place` reads as well.
    Buffers of 0 bytes are omitted.
    """
    rows = [
        (f"b{r.buffer}" if r.buffer >= 0 else f"w{r.begin}", r.begin, r.end, r.bytes, r.offset)
        for r in replay_plan(graph, plan).rectangles
        if r.bytes and r.end > r.begin
    ]
    return _csv("id,lower,upper,size,offset", rows)


def table(graph: Graph, plan: Plan) -> bytes:
    """CSV with a row per buffer and workspace: tensor, kind, op, bytes, offset and lifetime."""
    view = replay_plan(graph, plan)
    heads = "buffer,tensor,kind,op,source,bytes,offset,begin,end,begin_us"
    rows = []
    for r in view.rectangles:
        op = graph.ops[r.op] if r.op >= 0 else None
        buffer = r.buffer if r.buffer >= 0 else ""
        tensor = tensor_name(graph, r.tensor) if r.tensor >= 0 else "workspace"
        made = (op.name, op.source) if op else ("", "")
        begin_us = view.moments[r.begin].begin_us
        place = r.bytes, r.offset, r.begin, r.end, begin_us
        rows.append((buffer, tensor, r.kind, *made, *place))
    return _csv(heads, rows)


def _csv(heads: str, rows: Iterable[Sequence[object]]) -> bytes:
    out = io.StringIO(newline="")
    out.write(f"{heads}\n")
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue().encode()


EXPORTERS: dict[str, Callable[[Graph, Plan], bytes]] = {
    "perfetto": trace,
    "chrome-trace": trace,
    "memory-snapshot": memory_snapshot,
    "minimalloc": minimalloc,
    "csv": table,
}
"""Exporters by the format names of `coop-plan export --to`; Perfetto reads Chrome's traces."""
