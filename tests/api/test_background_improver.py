"""Better plans by themselves: looked for once, one at a time, and out of everybody's way."""

import asyncio

from coop_plan.api.jobs.background_improver import BackgroundImprover
from coop_plan.api.jobs.jobs import Jobs
from coop_plan.api.jobs.request_handler import ProblemError, Reply


class FakeExecutor:
    """Work that lasts until `go`; `others` jobs wait beside it."""

    def __init__(self):
        self.go = asyncio.Event()
        self.others, self.away = 0, False
        self.begun, self.cancelled = [], []

    def admit(self, caller, unfinished):
        pass

    async def run(self, job, request, body):
        self.begun.append(request.key)
        job.state = "running"
        await self.go.wait()
        job.finish("done")

    def cancel_if_unwatched(self, job):
        self.cancelled.append(job.plan)
        job.finish("cancelled")
        job.task.cancel()

    async def queued(self):
        if self.away:
            raise ProblemError("busy", "the broker does not answer")
        return self.others


def run(scenario):
    async def all_of_it():
        executor = FakeExecutor()
        jobs = Jobs(executor, secret=b"secret", seconds=7.0)
        improver = BackgroundImprover(jobs, executor, pause=0.001, poll=0.001)
        try:
            await asyncio.wait_for(scenario(improver, executor, jobs), 60)
        finally:
            await improver.close()

    asyncio.run(all_of_it())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def kept(key, **fields):
    return Reply(key=key, found=True, **fields)


def test_plans_that_were_asked_for_are_improved_once_the_last_first():
    async def scenario(improver, executor, jobs):
        executor.go.set()
        for reply in (kept("a"), kept("b"), kept("c", settled=True), Reply(key="d"), kept("a")):
            improver.on_hit(reply)
        await until(lambda: executor.begun == ["a", "b"] and not jobs.states())
        improver.on_hit(kept("a"))
        improver.on_hit(kept("e"))
        await until(lambda: executor.begun == ["a", "b", "e"])
        assert executor.cancelled == []

    run(scenario)


def test_a_search_gives_way_and_comes_again():
    async def scenario(improver, executor, jobs):
        improver.on_hit(kept("a"))
        await until(lambda: jobs.states()["running"] == 1)
        executor.others = 1
        await until(lambda: executor.cancelled == ["a"])
        executor.others, executor.away = 0, True
        assert executor.begun == ["a"]
        executor.away = False
        await until(lambda: executor.begun == ["a", "a"])
        executor.go.set()
        await until(lambda: not jobs.states())
        assert executor.cancelled == ["a"]

    run(scenario)


def test_who_joined_a_search_keeps_it():
    async def scenario(improver, executor, jobs):
        improver.on_hit(kept("a"))
        await until(lambda: jobs.states()["running"] == 1)
        job = jobs.search("a", "", 5.0)
        executor.others = 1
        await until(lambda: job.waiting == 1)
        assert (executor.begun, executor.cancelled, job.finished) == (["a"], [], False)
        jobs.unsubscribe(job)
        assert executor.cancelled == ["a"]

    run(scenario)
