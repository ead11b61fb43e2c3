"""The plan store as the runtime uses it; the service's tests have the rest."""

import contextlib
import sqlite3

import pytest

from coop_plan.planner import find_faults, plan
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.plan_cache.record import StoredPlan, as_bytes, as_record
from coop_plan.planner.plan_cache.store import SqliteStore, StoreError, planner_version
from coop_plan.schemas import Device
from tests.planner.core.test_schedule import plan_of
from tests.schedules import schedule_of
from tests.support import make_graph


@pytest.fixture
def graph():
    tensors = {0: ("input", 1), 1: ("activation", 9), 2: ("output", 1)}
    return make_graph(tensors, [{"inputs": [0], "outputs": [1]}, {"inputs": [1], "outputs": [2]}])


@pytest.mark.parametrize("wal", [True, False])
def test_a_plan_is_kept_until_it_is_deleted(tmp_path, graph, wal):
    made = plan(graph, "100%")
    for expected in (made, None):
        with contextlib.closing(SqliteStore(tmp_path / "new" / "plans", wal=wal)) as store:
            if expected is None:
                store.delete("key")
                assert store.get("key") == []
            else:
                store.put("key", StoredPlan.of(made, graph))
                assert [r.for_graph(graph) for r in store.get("key")] == [made]


@pytest.mark.parametrize("content", [None, b"this is no database\n" * 300])
def test_what_cannot_be_opened_is_named(tmp_path, content):
    path = tmp_path / "plans"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(StoreError, match=f"{path} cannot be opened"):
        SqliteStore(path)


def test_a_full_disk_is_named(tmp_path, graph):
    """SQLite itself rolls back then."""
    stored = StoredPlan.of(plan(graph, "100%"), graph)
    with contextlib.closing(SqliteStore(tmp_path / "plans")) as store:
        (pages,) = store._connection.execute("pragma page_count").fetchone()
        store._connection.execute(f"pragma max_page_count = {pages}")
        with pytest.raises(sqlite3.OperationalError, match="is full"):
            for number in range(100):
                store.put(str(number), stored)


def test_the_version_is_that_of_the_sources():
    assert len(planner_version()) == 64
    assert planner_version.__wrapped__() == planner_version()


def swapped(graph):
    """A plan that sends a tensor to the host and back, which stalls."""
    orders = [("run", 0), ("offload", 1), ("wait", 1), ("prefetch", 1), ("wait", 1), ("run", 1)]
    return plan_of(schedule_of(Problem.from_graph(graph, 1), orders))


def with_device(graph, **device):
    return graph.model_copy(update={"device": Device(**device)})


def test_a_plan_with_transfers_keeps_its_stalls(graph):
    """Carried to other costs and a slower link, its cost is the timeline's, not a sum of ops."""
    fast = with_device(graph, d2h_bytes_per_s=9e6, h2d_bytes_per_s=9e6)
    slow = with_device(graph, d2h_bytes_per_s=3e6, h2d_bytes_per_s=1e6, copy_latency_us=2.0)
    stored = StoredPlan.of(swapped(fast), fast)
    assert stored.with_original_graph()[1].cost_us == pytest.approx(2 + 1 + 1)
    carried = stored.for_graph(slow)
    assert carried.cost_us == pytest.approx(2 + (2 + 3) + (2 + 9))
    assert find_faults(slow, carried) == []


def test_a_bound_is_kept_for_equal_costs_only(graph):
    """Costs that are exchanged have the same sum, and are others."""
    made = plan(graph, "100%", alignment=1)
    bounded = made.model_copy(update={"lower_bound_model": "program-order"})
    stored = StoredPlan.of(bounded, graph)
    assert stored.for_graph(graph) == bounded
    costs = zip(graph.ops, (0.5, 1.5), strict=True)
    ops = [op.model_copy(update={"cost_us": cost}) for op, cost in costs]
    other = stored.for_graph(graph.model_copy(update={"ops": ops}))
    assert other.base_cost_us == made.base_cost_us
    assert other.lower_bound_model == "any"  # told anew, as every op runs once


@pytest.mark.parametrize("change", [{"peak_bytes": 3}, {"steps": []}, {"budget_bytes": 1}])
def test_a_record_that_does_not_hold_is_none(graph, change):
    """Whoever wrote it: it passes the verifier on every way out."""
    stored = StoredPlan.of(plan(graph, "100%", alignment=1).model_copy(update=change), graph)
    again = as_record(as_bytes(stored))
    assert again.with_original_graph() is None
    assert again.for_graph(graph) is None
