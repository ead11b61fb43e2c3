"""Job runner of a worker on a real Redis; the solving process is simulated."""

import threading

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from coop_plan.api.cluster import job_runner as module
from coop_plan.api.cluster.job_runner import JobRunner
from coop_plan.api.cluster.redis_job_store import JobStore
from coop_plan.api.jobs.process_pool import GRACE_SECONDS, WorkerLostError
from coop_plan.api.jobs.request_handler import Figures, Reply
from coop_plan.api.jobs.worker_process import JobRequest, WorkerRequest
from tests.api.test_jobs import FakeWorker
from tests.redis_server import needs_redis, redis_server

pytestmark = needs_redis

WORK = JobRequest(key="k" * 64, task=WorkerRequest("solve"), seconds=7.0)


class FakePool:
    """Does what `does` says while a solve is under way, until its worker is killed."""

    def __init__(self, does=lambda: True):
        self.does, self.calls, self.worker = does, [], FakeWorker()

    def call(self, task, body, *, seconds, on_progress, on_start):
        self.calls.append((task, body, seconds))
        on_start(self.worker)
        on_progress(Reply(detail="under way", figures=Figures(overhead=0.5), final=False))
        while not self.does():
            if self.worker.killed.wait(0.01):
                raise WorkerLostError(late=False)
        return Reply(key=WORK.key, found=True), b"record"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.address


@pytest.fixture
def store(address, monkeypatch):
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.02)
    made = JobStore(address, b"secret")
    made.redis.flushdb()
    made.submit("a", "server", WORK, b"body", 9)
    yield made
    made.close()


def do(store, pool, stopping=lambda: False):
    sent = []
    JobRunner(store, pool, sent.append, stopping).run("a")
    return sent, store.view("a")


def test_a_job_is_done_and_done_once(store):
    pool = FakePool()
    sent, view = do(store, pool)
    assert (view.state, store.record("a"), sent) == ("done", b"record", [])
    assert pool.calls == [(WORK.task, b"body", 7.0 + GRACE_SECONDS)]
    do(store, pool)
    assert len(pool.calls) == 1


def test_progress_reaches_the_store(store):
    pool = FakePool(lambda: store.view("a").message == "under way")
    assert do(store, pool)[1].state == "done"


def test_a_cancelled_job_has_no_process(store):
    def cancel():
        store.cancel("a")
        return False

    pool = FakePool(cancel)
    sent, view = do(store, pool)
    assert pool.worker.killed.is_set()
    assert (sent, view.state) == ([], "cancelled")


def test_who_lost_a_job_to_another_leaves_it_alone(store):
    taken = []

    def another_takes_over():
        if not taken:
            store.redis.hset("coop-plan:job:a", "lease", 1)
            taken.append(store.lease("a"))
        return False

    pool = FakePool(another_takes_over)
    sent, view = do(store, pool)
    assert pool.worker.killed.is_set()
    assert (sent, view.state) == ([], "running")
    assert store.finish(taken[0], None, b"theirs")


def test_an_answer_that_comes_too_late_is_not_kept(store):
    taken = []

    def another_ends_it():
        store.redis.hset("coop-plan:job:a", "lease", 1)
        taken.append(store.lease("a"))
        store.finish(taken[0], None, b"theirs")
        return True

    do(store, FakePool(another_ends_it))
    assert store.record("a") == b"theirs"


def test_at_the_end_of_a_worker_its_job_is_handed_back(store):
    stopping = threading.Event()

    def leave():
        stopping.set()
        return False

    pool = FakePool(leave)
    sent, view = do(store, pool, stopping.is_set)
    assert pool.worker.killed.is_set()
    assert (sent, view.state) == (["a"], "queued")
    assert do(store, FakePool())[1].state == "done"


def test_a_job_whose_process_ends_runs_three_times_in_all(store):
    for attempt in range(4):
        pool = FakePool()
        pool.worker.killed.set()
        pool.does = lambda: False
        sent, view = do(store, pool)
        assert sent == (["a"] if attempt < 3 else [])
    assert (view.state, view.problem.problem) == ("failed", "too-much-work")
    assert not pool.calls


@pytest.mark.parametrize("by", ["its own limit", "celery's"])
def test_a_solve_that_is_late_ends_with_its_time_limit(store, by):
    class LatePool(FakePool):
        def call(self, *arguments, **named):
            raise WorkerLostError(late=True)

    if by == "its own limit":
        pool, renew = LatePool(), store.renew
    else:
        pool = FakePool(lambda: False)

        def renew(*_):
            raise SoftTimeLimitExceeded

        store.renew = renew
    view = do(store, pool)[1]
    assert (view.state, view.problem.problem) == ("failed", "time-limit")
    assert pool.worker.killed.is_set() == (by == "celery's")


def test_a_problem_is_the_answer(store):
    class Refusing(FakePool):
        def call(self, *arguments, **named):
            return Reply(problem="too-much-work", detail="more memory"), b""

    view = do(store, Refusing())[1]
    assert (view.state, view.problem.detail) == ("failed", "more memory")
