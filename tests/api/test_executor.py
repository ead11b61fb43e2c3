"""Servers of a cluster with one job store in a real Redis; the worker is simulated."""

import asyncio
import contextlib

import pytest

from coop_plan.api.cluster import executor as module
from coop_plan.api.cluster.celery_queue import QUEUE
from coop_plan.api.cluster.executor import ClusterExecutor
from coop_plan.api.cluster.redis_job_store import JobStore
from coop_plan.api.jobs.jobs import Jobs
from coop_plan.api.jobs.request_handler import Figures, ProblemError, Reply
from tests.redis_server import needs_redis, redis_server

pytestmark = needs_redis

SECRET = b"secret"


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def run(redis):
    """Run a scenario with two servers and the store."""

    def call(scenario, queue=9):
        async def all_of_it():
            store = JobStore(redis.address, SECRET)
            store.redis.flushdb()
            executors = [
                ClusterExecutor(redis.address, SECRET, queue=queue, seconds=7.0) for _ in range(2)
            ]
            servers = [Jobs(executor, secret=SECRET, seconds=7.0) for executor in executors]
            try:
                await asyncio.wait_for(scenario(store, *servers), 100)
            finally:
                for server in servers:
                    await server.close()
                store.close()

        asyncio.run(all_of_it())

    return call


def asked(key="k" * 64):
    return Reply(key=key, seconds=3.0)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


async def leased(store, job):
    """The lease of a worker."""
    while (lease := await asyncio.to_thread(store.lease, job.id)) is None:
        await asyncio.sleep(0.01)
    return lease


def test_two_servers_have_one_job_and_one_message(run):
    async def scenario(store, one, two):
        jobs = [server.join(asked(), b"body") for server in (one, one, two)]
        assert jobs[0] is jobs[1]
        assert jobs[0].id == jobs[2].id
        lease = await leased(store, jobs[0])
        assert (lease.body, lease.request.task.encoding, lease.request.seconds) == (
            b"body",
            "",
            3.0,
        )
        store.renew(lease, "under way", Figures(overhead=0.5, bound=0.25, gap=0.2))
        await until(lambda: all(job.figures.gap == 0.2 for job in jobs))
        assert jobs[2].document().bound == 0.25
        assert jobs[2].state == "running"
        store.finish(lease, None, b"answer")
        await until(lambda: all(job.finished for job in jobs))
        assert {(job.state, job.record) for job in jobs} == {("done", b"answer")}
        assert store.redis.llen(f"coop-plan:{QUEUE}") == 1

    run(scenario)


def test_a_job_is_known_to_the_server_that_was_not_asked(run):
    async def scenario(store, one, two):
        job = one.join(asked(), b"body")
        await one.detach(job)
        mirror = await two.get(job.id)
        assert await two.get(job.id) is mirror
        seen = []

        async def follow():
            async for event in two.events(mirror, -1):
                seen.append(event)  # noqa: PERF401 - seen from outside while it grows

        following = asyncio.create_task(follow())
        lease = await leased(store, job)
        await until(lambda: any(event.event == "running" for event in seen))
        store.renew(lease, "news", Figures(overhead=0.125))
        await until(lambda: any('"overhead":0.125' in event.raw_data for event in seen))
        await two.cancel(mirror)
        assert mirror.state == "cancelled"
        await following
        assert seen[-1].event == "cancelled"
        await until(lambda: job.finished)
        assert job.problem.problem == "cancelled"
        assert not store.renew(lease, "", Figures())
        with pytest.raises(ProblemError):
            await two.get("0" * 32)

    run(scenario)


def test_a_job_goes_on_while_somebody_waits_anywhere(run):
    async def scenario(store, one, two):
        first, second = (server.join(asked(), b"body") for server in (one, two))
        lease = await leased(store, first)
        await until(lambda: store.redis.zcard(f"coop-plan:job:{first.id}:waiting") == 2)
        one.unsubscribe(first)
        await until(lambda: store.redis.zcard(f"coop-plan:job:{first.id}:waiting") == 1)
        assert store.renew(lease, "", Figures())
        two.unsubscribe(second)
        await until(lambda: not store.renew(lease, "", Figures()))
        assert store.view(first.id).state == "cancelled"

    run(scenario)


def test_who_leaves_does_not_take_along_who_has_just_come(run):
    async def scenario(store, one, two):
        job = one.join(asked(), b"body")
        lease = await leased(store, job)
        one.unsubscribe(job)
        again = one.join(asked(), b"body")
        assert again is not job
        waiting, who = f"coop-plan:job:{job.id}:waiting", one._executor._server_of(again)
        await until(lambda: store.redis.zrange(waiting, 0, -1) == [who.encode()])
        if not store.renew(lease, "", Figures()):  # it had left before it came
            lease = await leased(store, again)
        store.finish(lease, None, b"answer")
        await until(lambda: again.finished)
        assert again.state == "done"

    run(scenario)


