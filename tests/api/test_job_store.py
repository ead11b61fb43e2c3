"""The jobs of a cluster in a real Redis: one solve a question, leases, fencing."""

import random
import time

import pytest

from coop_plan.api.cluster import redis_job_store as module
from coop_plan.api.cluster.redis_job_store import JobStore
from coop_plan.api.jobs.request_handler import Figures, Reply
from coop_plan.api.jobs.worker_process import JobRequest, WorkerRequest
from tests.redis_server import needs_redis, redis_server

pytestmark = needs_redis

WORK = JobRequest(key="k" * 64, task=WorkerRequest("solve", "gzip"), seconds=7.0)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.address


@pytest.fixture
def store(address):
    made = JobStore(address, b"secret")
    made.redis.flushdb()
    yield made
    made.close()


def begin(store, job="a", who="server", most=9):
    return store.submit(job, who, WORK, b"body", most)


def expire(store, job="a"):
    """As if the worker had not been heard of for long."""
    store.redis.hset(f"coop-plan:job:{job}", "lease", 1)


def leave_behind(store, job="a"):
    """As if no server had been heard of for long."""
    waiting = f"coop-plan:job:{job}:waiting"
    for who in store.redis.zrange(waiting, 0, -1):
        store.redis.zadd(waiting, {who: 1})


def state(store, job="a"):
    return store.view(job).state


def test_one_job_a_question_and_its_answer_for_all(store):
    assert [begin(store, who=who) for who in ("one", "two", "one")] == ["new", "joined", "joined"]
    assert store.sizes() == (1, 0)
    lease = store.lease("a")
    assert (lease.request, lease.body) == (WORK, b"body")
    assert store.lease("a") is None
    assert store.sizes() == (0, 1)
    assert store.renew(lease, "under way", Figures(overhead=0.25, gap=0.1))
    view = store.view("a", "one")
    assert (view.state, view.message, view.figures.overhead) == ("running", "under way", 0.25)
    assert store.finish(lease, None, b"answer")
    assert (state(store), store.record("a")) == ("done", b"answer")
    times = [store.redis.ttl(f"coop-plan:job:a{part}") for part in (":record", "")]
    assert 0 < times[0] <= module.RECORD_SECONDS < times[1] <= module.FINISHED_SECONDS
    assert store.sizes() == (0, 0)
    assert store.redis.exists("coop-plan:job:a:body") == 0
    assert begin(store) == "new"
    assert store.record("a") == b""
    assert store.view("nobody's") is None


def test_versions_grow_with_every_change_and_only_then(store):
    begin(store)
    versions = [store.view("a").version]
    lease = store.lease("a")
    for message in ("one", "one", "two"):
        store.renew(lease, message, Figures())
        versions.append(store.view("a").version)
    store.finish(lease, Reply(problem="time-limit"))
    versions.append(store.view("a").version)
    assert versions == sorted(versions)
    assert len(set(versions)) == 4
    begin(store)
    assert store.view("a").version > versions[-1]


def test_the_job_of_a_dead_worker_is_taken_up_and_the_dead_one_changes_nothing(store):
    begin(store)
    dead = store.lease("a")
    assert not store.view("a").resend
    expire(store)
    view = store.view("a")
    assert (view.state, view.resend) == ("queued", True)
    alive = store.lease("a")
    assert alive.token > dead.token
    assert not store.renew(dead, "I live", Figures())
    assert not store.finish(dead, None, b"stale")
    assert not store.release(dead, counts=True)
    assert state(store) == "running"
    assert store.finish(alive, None, b"fresh")
    assert not store.finish(dead, None, b"stale")
    assert store.record("a") == b"fresh"


def test_a_lease_that_ran_out_is_renewed_where_nobody_has_taken_over(store):
    """As after a restart of Redis that took long."""
    begin(store)
    lease = store.lease("a")
    expire(store)
    assert store.renew(lease, "", Figures())
    assert store.lease("a") is None
    expire(store)
    assert store.lease("a").token > lease.token


