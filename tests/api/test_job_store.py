"""The jobs of a cluster in a real Redis: one solve a question, leases, fencing."""

import pytest

from coop_plan.api.cluster import job_store as module
from coop_plan.api.cluster.job_store import Board
from coop_plan.api.jobs.request_handler import Figures, Reply
from coop_plan.api.jobs.worker_process import Task, Work
from tests.redis_server import needs_redis, redis_server

pytestmark = needs_redis

WORK = Work(key="k" * 64, task=Task("solve", "gzip"), seconds=7.0)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.address


@pytest.fixture
def board(address):
    made = Board(address, b"secret")
    made.redis.flushdb()
    yield made
    made.close()


def begin(board, job="a", who="server", most=9):
    return board.begin(job, who, WORK, b"body", most)


def expire(board, job="a"):
    """As if the worker had not been heard of for long."""
    board.redis.hset(f"coop-plan:job:{job}", "lease", 1)


def leave_behind(board, job="a"):
    """As if no server had been heard of for long."""
    waiting = f"coop-plan:job:{job}:waiting"
    for who in board.redis.zrange(waiting, 0, -1):
        board.redis.zadd(waiting, {who: 1})


def state(board, job="a"):
    return board.look(job).state


def test_one_job_a_question_and_its_answer_for_all(board):
    assert [begin(board, who=who) for who in ("one", "two", "one")] == ["new", "joined", "joined"]
    assert board.sizes() == (1, 0)
    claim = board.claim("a")
    assert (claim.work, claim.body) == (WORK, b"body")
    assert board.claim("a") is None
    assert board.sizes() == (0, 1)
    assert board.renew(claim, "under way", Figures(overhead=0.25, gap=0.1))
    view = board.look("a", "one")
    assert (view.state, view.message, view.figures.overhead) == ("running", "under way", 0.25)
    assert board.finish(claim, None, b"answer")
    assert (state(board), board.record("a")) == ("done", b"answer")
    times = [board.redis.ttl(f"coop-plan:job:a{part}") for part in (":record", "")]
    assert 0 < times[0] <= module.RECORD_SECONDS < times[1] <= module.KEPT_SECONDS
    assert board.sizes() == (0, 0)
    assert board.redis.exists("coop-plan:job:a:body") == 0
    assert begin(board) == "new"
    assert board.record("a") == b""
    assert board.look("nobody's") is None


def test_versions_grow_with_every_change_and_only_then(board):
    begin(board)
    versions = [board.look("a").version]
    claim = board.claim("a")
    for message in ("one", "one", "two"):
        board.renew(claim, message, Figures())
        versions.append(board.look("a").version)
    board.finish(claim, Reply(problem="time-limit"))
    versions.append(board.look("a").version)
    assert versions == sorted(versions)
    assert len(set(versions)) == 4
    begin(board)
    assert board.look("a").version > versions[-1]


def test_the_job_of_a_dead_worker_is_taken_up_and_the_dead_one_changes_nothing(board):
    begin(board)
    dead = board.claim("a")
    assert not board.look("a").publish
    expire(board)
    view = board.look("a")
    assert (view.state, view.publish) == ("queued", True)
    alive = board.claim("a")
    assert alive.token > dead.token
    assert not board.renew(dead, "I live", Figures())
    assert not board.finish(dead, None, b"stale")
    assert not board.hand_back(dead, counts=True)
    assert state(board) == "running"
    assert board.finish(alive, None, b"fresh")
    assert not board.finish(dead, None, b"stale")
    assert board.record("a") == b"fresh"


def test_a_lease_that_ran_out_is_renewed_where_nobody_has_taken_over(board):
    """As after a restart of Redis that took long."""
    begin(board)
    claim = board.claim("a")
    expire(board)
    assert board.renew(claim, "", Figures())
    assert board.claim("a") is None
    expire(board)
    assert board.claim("a").token > claim.token


def test_a_job_that_ends_its_workers_fails_after_some(board):
    begin(board)
    for _ in range(module.DELIVERIES):
        assert board.hand_back(board.claim("a"), counts=True)
    assert board.claim("a") is None
    view = board.look("a")
    assert (view.state, view.problem.problem) == ("failed", "too-much-work")


def test_handing_back_at_the_end_of_a_worker_costs_no_delivery(board):
    begin(board)
    for _ in range(2 * module.DELIVERIES):
        assert board.hand_back(board.claim("a"), counts=False)
    assert board.claim("a") is not None


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_a_job_ends_with_the_last_who_waits_unless_it_is_wanted(board, wanted, running):
    begin(board, who="one")
    begin(board, who="two")
    claim = board.claim("a") if running else None
    if wanted:
        assert board.want("a")
    board.leave("a", "one")
    assert state(board) != "cancelled"
    board.leave("a", "two")
    assert (state(board) == "cancelled") != wanted
    if claim is not None:
        assert board.renew(claim, "", Figures()) == wanted


@pytest.mark.parametrize("running", [False, True])
def test_a_job_of_servers_that_died_is_given_up(board, running):
    begin(board)
    claim = board.claim("a") if running else None
    leave_behind(board)
    if claim is not None:
        assert not board.renew(claim, "", Figures())
    else:
        assert board.claim("a") is None
    assert state(board) == "cancelled"


def test_who_comes_back_goes_on_waiting(board):
    begin(board)
    leave_behind(board)
    board.look("a", "another server")
    assert board.claim("a") is not None


def test_cancelling(board):
    begin(board)
    claim = board.claim("a")
    board.cancel("a")
    assert (state(board), board.look("a").problem.problem) == ("cancelled", "cancelled")
    assert not board.renew(claim, "", Figures())
    assert not board.finish(claim, None, b"late")
    assert begin(board) == "new"
    assert board.claim("a").token > claim.token


def test_too_many_that_wait_are_refused_those_that_run_do_not_count(board):
    assert [begin(board, job) for job in "ab"] == ["new", "new"]
    assert begin(board, "c", most=2) == "full"
    assert begin(board, "b", most=2) == "joined"
    board.claim("a")
    assert begin(board, "c", most=2) == "new"


def test_a_job_that_nobody_takes_up_is_sent_again_ever_more_seldom(board):
    begin(board)
    sent = []
    for seconds in (4, 6, 6, 11, 11, 21):
        past = int(board.redis.hget("coop-plan:job:a", "published")) - 1000 * seconds
        board.redis.hset("coop-plan:job:a", "published", past)
        sent.append(board.look("a").publish)
    assert sent == [False, True, False, True, False, True]


def test_an_answer_that_is_not_of_ours_is_none(board):
    begin(board)
    board.finish(board.claim("a"), None, b"answer")
    record = board.redis.get("coop-plan:job:a:record")
    assert board.record("a") == b"answer"
    board.redis.set("coop-plan:job:a:record", record[:-1] + b"!")
    assert board.record("a") == b""
    board.redis.set("coop-plan:job:b:record", record)
    assert board.record("b") == b""