def test_a_job_that_redis_forgot_is_put_there_again(run):
    async def scenario(store, one, two):
        job = one.join(asked(), b"body")
        await leased(store, job)
        store.redis.flushdb()
        lease = await leased(store, job)
        assert lease.body == b"body"
        store.finish(lease, None, b"answer")
        await until(lambda: job.finished)
        assert job.record == b"answer"

    run(scenario)


def test_a_job_whose_address_a_client_has_runs_on_after_redis_forgot_it(run):
    async def scenario(store, one, two):
        job = one.join(asked(), b"body")
        await one.detach(job)
        store.redis.flushdb()
        name = f"coop-plan:job:{job.id}"
        await until(lambda: store.redis.hget(name, "wanted") == b"1")
        assert (await leased(store, job)).body == b"body"

    run(scenario)


def test_clients_get_their_answers_while_others_write_into_the_table(run):
    """What belongs to no job is dropped; a changed job is submitted again by its server."""

    async def scenario(store, one, two):
        jobs = [server.join(asked(f"{n}"), b"%d" % n) for n in range(4) for server in (one, two)]
        junk = [
            lambda: store.redis.zadd("coop-plan:queued", {b"\xff": 0, "none": 1e300}),
            lambda: store.redis.set("coop-plan:served", "x"),
            lambda: store.redis.hset("coop-plan:served", "", "x"),
            lambda: store.redis.set("coop-plan:leases", "x"),
            lambda: store.redis.delete("coop-plan:queued"),
            *(
                lambda job=job: store.redis.hset(f"coop-plan:job:{job.id}", "deliveries", "x")
                for job in jobs[::3]
            ),
        ]
        for spoil in junk:
            spoil()
            await asyncio.sleep(0.02)
        while not all(job.finished for job in jobs):
            lease = await asyncio.to_thread(store.lease, jobs[0].id)
            if lease is not None:
                store.finish(lease, None, b"answer " + lease.body)
            await asyncio.sleep(0.01)
        answers = [job.record for job in jobs]
        assert answers == [b"answer %d" % n for n in range(4) for _ in range(2)]

    run(scenario)


def test_a_search_needs_no_body(run):
    async def scenario(store, one, two):
        job = one.search("k" * 64, "", 5.0)
        lease = await leased(store, job)
        assert (lease.body, lease.request.task.do, lease.request.task.seconds) == (
            b"",
            "improve",
            5.0,
        )
        assert two.search("k" * 64, "", 5.0).id == job.id

    run(scenario)


def test_too_many_that_wait(run):
    async def scenario(store, one, two):
        first = one.join(asked("a"), b"body")
        await until(lambda: store.sizes() == (1, 0))
        assert await two._executor.queued() == 1
        job = two.join(asked("b"), b"body")
        await until(lambda: job.finished)
        assert (job.problem.problem, job.problem.members["retry_after"] > 0) == ("busy", True)
        assert two.join(asked("a"), b"body").id == first.id
        await leased(store, first)
        assert not two.join(asked("b"), b"body").finished

    run(scenario, queue=1)


def test_a_problem_reaches_all_who_wait(run):
    async def scenario(store, one, two):
        jobs = [server.join(asked(), b"body") for server in (one, two)]
        await asyncio.gather(one.detach(jobs[0]), two.detach(jobs[1]))  # who comes later asks anew
        store.finish(await leased(store, jobs[0]), Reply(problem="time-limit", detail="late"))
        await until(lambda: all(job.finished for job in jobs))
        assert [job.problem.problem for job in jobs] == ["time-limit"] * 2

    run(scenario)


def test_a_broker_that_stays_away_ends_a_job_with_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "AWAY_SECONDS", 0.0)
    monkeypatch.setattr("coop_plan.planner.plan_cache.redis_store.WAIT_SECONDS", 0.2)

    async def scenario(server):
        executor = ClusterExecutor(server.address, SECRET, queue=9, seconds=7.0)
        jobs = Jobs(executor, secret=SECRET, seconds=7.0)
        with contextlib.suppress(ProblemError):
            job = jobs.join(asked(), b"body")
            await executor.check()
            server.process.kill()
            await until(lambda: job.finished)
            assert job.problem.problem == "busy"
            with pytest.raises(ProblemError):
                await executor.check()
            with pytest.raises(ProblemError):
                await jobs.get("0" * 32)
            await jobs.close()
            return
        raise AssertionError("the broker was there")

    with redis_server(tmp_path) as server:
        asyncio.run(asyncio.wait_for(scenario(server), 100))
