"""Better plans by themselves: looked for once, one at a time, and out of everybody's way."""

import asyncio

from coop_plan.api.jobs.background_improver import Improver
from coop_plan.api.jobs.jobs import Jobs
from coop_plan.api.jobs.request_handler import Reply
from coop_plan.api.service.problems import ProblemError


class FakeBench:
    """Work that lasts until `go`; `others` jobs wait beside it."""

    def __init__(self):
        self.go = asyncio.Event()
        self.others, self.away = 0, False
        self.begun, self.abandoned = [], []

    def admit(self, running):
        pass

    async def work(self, job, work, body):
        self.begun.append(work.key)
        job.state = "running"
        await self.go.wait()
        job.end("done")

    def abandon(self, job):
        self.abandoned.append(job.plan)
        job.end("cancelled")
        job.task.cancel()

    async def queued(self):
        if self.away:
            raise ProblemError("busy", "the broker does not answer")
        return self.others


def run(scenario):
    async def all_of_it():
        bench = FakeBench()
        jobs = Jobs(bench, secret=b"secret", seconds=7.0)
        improver = Improver(jobs, bench, pause=0.001, look=0.001)
        try:
            await asyncio.wait_for(scenario(improver, bench, jobs), 60)
        finally:
            await improver.close()

    asyncio.run(all_of_it())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def kept(key, **said):
    return Reply(key=key, found=True, **said)


def test_plans_that_were_asked_for_are_improved_once_the_last_first():
    async def scenario(improver, bench, jobs):
        bench.go.set()
        for reply in (kept("a"), kept("b"), kept("c", settled=True), Reply(key="d"), kept("a")):
            improver.asked(reply)
        await until(lambda: bench.begun == ["a", "b"] and not jobs.states())
        improver.asked(kept("a"))
        improver.asked(kept("e"))
        await until(lambda: bench.begun == ["a", "b", "e"])
        assert bench.abandoned == []

    run(scenario)


def test_a_search_gives_way_and_comes_again():
    async def scenario(improver, bench, jobs):
        improver.asked(kept("a"))
        await until(lambda: jobs.states()["running"] == 1)
        bench.others = 1
        await until(lambda: bench.abandoned == ["a"])
        bench.others, bench.away = 0, True
        assert bench.begun == ["a"]
        bench.away = False
        await until(lambda: bench.begun == ["a", "a"])
        bench.go.set()
        await until(lambda: not jobs.states())
        assert bench.abandoned == ["a"]

    run(scenario)


def test_who_joined_a_search_keeps_it():
    async def scenario(improver, bench, jobs):
        improver.asked(kept("a"))
        await until(lambda: jobs.states()["running"] == 1)
        job = jobs.search("a", 5.0)
        bench.others = 1
        await until(lambda: job.waiting == 1)
        assert (bench.begun, bench.abandoned, job.over) == (["a"], [], False)
        jobs.leave(job)
        assert bench.abandoned == ["a"]

    run(scenario)
