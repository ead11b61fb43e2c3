"""A Redis that others write to: their values are set aside, and passwords are not printed."""

import contextlib
import random
import time
import zlib

import pytest
import redis

from coop_plan.api.cluster.redis_job_store import JobStore
from coop_plan.api.jobs.request_handler import Figures, Reply
from coop_plan.api.jobs.worker_process import JobRequest, WorkerRequest
from coop_plan.api.service import problems
from coop_plan.api.service.graph_store import GraphSummary
from coop_plan.api.service.redis_graph_store import RedisGraphStore
from coop_plan.planner import plan
from coop_plan.planner.plan_cache.record import StoredPlan
from coop_plan.planner.plan_cache.redis_store import RedisStore
from coop_plan.planner.plan_cache.store import StoreError, without_password
from coop_plan.schemas.fingerprint import digest_of
from tests.redis_server import needs_redis, redis_server

WORK = JobRequest(key="k" * 64, task=WorkerRequest("solve"), seconds=7.0)


FIELDS = ["began", "version", "lease", "published", "publishes", "deliveries", "work", "state"]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.address


@needs_redis
def test_fields_that_are_no_slots(address, chain):
    store = RedisStore(address, secret=b"secret")
    name = "coop-plan:answers:k"
    for field in ("x", "-1", "1e3", "", "\u0661", "9" * 5000):
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
@pytest.mark.parametrize("key", ["job:a", "job:a:body", "job:a:waiting", "queued", "running"])
@pytest.mark.parametrize("stage", ["queued", "running", "lost"])
def test_jobs_of_a_table_that_others_changed_can_be_run(address, stage, key):
    """Values of other types, and fields that are no numbers: also those of another job."""
    draw = random.Random(stage + key)
    for _ in range(12):
        with contextlib.closing(JobStore(address, b"secret")) as store:
            store.redis.flushall()
            assert store.submit("a", "server", WORK, b"body", 9) == "new"
            if stage != "queued":
                lease = store.lease("a")
            if stage == "lost":
                store.finish(lease, Reply(problem="unknown-graph"))
            junk = draw.choice([b"", b"no", b"\xff", b"1e400", b"{}", "²".encode()])
            name = f"coop-plan:{key}"
            if store.redis.type(name) == b"hash" and draw.random() < 0.8:
                store.redis.hset(name, draw.choice(FIELDS), junk)
            else:
                store.redis.delete(name)
                store.redis.set(name, junk)
            leased = set()
            for _ in range(3):  # a job that was deleted is submitted again
                for job in ("b", "a"):
                    store.submit(job, "server", WORK, b"body", 9)
                    store.view(job, "server")
                for lease in filter(None, (store.lease("b"), store.lease("a"))):
                    store.renew(lease, "", Figures())
                    leased |= {lease.job_id} if store.finish(lease, None, b"x") else set()
            assert "b" in leased
            assert "a" in leased or stage == "running"


JUNK = [b"", b"no", b"\xff", b"1e400", b"nan", b"-1", b"9" * 5000, b"{}"]


@needs_redis
@pytest.mark.parametrize("seed", range(12))
def test_no_job_is_lost_by_what_others_write_elsewhere(address, seed):
    """Other keys, members and jobs: each honest job is leased once, with its body."""
    draw = random.Random(seed)
    with contextlib.closing(JobStore(address, b"secret")) as store:
        store.redis.flushall()
        honest = [f"{number:032x}" for number in range(5)]
        for job in honest:
            assert store.submit(job, "server", WORK, job.encode(), 99, draw.choice("ab")) == "new"
        assert store.submit("f" * 32, "server", WORK, b"body", 99, "c") == "new"

        def spoil():
            junk = draw.choice(JUNK)
            place = draw.choice(["set", "served", "counter", "field", "type"])
            if place == "set":
                name = draw.choice(["queued", "running"])
                store.redis.zadd(f"coop-plan:{name}", {junk: draw.choice([0, 1e300])})
            elif place == "served":
                store.redis.hset("coop-plan:served", draw.choice("abc"), junk)
            elif place == "counter":
                store.redis.set(f"coop-plan:{draw.choice(['served', 'leases'])}", junk)
            elif place == "field":
                store.redis.hset("coop-plan:job:" + "f" * 32, draw.choice(FIELDS), junk)
            else:
                store.redis.set(f"coop-plan:job:{'f' * 32}{draw.choice(['', ':waiting'])}", junk)

        leased = []
        for _ in range(20):
            with contextlib.suppress(redis.ResponseError):  # the key has another type by now
                spoil()
            lease = store.lease(draw.choice([*honest, "f" * 32, "e" * 32]))
            with contextlib.suppress(redis.ResponseError):
                spoil()
            if lease is not None:
                done = store.renew(lease, "", Figures()) and store.finish(lease, None, b"x")
                if lease.job_id in honest:
                    assert done
                    assert lease.body == lease.job_id.encode()
                    leased.append(lease.job_id)
        assert sorted(leased) == honest
        assert all(store.view(job).state == "done" for job in honest)


@needs_redis
def test_a_queued_job_without_its_body_is_none(address):
    with contextlib.closing(JobStore(address, b"secret")) as store:
        store.redis.flushall()
        for job in "ab":
            assert store.submit(job, "s", WORK, b"body", 9) == "new"
        store.redis.delete("coop-plan:job:a:body")
        assert store.lease("a").job_id == "b"
        assert store.view("a") is None
        assert store.submit("a", "s", WORK, b"body", 9) == "new"


@needs_redis
@pytest.mark.parametrize(
    "wrong", ["answers:k", "family:f", "graph-cards", "graph:d", "graph-card:d"]
)
def test_a_key_of_another_type_fails_once_and_others_never(address, chain, wrong):
    """It does not stand for a store that is away, and it is deleted."""
    plans, graphs = RedisStore(address, secret=b"secret"), RedisGraphStore(address)
    plans._redis.flushall()
    for name in ("graph-cards", "family:f"):
        plans._redis.zadd(f"coop-plan:{name}", {b"\xff": 1, "d": 1})
    plans._redis.set("coop-plan:graph:d", b"x")
    record = StoredPlan.of(plan(chain, 330, alignment=1), chain)
    plans._redis.delete(f"coop-plan:{wrong}")
    plans._redis.rpush(f"coop-plan:{wrong}", b"x")
    calls = [
        lambda key: plans.get(key),
        lambda key: plans.signatures(key),
        lambda key: plans.put(key, record, families=[("f", 1)]),
        lambda _: plans.keys_at_most("f", 2.0),
        lambda _: graphs.get("d"),
        lambda _: graphs.listed(),
    ]
    for call in calls:
        with contextlib.suppress(StoreError):
            call("k")
        call("other")
        call("k")
    plans.put("k", record)
    assert plans.get("k") == [record]


@needs_redis
def test_damaged_graphs_and_cards_are_none(address):
    """A question with that graph stores it again; a list leaves out what is no card."""
    store = RedisGraphStore(address)
    store._redis.flushall()
    summaries = []
    for document in (b"one", b"two"):
        summaries.append(GraphSummary(digest_of(document), document.decode(), 1, 3))
        assert store.put(summaries[-1].digest, document, summaries[-1])
    one = summaries[0].digest
    for junk in (b"\xff", b'{"digest": "\xfc"}', b"{}", b""):
        store._redis.set(f"coop-plan:graph-card:{one}", junk)
        assert store.listed() == summaries[1:]
        store._redis.set(f"coop-plan:graph:{one}", junk)
        assert store.get(one) is None
        assert not store.mark_used(one)
        store.put(one, b"one")
    assert store.get(one) == b"one"


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