def test_a_job_that_ends_its_workers_fails_after_some(store):
    begin(store)
    for _ in range(module.DELIVERIES):
        assert store.release(store.lease("a"), counts=True)
    assert store.lease("a") is None
    view = store.view("a")
    assert (view.state, view.problem.problem) == ("failed", "too-much-work")


def test_handing_back_at_the_end_of_a_worker_costs_no_delivery(store):
    begin(store)
    for _ in range(2 * module.DELIVERIES):
        assert store.release(store.lease("a"), counts=False)
    assert store.lease("a") is not None


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_a_job_ends_with_the_last_who_waits_unless_it_is_wanted(store, wanted, running):
    begin(store, who="one")
    begin(store, who="two")
    lease = store.lease("a") if running else None
    if wanted:
        assert store.detach("a")
    store.unsubscribe("a", "one")
    assert state(store) != "cancelled"
    store.unsubscribe("a", "two")
    assert (state(store) == "cancelled") != wanted
    if lease is not None:
        assert store.renew(lease, "", Figures()) == wanted


@pytest.mark.parametrize("running", [False, True])
def test_a_job_of_servers_that_died_is_given_up(store, running):
    begin(store)
    lease = store.lease("a") if running else None
    leave_behind(store)
    if lease is not None:
        assert not store.renew(lease, "", Figures())
    else:
        assert store.lease("a") is None
    assert state(store) == "cancelled"


def test_who_comes_back_goes_on_waiting(store):
    begin(store)
    leave_behind(store)
    store.view("a", "another server")
    assert store.lease("a") is not None


def test_cancelling(store):
    begin(store)
    lease = store.lease("a")
    store.cancel("a")
    assert (state(store), store.view("a").problem.problem) == ("cancelled", "cancelled")
    assert not store.renew(lease, "", Figures())
    assert not store.finish(lease, None, b"late")
    assert begin(store) == "new"
    assert store.lease("a").token > lease.token


def test_too_many_that_wait_are_refused_those_that_run_do_not_count(store):
    assert [begin(store, job) for job in "ab"] == ["new", "new"]
    assert begin(store, "c", most=2) == "full"
    assert begin(store, "b", most=2) == "joined"
    store.lease("a")
    assert begin(store, "c", most=2) == "new"


def test_a_job_that_nobody_takes_up_is_sent_again_ever_more_seldom(store):
    begin(store)
    sent = []
    for seconds in (4, 6, 6, 11, 11, 21):
        past = int(store.redis.hget("coop-plan:job:a", "published")) - 1000 * seconds
        store.redis.hset("coop-plan:job:a", "published", past)
        sent.append(store.view("a").resend)
    assert sent == [False, True, False, True, False, True]


@pytest.mark.parametrize("seed", range(5))
def test_a_job_whose_graph_was_lost_keeps_its_place(store, seed):
    """A plan store that restarts empty does not put those who waited longest behind the others.

    With another problem, the next request for the job waits behind those that came before it.
    """
    draw = random.Random(seed)
    jobs = [f"job{n}" for n in range(8)]

    def queue(names):
        for name in names:
            assert begin(store, name) == "new"
            time.sleep(0.002)  # the queue is ordered by ms

    queue(jobs)
    ends = {name: draw.choice(["unknown-graph", "time-limit"]) for name in jobs}
    for _ in jobs:
        lease = store.lease("any")
        assert store.finish(lease, Reply(problem=ends[lease.job_id]))
    again = [*jobs, "new"]
    draw.shuffle(again)
    queue(again)
    lost = [name for name in jobs if ends[name] == "unknown-graph"]
    others = [name for name in again if name not in lost]
    assert [store.lease("any").job_id for _ in again] == lost + others


def test_an_answer_that_is_not_of_ours_is_none(store):
    begin(store)
    store.finish(store.lease("a"), None, b"answer")
    record = store.redis.get("coop-plan:job:a:record")
    assert store.record("a") == b"answer"
    store.redis.set("coop-plan:job:a:record", record[:-1] + b"!")
    assert store.record("a") == b""
    store.redis.set("coop-plan:job:b:record", record)
    assert store.record("b") == b""
