"""The plan store as the runtime uses it; the service's tests have the rest."""

import contextlib

import pytest

from coop_plan.planner import plan
from coop_plan.planner.cache.store import SqliteStore, StoredPlan, StoreError, planner_version
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
                assert store.get("key") is None
            else:
                store.put("key", StoredPlan.of(made, graph))
                assert store.get("key").for_graph(graph) == made


@pytest.mark.parametrize("content", [None, b"this is no database\n" * 300])
def test_what_cannot_be_opened_is_named(tmp_path, content):
    path = tmp_path / "plans"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(StoreError, match=f"{path} cannot be opened"):
        SqliteStore(path)


def test_the_version_is_that_of_the_sources():
    assert len(planner_version()) == 64
    assert planner_version.__wrapped__() == planner_version()
