"""Jobs: one solve a question, a bounded queue, and a process that is gone when nobody waits."""

import asyncio
import threading
import time

import pytest

from coop_plan.api.jobs import process_pool
from coop_plan.api.jobs.jobs import Jobs
from coop_plan.api.jobs.local_executor import LocalExecutor
from coop_plan.api.jobs.process_pool import WorkerLostError
from coop_plan.api.jobs.request_handler import Figures, ProblemError, Reply


class FakeWorker:
    def __init__(self):
        self.killed = threading.Event()

    def kill(self):
        self.killed.set()


class FakePool:
    """Calls that last until they are let go, or until their worker is killed."""

    def __init__(self):
        self.go = threading.Event()
        self.calls, self.workers = [], []

    def call(self, task, body, *, seconds, on_progress, on_start):
        worker = FakeWorker()
        self.calls.append((body, seconds))
        self.workers.append(worker)
        on_start(worker)
        on_progress(Reply(detail="under way", figures=Figures(0.5, overhead=0.25), final=False))
        while not self.go.is_set():
            if worker.killed.wait(0.01):
                raise WorkerLostError(late=False)
        if body == b"late":
            raise WorkerLostError(late=True)
        return Reply(found=True), b"record"

    def close(self):
        self.go.set()


def asked(key, costs="", seconds=None):
    return Reply(key=key, costs=costs, seconds=seconds)


def run(scenario):
    async def all_of_it():
        pool = FakePool()
        executor = LocalExecutor(pool, solvers=1, queue=1)
        jobs = Jobs(executor, secret=b"secret", seconds=7.0)
        try:
            await asyncio.wait_for(scenario(jobs, pool), 60)
        finally:
            await jobs.close()

    asyncio.run(all_of_it())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_identical_questions_are_one_solve():
    async def scenario(jobs, pool):
        first = jobs.join(asked("a"), b"body")
        assert all(jobs.join(asked("a"), b"body") is first for _ in range(99))
        assert jobs.join(asked("a"), b"body", "others") is not first
        pool.go.set()
        await until(lambda: not jobs._running)
        assert (first.state, first.record) == ("done", b"record")
        assert first.document().plan == "/plans/a"
        assert await jobs.get(first.id) is first
        assert jobs.join(asked("a"), b"body") is not first

    run(scenario)


def test_the_time_limit_of_a_question_is_that_of_its_process():
    async def scenario(jobs, pool):
        jobs.join(asked("a"), b"")
        jobs.join(asked("b", seconds=2.0), b"late")
        pool.go.set()
        await until(lambda: len(pool.calls) == 2 and not jobs._running)
        assert sorted(seconds for _, seconds in pool.calls) == [32.0, 37.0]

    run(scenario)


def test_a_solve_that_is_late_ends_with_its_time_limit():
    async def scenario(jobs, pool):
        job = jobs.join(asked("a"), b"late")
        pool.go.set()
        await until(lambda: job.finished)
        assert (job.state, job.problem.problem) == ("failed", "time-limit")

    run(scenario)


def test_a_full_queue_is_refused_with_a_time_to_retry():
    async def scenario(jobs, pool):
        running = jobs.join(asked("a"), b"")
        await until(lambda: running.state == "running")
        jobs.join(asked("b"), b"")
        with pytest.raises(ProblemError) as full:
            jobs.join(asked("c"), b"")
        assert full.value.name == "busy"
        assert full.value.members["retry_after"] > 0
        assert jobs.join(asked("b"), b"").state == "queued"

    run(scenario)


@pytest.mark.parametrize("queued", [False, True])
def test_a_job_is_cancelled_when_the_last_client_leaves(queued):
    async def scenario(jobs, pool):
        other = jobs.join(asked("other"), b"") if queued else None
        if queued:
            await until(lambda: other.state == "running")
        job = jobs.join(asked("a"), b"")
        assert jobs.join(asked("a"), b"") is job
        if not queued:
            await until(lambda: pool.workers)
        jobs.unsubscribe(job)
        assert not job.finished
        jobs.unsubscribe(job)
        assert job.state == "cancelled"
        await until(lambda: job.task.done())
        assert len(pool.calls) == 1
        assert pool.workers[0].killed.is_set() != queued

    run(scenario)


def test_a_job_whose_address_was_given_goes_on_until_it_is_cancelled():
    async def scenario(jobs, pool):
        job = jobs.join(asked("a"), b"")
        await until(lambda: pool.workers)
        await jobs.detach(job)
        jobs.unsubscribe(job)
        assert not job.finished
        await jobs.cancel(job)
        await until(lambda: job.ended is not None)
        assert pool.workers[0].killed.is_set()

    run(scenario)


def test_events_have_every_change_and_resume():
    async def scenario(jobs, pool):
        job = jobs.join(asked("a"), b"")
        seen = []
        async for event in jobs.events(job, -1):
            seen.append(event)
            if "under way" in event.raw_data:
                assert '"overhead":0.25' in event.raw_data
                pool.go.set()
        assert seen[-1].event == "done"
        numbers = [int(event.id) for event in seen]
        assert numbers == sorted(set(numbers))
        again = [event async for event in jobs.events(job, numbers[-1])]
        assert len(again) == 1
        assert time.monotonic() > job.started

    run(scenario)


def test_a_process_whose_call_failed_midway_answers_no_other_call(monkeypatch):
    """Half a message may be in its socket."""
    made = []

    class Process(FakeWorker):
        def __init__(self, settings):
            super().__init__()
            made.append(self)

        @property
        def ended(self):
            return self.killed.is_set()

        def call(self, task, body, record, seconds, on_progress):
            memoryview(body)
            return Reply(), b""

    monkeypatch.setattr(process_pool, "WorkerProcess", Process)
    pool = process_pool.ProcessPool(None, 1)
    pool.call(None, b"", seconds=1.0)
    with pytest.raises(TypeError):
        pool.call(None, None, seconds=1.0)
    pool.call(None, b"", seconds=1.0)
    assert [process.ended for process in made] == [True, False]
