"""Where requests are answered: from the store, or by one solve however many ask at once."""

import asyncio
import contextlib
import functools
import logging
import os
import sqlite3
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import msgspec
from fastapi import Request

from coop_plan.api.service.auth import Caller
from coop_plan.api.jobs.request_handler import Limits, Reply
from coop_plan.api.service.response_cache import AtHand, name_of
from coop_plan.api.service.host_check import LOOPBACK
from coop_plan.api.jobs.background_improver import SEARCH_SECONDS, Improver
from coop_plan.api.jobs.jobs import Bench, Job, Jobs
from coop_plan.api.service.metrics import Metrics
from coop_plan.api.service.problems import ProblemError
from coop_plan.api.jobs.local_executor import LocalBench
from coop_plan.api.service.tokens import Tokens
from coop_plan.api.jobs.worker_process import Settings, Task
from coop_plan.api.jobs.process_pool import Pool, WorkerLostError
from coop_plan.planner.plan_cache.open_store import open_store

LOOK_SECONDS = 60.0
"""How long reading a request and looking for its answer may take."""

log = logging.getLogger("coop_plan.service")


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """
    What a service is started with.

    `solvers` plans are made at once, each in a process of `solver_memory` bytes, `queue` more may
    wait; `readers` processes of `reader_memory` bytes read requests and look for answers. Records
    at the address `store` are sealed with `secret`. With a `broker`, the address of a Redis, plans
    are made by the workers of a cluster, where `queue` may wait. Without `tokens` anybody may ask.
    `improve` says whether better plans are looked for while nothing else is to be done.
    """

    store: str
    secret: bytes
    broker: str = ""
    limits: Limits = Limits()
    solvers: int = os.cpu_count() or 1
    readers: int = max(1, (os.cpu_count() or 1) // 2)
    queue: int = 64
    solver_memory: int = 8 << 30
    reader_memory: int = 2 << 30
    store_bytes: int = 1 << 30
    hosts: Collection[str] = LOOPBACK
    tokens: Tokens | None = None
    improve: bool = True

    def worker(self, memory: int, *, solves: bool) -> Settings:
        """The settings of a worker process of so many bytes."""
        return Settings(
            self.store, self.secret, self.limits, memory, self.store_bytes, solves=solves
        )


class Desk:
    """Where requests are answered: from the store, or by one solve however many ask at once."""

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self._metrics = metrics
        self._readers = Pool(service.worker(service.reader_memory, solves=False), service.readers)
        self._threads = ThreadPoolExecutor(service.readers, thread_name_prefix="reader")
        self._store = open_store(service.store, b"")
        self._at_hand = AtHand()
        self.bench: Bench
        if service.broker:
            from coop_plan.api.cluster.executor import ClusterBench

            self.bench = ClusterBench(
                service.broker, service.secret, queue=service.queue, seconds=service.limits.seconds
            )
        else:
            solvers = Pool(service.worker(service.solver_memory, solves=True), service.solvers)
            self.bench = LocalBench(solvers, solvers=service.solvers, queue=service.queue)
        self.jobs = Jobs(
            self.bench,
            secret=service.secret,
            seconds=service.limits.seconds,
            solved=metrics.solved,
        )
        metrics.follow(self.jobs.states)
        self._improver = Improver(self.jobs, self.bench) if service.improve else None

    async def look(self, task: Task, body: bytes = b"", record: bytes = b"") -> tuple[Reply, bytes]:
        """What a reader answers; raises `ProblemError` where that is a problem."""
        call = functools.partial(self._readers.call, task, body, record, seconds=LOOK_SECONDS)
        try:
            reply, data = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except WorkerLostError:
            message = "the request needs more memory or time to read than this server gives it"
            raise ProblemError("too-much-work", message) from None
        if reply.dropped:
            self._metrics.dropped(reply.dropped)
            log.warning("%d records of the plan store were damaged or no answer", reply.dropped)
        _raise(reply)
        return reply, data

    async def _find(self, name: bytes, task: Task, body: bytes = b"") -> tuple[Reply, bytes]:
        """
        What is kept for a question: at hand, if the store still has what it was made of, or found
        by a reader.
        """
        kept = self._at_hand.get(name)
        if kept is not None:
            with contextlib.suppress(OSError, sqlite3.Error):
                if await asyncio.to_thread(self._store.signatures, kept[0].key) == kept[0].seals:
                    self._asked(kept[0])
                    return kept
        reply, data = await self.look(task, body)
        self._at_hand.keep(name, reply, data)
        self._asked(reply)
        return reply, data

    def _asked(self, reply: Reply) -> None:
        if self._improver is not None:
            self._improver.asked(reply)

    async def stored(self, key: str) -> tuple[Reply, bytes]:
        """The kept plan of a key."""
        return await self._find(name_of("stored", key.encode()), Task("stored", key=key))

    async def answer(
        self, request: Request, body: bytes, encoding: str, wait: float, *, provisional: bool
    ) -> tuple[Reply, bytes, Job | None]:
        """
        The reply with its plan; or a job, which is over where it was waited for.

        A job that is not over goes on. Beside it there may be a plan for a smaller budget.
        """
        caller: Caller = request.state.caller
        reply, data = await self._find(name_of(encoding, body), Task("ask", encoding), body)
        caller.check(reply)
        if reply.found:
            return reply, data, None
        reply.seconds = caller.check_seconds(reply.seconds)
        question, packed = body, encoding
        if reply.named:
            (_, question), packed = await self.look(Task("whole", encoding), body), ""
        job = self.jobs.join(reply, question, packed)
        try:
            caller.wait_for(job)
        except ProblemError:
            self.jobs.leave(job)
            raise
        gone = asyncio.create_task(_gone(request))
        back = False
        try:
            async with asyncio.timeout(wait):
                while not job.over:
                    changed = asyncio.create_task(job.changed.wait())
                    both = {changed, gone}
                    try:
                        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        changed.cancel()
                    if gone.done():
                        raise ProblemError("cancelled", "the client left")
        except TimeoutError:
            await self.jobs.want(job)
            if not job.over:
                less = Task("for-less", encoding)
                reply, data = (reply, b"") if not provisional else await self.look(less, body)
                return reply, data, job
        except asyncio.CancelledError:  # this server ends, the job need not
            back = True
            raise ProblemError("busy", "the server ends: ask again", retry_after=1) from None
        finally:
            gone.cancel()
            self.jobs.leave(job, back=back)
        if job.problem is not None:
            _raise(job.problem)
        reply, data = await self.look(Task("ask", encoding, with_record=True), body, job.record)
        if not reply.found:
            raise ProblemError("busy", "the plan was made and is not there", retry_after=1)
        self._asked(reply)
        return reply, data, job

    async def better(self, caller: Caller, key: str, overhead: float) -> tuple[bytes, Job | None]:
        """The kept plan if it has less overhead; else a job that looks for one, if any."""
        reply, data = await self.stored(key)
        if reply.figures.overhead is not None and reply.figures.overhead < overhead:
            return data, None
        if reply.settled:
            return b"", None
        seconds = min(SEARCH_SECONDS, caller.limits.seconds or SEARCH_SECONDS)
        job = self.jobs.search(key, seconds)
        try:
            caller.wait_for(job)
            await self.jobs.want(job)
        finally:
            self.jobs.leave(job)
        if job.problem is not None:
            _raise(job.problem)
        return b"", job

    async def check(self) -> None:
        """Raise `ProblemError` where plans cannot be kept or made."""
        await asyncio.to_thread(self._check_store)
        await self.bench.check()

    def _check_store(self) -> None:
        try:
            self._store.check()
        except OSError:
            message = "the plan store cannot be written"
            raise ProblemError("busy", message, retry_after=5) from None

    async def close(self) -> None:
        """End all processes."""
        if self._improver is not None:
            await self._improver.close()
        await self.jobs.close()
        self._readers.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._store.close()


def _raise(reply: Reply) -> None:
    if reply.problem:
        raise ProblemError(reply.problem, reply.detail, **reply.members)


async def _gone(request: Request) -> None:
    """Return when the client has left; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
