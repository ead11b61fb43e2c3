"""Servers of a cluster: their jobs are on one board in a real Redis; the worker is played."""

import asyncio
import contextlib

import pytest

from coop_plan.api.cluster import executor as module
from coop_plan.api.cluster.celery_queue import QUEUE
from coop_plan.api.cluster.executor import ClusterBench
from coop_plan.api.cluster.job_store import Board
from coop_plan.api.jobs.jobs import Jobs
from coop_plan.api.jobs.request_handler import Figures, Reply
from coop_plan.api.service.problems import ProblemError
from tests.redis_server import needs_redis, redis_server

pytestmark = needs_redis

SECRET = b"secret"


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def run(redis):
    """Run a scenario with two servers and the board."""

    def call(scenario, queue=9):
        async def all_of_it():
            board = Board(redis.address, SECRET)
            board.redis.flushdb()
            benches = [
                ClusterBench(redis.address, SECRET, queue=queue, seconds=7.0) for _ in range(2)
            ]
            servers = [Jobs(bench, secret=SECRET, seconds=7.0) for bench in benches]
            try:
                await asyncio.wait_for(scenario(board, *servers), 100)
            finally:
                for server in servers:
                    await server.close()
                board.close()

        asyncio.run(all_of_it())

    return call


def asked(key="k" * 64):
    return Reply(key=key, seconds=3.0)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


async def claimed(board, job):
    """What a worker takes up."""
    while (claim := await asyncio.to_thread(board.claim, job.id)) is None:
        await asyncio.sleep(0.01)
    return claim


def test_two_servers_have_one_job_and_one_message(run):
    async def scenario(board, one, two):
        jobs = [server.join(asked(), b"body", "gzip") for server in (one, one, two)]
        assert jobs[0] is jobs[1]
        assert jobs[0].id == jobs[2].id
        claim = await claimed(board, jobs[0])
        assert (claim.body, claim.work.task.encoding, claim.work.seconds) == (b"body", "gzip", 3.0)
        board.renew(claim, "under way", Figures(overhead=0.5, bound=0.25, gap=0.2))
        await until(lambda: all(job.figures.gap == 0.2 for job in jobs))
        assert jobs[2].document()["bound"] == 0.25
        assert jobs[2].state == "running"
        board.finish(claim, None, b"answer")
        await until(lambda: all(job.over for job in jobs))
        assert {(job.state, job.record) for job in jobs} == {("done", b"answer")}
        assert board.redis.llen(f"coop-plan:{QUEUE}") == 1

    run(scenario)


def test_a_job_is_known_to_the_server_that_was_not_asked(run):
    async def scenario(board, one, two):
        job = one.join(asked(), b"body", "")
        await one.want(job)
        mirror = await two.get(job.id)
        assert await two.get(job.id) is mirror
        seen = []

        async def follow():
            async for event in two.follow(mirror, -1):
                seen.append(event)  # noqa: PERF401 - seen from outside while it grows

        following = asyncio.create_task(follow())
        claim = await claimed(board, job)
        await until(lambda: any(b"event: running" in event for event in seen))
        board.renew(claim, "news", Figures(overhead=0.125))
        await until(lambda: any(b'"overhead":0.125' in event for event in seen))
        await two.cancel(mirror)
        assert mirror.state == "cancelled"
        await following
        assert b"event: cancelled" in seen[-1]
        await until(lambda: job.over)
        assert job.problem.problem == "cancelled"
        assert not board.renew(claim, "", Figures())
        with pytest.raises(ProblemError):
            await two.get("0" * 32)

    run(scenario)


def test_a_job_goes_on_while_somebody_waits_anywhere(run):
    async def scenario(board, one, two):
        first, second = (server.join(asked(), b"body", "") for server in (one, two))
        claim = await claimed(board, first)
        await until(lambda: board.redis.zcard(f"coop-plan:job:{first.id}:waiting") == 2)
        one.leave(first)
        await until(lambda: board.redis.zcard(f"coop-plan:job:{first.id}:waiting") == 1)
        assert board.renew(claim, "", Figures())
        two.leave(second)
        await until(lambda: not board.renew(claim, "", Figures()))
        assert board.look(first.id).state == "cancelled"

    run(scenario)


def test_who_leaves_does_not_take_along_who_has_just_come(run):
    async def scenario(board, one, two):
        job = one.join(asked(), b"body", "")
        claim = await claimed(board, job)
        one.leave(job)
        again = one.join(asked(), b"body", "")
        assert again is not job
        waiting, who = f"coop-plan:job:{job.id}:waiting", one._bench._who(again)
        await until(lambda: board.redis.zrange(waiting, 0, -1) == [who.encode()])
        if not board.renew(claim, "", Figures()):  # it had left before it came
            claim = await claimed(board, again)
        board.finish(claim, None, b"answer")
        await until(lambda: again.over)
        assert again.state == "done"

    run(scenario)


def test_a_job_that_redis_forgot_is_put_there_again(run):
    async def scenario(board, one, two):
        job = one.join(asked(), b"body", "")
        await claimed(board, job)
        board.redis.flushdb()
        claim = await claimed(board, job)
        assert claim.body == b"body"
        board.finish(claim, None, b"answer")
        await until(lambda: job.over)
        assert job.record == b"answer"

    run(scenario)


def test_a_search_needs_no_body(run):
    async def scenario(board, one, two):
        job = one.search("k" * 64, 5.0)
        claim = await claimed(board, job)
        assert (claim.body, claim.work.task.do, claim.work.task.seconds) == (b"", "improve", 5.0)
        assert two.search("k" * 64, 5.0).id == job.id

    run(scenario)


def test_too_many_that_wait(run):
    async def scenario(board, one, two):
        first = one.join(asked("a"), b"body", "")
        await until(lambda: board.sizes() == (1, 0))
        assert await two._bench.queued() == 1
        job = two.join(asked("b"), b"body", "")
        await until(lambda: job.over)
        assert (job.problem.problem, job.problem.members["retry_after"] > 0) == ("busy", True)
        assert two.join(asked("a"), b"body", "").id == first.id
        await claimed(board, first)
        assert not two.join(asked("b"), b"body", "").over

    run(scenario, queue=1)


def test_a_problem_reaches_all_who_wait(run):
    async def scenario(board, one, two):
        jobs = [server.join(asked(), b"body", "") for server in (one, two)]
        await asyncio.gather(one.want(jobs[0]), two.want(jobs[1]))  # who comes later asks anew
        board.finish(await claimed(board, jobs[0]), Reply(problem="time-limit", detail="late"))
        await until(lambda: all(job.over for job in jobs))
        assert [job.problem.problem for job in jobs] == ["time-limit"] * 2

    run(scenario)


def test_a_broker_that_stays_away_ends_a_job_with_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "AWAY_SECONDS", 0.0)
    monkeypatch.setattr("coop_plan.planner.plan_cache.redis_store.WAIT_SECONDS", 0.2)

    async def scenario(server):
        bench = ClusterBench(server.address, SECRET, queue=9, seconds=7.0)
        jobs = Jobs(bench, secret=SECRET, seconds=7.0)
        with contextlib.suppress(ProblemError):
            job = jobs.join(asked(), b"body", "")
            await bench.check()
            server.process.kill()
            await until(lambda: job.over)
            assert job.problem.problem == "busy"
            with pytest.raises(ProblemError):
                await bench.check()
            with pytest.raises(ProblemError):
                await jobs.get("0" * 32)
            await jobs.close()
            return
        raise AssertionError("the broker was there")

    with redis_server(tmp_path) as server:
        asyncio.run(asyncio.wait_for(scenario(server), 100))
