"""A plan in the forms that tools people have open already read."""

import csv
import io
import json
import pickle
import re
from collections.abc import Callable
from typing import Any

from coop_plan.planner.inspect.buffers import Held, Look, Moment, look_at
from coop_plan.planner.inspect.explain import parts_of, tensor_name
from coop_plan.schemas import Graph, Plan

TRACKS = {"compute": 1, "offload": 2, "prefetch": 3, "wait": 1}
NAMES = {1: "compute", 2: "device to host", 3: "host to device"}


def trace(graph: Graph, plan: Plan) -> bytes:
    """
    The timeline as Chrome's JSON trace events, which Perfetto opens as well.

    A track an engine, and counters of the bytes in use; times are µs from the step's beginning.
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    look = look_at(graph, plan)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": graph.name or "step"}}
    ]
    events += [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": NAMES[tid]}}
        for tid in sorted({TRACKS[moment.engine] for moment in look.moments})
    ]
    fixed = plan.resident_bytes
    for at, moment in enumerate(look.moments):
        if moment.engine == "wait" and moment.end_us <= moment.begin_us:
            continue
        name, details = _said(graph, moment)
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
            live = {"arena": look.live[at], "outside": look.outside[at], "resident": fixed}
            events.append(
                {"ph": "C", "pid": 1, "ts": moment.begin_us, "name": "bytes in use", "args": live}
            )
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode()


def _said(graph: Graph, moment: Moment) -> tuple[str, dict[str, Any]]:
    if moment.engine == "compute":
        op = graph.ops[moment.op]
        return op.name, {"op": op.id, "source": op.source, "again": moment.again}
    tensor = tensor_name(graph, moment.tensor)
    return f"{moment.engine} {tensor}", {"bytes": moment.bytes}


BASE = 1 << 40
"""Where the arena begins in a snapshot: an address that a device could have."""


def memory_snapshot(graph: Graph, plan: Plan) -> bytes:
    """
    A pickle as `torch.cuda.memory._dump_snapshot` writes them, for https://pytorch.org/memory_viz.

    One segment, the arena; every buffer and workspace is allocated and freed at its address, with
    its op, module and line as the frames.
    """
    look = look_at(graph, plan)
    order = [(held.begin, 1, held) for held in look.held if held.bytes]
    order += [
        (held.end, 0, held) for held in look.held if held.bytes and held.end < len(look.moments)
    ]
    order.sort(key=lambda entry: entry[:2])  # what ends makes room for what begins
    segment = {"action": "segment_alloc", "addr": BASE, "size": plan.arena_bytes, "stream": 0}
    events: list[dict[str, Any]] = [segment | {"frames": [], "time_us": 0}]
    for moment, begins, held in order:
        event = {
            "addr": BASE + held.offset,
            "size": held.bytes,
            "stream": 0,
            "frames": _frames(graph, held),
            "time_us": int(look.moments[moment].begin_us),
        }
        actions = ("alloc",) if begins else ("free_requested", "free_completed")
        events += [event | {"action": action} for action in actions]
    snapshot = {"segments": [_segment(graph, plan, look)], "device_traces": [events]}
    return pickle.dumps(snapshot)


def _frames(graph: Graph, held: Held) -> list[dict[str, Any]]:
    tensor = "workspace" if held.tensor < 0 else tensor_name(graph, held.tensor)
    first = {"name": f"{tensor} ({held.kind})", "filename": "coop-plan", "line": 0}
    if held.op < 0:
        return [first]
    op = graph.ops[held.op]
    module, line = parts_of(op.source)
    found = re.fullmatch(r"(.+):(\d+)", line)
    file, number = (found[1], int(found[2])) if found else (op.source, 0)
    named = f"{op.name} {module}".rstrip()
    return [first, {"name": named, "filename": file or "coop-plan", "line": number}]


def _segment(graph: Graph, plan: Plan, look: Look) -> dict[str, Any]:
    """The arena as it is when the step is over."""
    last = sorted(
        (held for held in look.held if held.end == len(look.moments) and held.bytes),
        key=lambda held: held.offset,
    )
    blocks: list[dict[str, Any]] = []
    at = 0

    def gap(end: int) -> None:
        if end > at:
            blocks.append(
                {
                    "address": BASE + at,
                    "size": end - at,
                    "requested_size": 0,
                    "state": "inactive",
                    "frames": [],
                }
            )

    for held in last:
        gap(held.offset)
        blocks.append(
            {
                "address": BASE + held.offset,
                "size": held.bytes,
                "requested_size": held.bytes,
                "state": "active_allocated",
                "frames": _frames(graph, held),
            }
        )
        at = held.offset + held.bytes
    gap(plan.arena_bytes)
    used = sum(held.bytes for held in last)
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
    """
    Buffers and workspaces with their offsets in MiniMalloc's CSV: live in [lower, upper), moments.

    https://github.com/google/minimalloc; `coop-plan place` reads it, too. What has no bytes is left
    out.
    """
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("id", "lower", "upper", "size", "offset"))
    for held in look_at(graph, plan).held:
        if held.bytes and held.end > held.begin:
            name = f"b{held.buffer}" if held.buffer >= 0 else f"w{held.begin}"
            writer.writerow((name, held.begin, held.end, held.bytes, held.offset))
    return out.getvalue().encode()


def table(graph: Graph, plan: Plan) -> bytes:
    """Every buffer and workspace as a row of CSV: what it is, who made it, where and when it is."""
    look = look_at(graph, plan)
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ("buffer", "tensor", "kind", "op", "source", "bytes", "offset", "begin", "end", "begin_us")
    )
    for held in look.held:
        op = graph.ops[held.op] if held.op >= 0 else None
        writer.writerow(
            (
                held.buffer if held.buffer >= 0 else "",
                tensor_name(graph, held.tensor) if held.tensor >= 0 else "workspace",
                held.kind,
                op.name if op else "",
                op.source if op else "",
                held.bytes,
                held.offset,
                held.begin,
                held.end,
                look.moments[held.begin].begin_us,
            )
        )
    return out.getvalue().encode()


FORMS: dict[str, Callable[[Graph, Plan], bytes]] = {
    "perfetto": trace,
    "chrome-trace": trace,
    "memory-snapshot": memory_snapshot,
    "minimalloc": minimalloc,
    "csv": table,
}
"""What `coop-plan export --to` knows; Perfetto reads Chrome's traces."""
