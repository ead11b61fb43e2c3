"""A Redis that others write to: their values are set aside, and passwords are not printed."""

import time
import zlib

import pytest

from coop_plan.api.cluster.redis_job_store import JobStore
from coop_plan.api.jobs.request_handler import Reply
from coop_plan.api.jobs.worker_process import JobRequest, WorkerRequest
from coop_plan.api.service import problems
from coop_plan.api.service.redis_graph_store import RedisGraphStore
from coop_plan.planner import plan
from coop_plan.planner.plan_cache.record import StoredPlan
from coop_plan.planner.plan_cache.redis_store import RedisStore
from coop_plan.planner.plan_cache.store import StoreError, without_password
from tests.redis_server import needs_redis, redis_server

WORK = JobRequest(key="k" * 64, task=WorkerRequest("solve"), seconds=7.0)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.address


@needs_redis
def test_fields_that_are_no_slots(address, chain):
    store = RedisStore(address, secret=b"secret")
    name = "coop-plan:answers:k"
    for field in ("x", "-1", "1e3", "", "\u0661"):
        store._redis.hset(name, field, b"bad")
    assert (store.get("k"), store.signatures("k")) == ([], [])
    record = StoredPlan.of(plan(chain, 330, alignment=1), chain)
    store.put("k", record, another=True)
    assert store.get("k") == [record]


@needs_redis
def test_a_bomb_under_a_digest_is_no_graph(address):
    store = RedisGraphStore(address)
    digest = "sha256:" + "0" * 64
    squeeze = zlib.compressobj(9)
    bomb = b"".join(squeeze.compress(bytes(1 << 20)) for _ in range(1024)) + squeeze.flush()
    store._redis.set(f"coop-plan:graph:{digest}", bomb)
    began = time.process_time()
    assert store.get(digest) is None
    assert time.process_time() - began < 5


@needs_redis
@pytest.mark.parametrize(
    "change",
    [
        {"version": "x"},
        {"state": "dreaming"},
        {"figures": "{"},
        {"message": b"\xff"},
        {"work": "[]"},
        {"problem": '{"problem": "busy", "members": {"type": "x", "status": 200}}'},
    ],
)
def test_a_job_that_others_changed_is_none_and_can_be_submitted_again(address, change):
    store = JobStore(address, b"secret")
    store.redis.flushdb()
    store.submit("a", "s", WORK, b"body", 9)
    store.redis.hset("coop-plan:job:a", mapping=change)
    assert store.view("a") is None
    assert store.submit("a", "s", WORK, b"body", 9) == "new"
    assert store.finish(store.lease("a"), Reply(problem="time-limit", detail="late"))
    assert store.view("a").problem == Reply(problem="time-limit", detail="late")


@needs_redis
def test_a_sealed_problem_of_another_job_is_none(address):
    store = JobStore(address, b"secret")
    store.redis.flushdb()
    for job in "ab":
        store.submit(job, "s", WORK, b"body", 9)
    leases = [store.lease(job) for job in "ab"]
    assert store.finish(leases[0], Reply(problem="too-much-work", detail="it is too large"))
    sealed = store.redis.hget("coop-plan:job:a", "problem")
    store.redis.hset("coop-plan:job:b", mapping={"problem": sealed, "state": "failed"})
    assert store.view("b") is None
    assert store.view("a").problem.detail == "it is too large"


def test_members_of_a_problem_do_not_replace_its_own():
    answer = problems.response("busy", "full", type="x", status=200)
    assert b'"status":503' in answer.body
    assert b"urn:coop-plan:problem:busy" in answer.body


@pytest.mark.parametrize(
    ("address", "printed"),
    [
        ("redis://:pass@host:1/0", "redis://host:1/0"),
        ("rediss://user:p@ss@host/0?password=pass", "rediss://host/0"),
        ("unix://user:pass@/run/redis?password=pass", "unix:///run/redis"),
        ("/var/plans@home", "/var/plans@home"),
    ],
)
def test_addresses_are_printed_without_passwords(address, printed):
    assert without_password(address) == printed


def test_errors_have_no_password():
    with pytest.raises(StoreError) as wrong:
        RedisStore("redis://:word@host:port/0", secret=b"")
    assert "word" not in str(wrong.value)
