"""What a worker does with a job on a board in a real Redis; the process that solves is played."""

import threading

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from coop_plan.api.cluster import job_runner as module
from coop_plan.api.cluster.job_runner import Hand
from coop_plan.api.cluster.job_store import Board
from coop_plan.api.jobs.process_pool import GRACE_SECONDS, WorkerLostError
from coop_plan.api.jobs.request_handler import Figures, Reply
from coop_plan.api.jobs.worker_process import Task, Work
from tests.api.test_jobs import FakeWorker
from tests.redis_server import needs_redis, redis_server

pytestmark = needs_redis

WORK = Work(key="k" * 64, task=Task("solve"), seconds=7.0)


class FakePool:
    """Does what `does` says while a solve is under way, until its worker is killed."""

    def __init__(self, does=lambda: True):
        self.does, self.calls, self.worker = does, [], FakeWorker()

    def call(self, task, body, *, seconds, say, taken):
        self.calls.append((task, body, seconds))
        taken(self.worker)
        say(Reply(detail="under way", figures=Figures(overhead=0.5), final=False))
        while not self.does():
            if self.worker.killed.wait(0.01):
                raise WorkerLostError(late=False)
        return Reply(key=WORK.key, found=True), b"record"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.address


@pytest.fixture
def board(address, monkeypatch):
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.02)
    made = Board(address, b"secret")
    made.redis.flushdb()
    made.begin("a", "server", WORK, b"body", 9)
    yield made
    made.close()


def do(board, pool, leaving=lambda: False):
    sent = []
    Hand(board, pool, sent.append, leaving).do("a")
    return sent, board.look("a")


def test_a_job_is_done_and_done_once(board):
    pool = FakePool()
    sent, view = do(board, pool)
    assert (view.state, board.record("a"), sent) == ("done", b"record", [])
    assert pool.calls == [(WORK.task, b"body", 7.0 + GRACE_SECONDS)]
    do(board, pool)
    assert len(pool.calls) == 1


def test_news_reach_the_board(board):
    pool = FakePool(lambda: board.look("a").message == "under way")
    assert do(board, pool)[1].state == "done"


def test_a_cancelled_job_has_no_process(board):
    def cancel():
        board.cancel("a")
        return False

    pool = FakePool(cancel)
    sent, view = do(board, pool)
    assert pool.worker.killed.is_set()
    assert (sent, view.state) == ([], "cancelled")


def test_who_lost_a_job_to_another_leaves_it_alone(board):
    taken = []

    def another_takes_over():
        if not taken:
            board.redis.hset("coop-plan:job:a", "lease", 1)
            taken.append(board.claim("a"))
        return False

    pool = FakePool(another_takes_over)
    sent, view = do(board, pool)
    assert pool.worker.killed.is_set()
    assert (sent, view.state) == ([], "running")
    assert board.finish(taken[0], None, b"theirs")


def test_an_answer_that_comes_too_late_is_not_kept(board):
    taken = []

    def another_ends_it():
        board.redis.hset("coop-plan:job:a", "lease", 1)
        taken.append(board.claim("a"))
        board.finish(taken[0], None, b"theirs")
        return True

    do(board, FakePool(another_ends_it))
    assert board.record("a") == b"theirs"


def test_at_the_end_of_a_worker_its_job_is_handed_back(board):
    leaving = threading.Event()

    def leave():
        leaving.set()
        return False

    pool = FakePool(leave)
    sent, view = do(board, pool, leaving.is_set)
    assert pool.worker.killed.is_set()
    assert (sent, view.state) == (["a"], "queued")
    assert do(board, FakePool())[1].state == "done"


def test_a_process_that_ends_is_tried_elsewhere_three_times_in_all(board):
    for attempt in range(4):
        pool = FakePool()
        pool.worker.killed.set()
        pool.does = lambda: False
        sent, view = do(board, pool)
        assert sent == (["a"] if attempt < 3 else [])
    assert (view.state, view.problem.problem) == ("failed", "too-much-work")
    assert not pool.calls


@pytest.mark.parametrize("by", ["its own limit", "celery's"])
def test_a_solve_that_is_late_ends_with_its_time_limit(board, by):
    class LatePool(FakePool):
        def call(self, *arguments, **named):
            raise WorkerLostError(late=True)

    if by == "its own limit":
        pool, renew = LatePool(), board.renew
    else:
        pool = FakePool(lambda: False)

        def renew(*_):
            raise SoftTimeLimitExceeded

        board.renew = renew
    view = do(board, pool)[1]
    assert (view.state, view.problem.problem) == ("failed", "time-limit")
    assert pool.worker.killed.is_set() == (by == "celery's")


def test_a_problem_is_the_answer(board):
    class Refusing(FakePool):
        def call(self, *arguments, **named):
            return Reply(problem="too-much-work", detail="more memory"), b""

    view = do(board, Refusing())[1]
    assert (view.state, view.problem.detail) == ("failed", "more memory")
