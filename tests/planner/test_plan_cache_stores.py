"""What every plan store keeps to: SQLite and Redis."""

import contextlib

import pytest

from benchmarks.local_cluster import free_port
from coop_plan.planner.plan_cache.open_store import open_store
from coop_plan.planner.plan_cache.record import StoredRefusal
from coop_plan.planner.plan_cache.store import ALTERNATIVES, StoreError
from tests.redis_server import needs_redis, redis_server

SECRET = b"of the service"


@pytest.fixture(scope="module")
def redis_address(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.address


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=needs_redis)])
def address(request, tmp_path):
    if request.param == "sqlite":
        return str(tmp_path / "plans")
    found = request.getfixturevalue("redis_address")
    with contextlib.closing(open_store(found, SECRET)) as store:
        store._redis.flushdb()
    return found


@pytest.fixture
def store(address):
    with contextlib.closing(open_store(address, SECRET)) as made:
        yield made


def record(number):
    return StoredRefusal(
        method="coop",
        budget_bytes=number,
        min_feasible_bytes=number,
        op=None,
        working_set_bytes=0,
        unused=[],
    )


def test_the_first_stays_others_come_beside_it_and_the_oldest_goes(store, address):
    store.put("key", record(0))
    store.put("key", record(1))
    assert store.get("key") == [record(0)]
    for number in range(1, ALTERNATIVES + 1):
        store.put("key", record(number), another=True)
    kept = [record(number) for number in range(1, ALTERNATIVES + 1)]
    assert store.get("key") == kept
    assert store.get("other") == []
    with contextlib.closing(open_store(address, SECRET)) as again:
        assert again.get("key") == kept
        again.delete("key")
    assert store.get("key") == []


def test_a_record_is_replaced_only_while_it_is_there(store):
    store.put("key", record(0))
    store.put("key", record(1), another=True)
    assert store.replace("key", record(0), record(2))
    assert store.get("key") == [record(2), record(1)]
    assert not store.replace("key", record(0), record(3))
    assert not store.replace("other", record(2), record(3))
    assert store.get("key") == [record(2), record(1)]


def test_what_was_sealed_by_others_is_dropped_and_counted(store, address):
    with contextlib.closing(open_store(address, b"of somebody")) as forger:
        forger.put("key", record(0))
    assert store.get("key") == []
    assert store.dropped == 1
    assert store.get("key") == []
    assert store.dropped == 1
    store.put("key", record(1))
    assert store.get("key") == [record(1)]


def test_families_name_the_nearest_below(store):
    for number in (1, 5, 9, 2**53):
        families = [("bytes", number), ("share", number / 10)]
        store.put(f"key {number}", record(number), families=families)
    assert store.keys_at_most("bytes", 8) == ["key 5", "key 1"]
    assert store.keys_at_most("bytes", 9) == ["key 9", "key 5", "key 1"]
    assert store.keys_at_most("share", 0.5) == ["key 5", "key 1"]
    assert store.keys_at_most("bytes", 0) == store.keys_at_most("others", 9) == []
    assert store.keys_at_most("bytes", 2**53)[0] == f"key {2**53}"
    store.check()


@needs_redis
def test_redis_lets_go_of_answers_and_families_follow(redis_address):
    with contextlib.closing(open_store(redis_address, SECRET)) as store:
        store._redis.flushdb()
        store.put("old", record(1), families=[("bytes", 1)])
        store.put("new", record(2), families=[("bytes", 2)])
        store._redis.delete("coop-plan:answers:old")
        assert store.keys_at_most("bytes", 9) == ["new"]
        assert store._redis.zcard("coop-plan:family:bytes") == 1


@needs_redis
def test_a_redis_that_is_away_is_a_store_that_fails(monkeypatch):
    monkeypatch.setattr("coop_plan.planner.plan_cache.redis_store.WAIT_SECONDS", 0.1)
    with contextlib.closing(open_store(f"redis://127.0.0.1:{free_port()}/0", SECRET)) as store:
        for call in (lambda: store.get("key"), store.check, lambda: store.put("key", record(1))):
            with pytest.raises(StoreError):
                call()


def test_an_address_that_is_none():
    with pytest.raises(StoreError, match="is not the address of a Redis"):
        open_store("redis://127.0.0.1:port/0", SECRET)
