"""Fair queueing: one caller's jobs do not keep out those of another, and none is lost."""

import asyncio

import pytest

from coop_plan.api.cluster.redis_job_store import JobStore
from coop_plan.api.jobs.jobs import Jobs
from coop_plan.api.jobs.local_executor import FairSlots, LocalExecutor
from coop_plan.api.jobs.request_handler import ProblemError, Reply
from coop_plan.api.jobs.worker_process import JobRequest, WorkerRequest
from tests.api.test_jobs import FakePool
from tests.redis_server import needs_redis, redis_server


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_free_place_is_for_whoever_has_the_fewest(size):
    async def scenario():
        slots, order = FairSlots(size), []
        ends = asyncio.Queue()

        async def job(caller):
            await slots.acquire(caller)
            order.append(caller)
            await ends.get()
            slots.release(caller)

        tasks = [asyncio.create_task(job("greedy")) for _ in range(20)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(job(caller)) for caller in "abab"]
        gone = asyncio.create_task(job("gone"))
        await asyncio.sleep(0)
        gone.cancel()
        for n in range(24):
            ends.put_nowait(n)
            for _ in range(5):
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert slots.queued == 0
        assert order[:size] == ["greedy"] * size
        assert sorted(order[size : size + 2]) == ["a", "b"]
        assert order[size : size + 7].count("greedy") <= 3
        assert order.count("greedy") == 20
        await asyncio.wait_for(slots.acquire("last"), 1)

    asyncio.run(scenario())


def test_one_caller_fills_half_of_the_queue():
    async def scenario():
        pool = FakePool()
        jobs = Jobs(LocalExecutor(pool, solvers=2, queue=8), secret=b"s", seconds=7.0)

        def join(key, caller):
            return jobs.join(Reply(key=key), b"", "", caller)

        def fill(caller):
            taken = []
            with pytest.raises(ProblemError) as full:
                for n in range(99):
                    taken += [join(f"{caller}{n}", caller)]
            assert full.value.name == "busy"
            return taken

        counts = [len(fill(caller)) for caller in "abcd"]
        assert counts[0] == 5
        assert all(counts[:3])
        assert sum(counts) <= 10
        pool.go.set()
        while jobs._running:
            await asyncio.sleep(0.01)
        assert len(pool.calls) == sum(counts)
        await jobs.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


@needs_redis
def test_workers_of_a_cluster_serve_callers_in_turn(tmp_path):
    def work(key):
        return JobRequest(key=key, task=WorkerRequest("solve"), seconds=1.0)

    with redis_server(tmp_path) as redis:
        store = JobStore(redis.address, b"secret")
        taken = [store.submit(f"g{n}", "s", work("k"), b"", 20, "greedy") for n in range(15)]
        assert taken == ["new"] * 10 + ["full"] * 5
        for name in ("a0", "a1", "b0"):
            assert store.submit(name, "s", work("k"), b"", 20, name[0]) == "new"
        leases = [store.lease("g0") for _ in range(4)]
        assert sorted(lease.job_id for lease in leases) == ["a0", "b0", "g0", "g1"]
        done = []
        while leases:
            lease = leases.pop(0)
            assert store.finish(lease, None, b"x")
            done.append(lease.job_id)
            leases += [more for more in [store.lease("any")] if more]
        assert len(set(done)) == 13
        store.close()
