"""What is written for other tools is what the plan says, and they read it."""

import csv
import io
import itertools
import json
import pickle
from pathlib import Path

import pytest

from coop_plan.planner import plan
from coop_plan.planner.inspect.buffers import replay_plan
from coop_plan.planner.inspect.exports import memory_snapshot, minimalloc, table, trace
from coop_plan.planner.placement import place
from coop_plan.schemas import load_graph

EXAMPLE = load_graph(Path(__file__).parents[2] / "examples" / "graph.json")


@pytest.fixture(scope="module")
def made():
    return plan(EXAMPLE, "50%", method="delta", link="25GB/s")


def test_the_trace_has_a_track_an_engine_and_counts_bytes(made):
    events = json.loads(trace(EXAMPLE, made))["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    computed = [e for e in spans if e["cat"] == "compute"]
    assert len(computed) == len(EXAMPLE.ops) + made.recomputed_ops
    assert max(e["ts"] + e["dur"] for e in computed) <= made.cost_us * (1 + 1e-9)
    for tid in {e["tid"] for e in spans}:  # what runs on one engine runs in order
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == tid)
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(own))
        assert any(e["ph"] == "M" and e.get("tid") == tid for e in events)
    used = [e["args"]["arena"] for e in events if e["ph"] == "C"]
    assert max(used) == max(replay_plan(EXAMPLE, made).live)


def test_pytorch_s_viewer_reads_the_snapshot(made):
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    snapshot = pickle.loads(memory_snapshot(EXAMPLE, made))
    assert "Active Memory Timeline" in viewer.trace_plot(snapshot)
    assert f"total_reserved: {viewer.Bytes(made.arena_bytes)}" in viewer.segsum(snapshot)
    told = viewer.trace(snapshot)  # follows every allocation and free
    assert told.count("cudaMalloc") == 1
    events = snapshot["device_traces"][0]
    live, most = 0, 0
    for event in events:
        if event["action"] == "alloc":
            live += event["size"]
            most = max(most, live)
        elif event["action"] == "free_completed":
            live -= event["size"]
    assert most == max(replay_plan(EXAMPLE, made).live)
    assert any("model.0" in frame["name"] for e in events for frame in e["frames"])


def test_the_placement_is_one_of_minimalloc_s(made):
    rows = list(csv.DictReader(io.StringIO(minimalloc(EXAMPLE, made).decode())))
    columns = [[int(row[name]) for row in rows] for name in ("lower", "upper", "size", "offset")]
    lower, upper, size, offset = columns
    found = place(lower, upper, size, capacity=made.arena_bytes, fixed=offset)  # refuses overlaps
    assert found.offsets.tolist() == offset
    assert found.peak == made.arena_bytes


def test_the_table_has_a_row_a_buffer(made):
    rows = list(csv.DictReader(io.StringIO(table(EXAMPLE, made).decode())))
    assert len(rows) == len(replay_plan(EXAMPLE, made).rectangles)
    assert {"kept", "offloaded", "prefetched"} <= {row["kind"] for row in rows}
    assert any(row["source"].startswith("model.0") for row in rows)
