"""Plan service: answers requests from the store, or by one solve for all identical requests."""

import asyncio
import contextlib
import functools
import logging
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import msgspec
from fastapi import Depends, Request
from pydantic import BaseModel, Field

from coop_plan.api.jobs.background_improver import SEARCH_SECONDS, BackgroundImprover
from coop_plan.api.jobs.jobs import Job, JobExecutor, Jobs
from coop_plan.api.jobs.local_executor import LocalExecutor
from coop_plan.api.jobs.process_pool import ProcessPool, WorkerLostError
from coop_plan.api.jobs.request_handler import Limits, ProblemError, Reply
from coop_plan.api.jobs.worker_process import WorkerRequest, WorkerSettings, plan_path
from coop_plan.api.service.auth import Caller
from coop_plan.api.service.host_check import LOOPBACK
from coop_plan.api.service.metrics import Metrics
from coop_plan.api.service.request_body import MAX_BODIES, Body, BodyReader, Memory, Room
from coop_plan.api.service.response_cache import MAX_REQUEST_BYTES, ResponseCache, cache_key
from coop_plan.api.service.tokens import TokenFile
from coop_plan.api.service.unkept_plans import UnkeptPlans
from coop_plan.planner.plan_cache.open_store import open_store

READ_SECONDS = 60.0
"""Limit on parsing a request and finding its answer in the store."""

READS = 2
"""Readers that a request may cost: one may have been killed from outside."""

log = logging.getLogger("coop_plan.service")


class ServiceSettings(BaseModel, arbitrary_types_allowed=True, frozen=True):
    """Settings of a service; printed without addresses and secrets.

    Attributes:
        store: address of the plan store, whose records are signed with `secret`.
        broker: address of a Redis; plans are then made by the workers of its cluster.
        solvers: plans made at once, each in a process of `solver_memory` bytes.
        readers: processes of `reader_memory` bytes that parse requests and find stored plans; one
            of several is for requests of up to `MAX_REQUEST_BYTES`.
        queue: jobs that may wait for a solver or a worker.
        tokens: API tokens; without them no client needs one.
        improve: search better plans while the solvers are idle.
    """

    store: str = Field(repr=False)
    secret: bytes = Field(repr=False)
    broker: str = Field("", repr=False)
    limits: Limits = Limits()
    solvers: int = os.cpu_count() or 1
    readers: int = max(2, (os.cpu_count() or 1) // 2)
    queue: int = 64
    solver_memory: int = 8 << 30
    reader_memory: int = 2 << 30
    store_bytes: int = 1 << 30
    hosts: tuple[str, ...] = LOOPBACK
    tokens: TokenFile | None = None
    improve: bool = True

    def worker(self, memory: int, *, solves: bool) -> WorkerSettings:
        """Settings of a worker process of `memory` bytes."""
        return WorkerSettings(
            self.store, self.secret, self.limits, memory, self.store_bytes, solves=solves
        )


class PlanService:
    """Answers requests from the store, or by one solve for all identical requests."""

    def __init__(
        self, settings: ServiceSettings, metrics: Metrics, memory: Memory | None = None
    ) -> None:
        self.metrics, self.limits = metrics, settings.limits
        memory = memory or Memory(MAX_BODIES * settings.limits.body_bytes)
        self.bodies = BodyReader(settings.limits.body_bytes, memory)
        reader = settings.worker(settings.reader_memory, solves=False)
        self._readers = ProcessPool(reader, settings.readers)
        self._threads = ThreadPoolExecutor(settings.readers, thread_name_prefix="reader")
        self._room = Room(settings.limits.body_bytes, max(1, settings.readers - 1))
        self._store = open_store(settings.store, b"")
        self._responses = ResponseCache()
        self._closing = False
        self.executor: JobExecutor
        queue, seconds = settings.queue, settings.limits.seconds
        if settings.broker:
            from coop_plan.api.cluster.executor import ClusterExecutor

            self.executor = ClusterExecutor(
                settings.broker, settings.secret, queue=queue, seconds=seconds
            )
        else:
            solver = settings.worker(settings.solver_memory, solves=True)
            pool = ProcessPool(solver, settings.solvers)
            self.executor = LocalExecutor(pool, solvers=settings.solvers, queue=queue)
        self._unkept = UnkeptPlans(self._keep)
        self.jobs = Jobs(
            self.executor,
            secret=settings.secret,
            seconds=seconds,
            memory=memory,
            on_finish=self._on_finish,
        )
        metrics.watch_jobs(self.jobs.states)
        self._improver = BackgroundImprover(self.jobs, self.executor) if settings.improve else None

    def _on_finish(self, job: Job) -> None:
        self.metrics.observe_solve(job.state, job.seconds, job.figures.gap)
        if job.unkept:
            self._unkept.add(job.plan.partition("-")[0], job.record)

    async def _keep(self, key: str, record: bytes) -> bool:
        """Store a record, if it is not in the store; False if the store is away."""
        try:
            await self.call_reader(WorkerRequest("keep", key=key, with_record=True), b"", record)
        except ProblemError as problem:
            return problem.name != "busy"
        return True

    async def call_reader(
        self, task: WorkerRequest, body: bytes = b"", record: bytes = b""
    ) -> tuple[Reply, bytes]:
        """The answer of a reader process; raises `ProblemError` if it is a problem."""
        size = len(body) + len(record)
        while True:  # a reader finds out how large a compressed or a named document is
            large = size > MAX_REQUEST_BYTES
            task = msgspec.structs.replace(task, room=max(size, MAX_REQUEST_BYTES))
            async with self._room.take(size) if large else contextlib.nullcontext():
                reply, data = await self._call(task, body, record)
            if reply.problem != "needs-room":
                break
            size = reply.members["bytes"]
        if reply.dropped:
            self.metrics.dropped.inc(reply.dropped)
            log.warning("%d records of the plan store were damaged or no answer", reply.dropped)
        _raise(reply)
        return reply, data

    async def _call(self, task: WorkerRequest, body: bytes, record: bytes) -> tuple[Reply, bytes]:
        call = functools.partial(self._readers.call, task, body, record, seconds=READ_SECONDS)
        run, ended = asyncio.get_running_loop().run_in_executor, 0
        while True:
            try:
                return await run(self._threads, call)
            except WorkerLostError as lost:
                ended += 1
                if lost.late or ended == READS:
                    message = "the request needs more memory or time than a reader has"
                    raise ProblemError("too-much-work", message) from None

    async def _find(
        self, name: bytes, task: WorkerRequest, body: bytes = b""
    ) -> tuple[Reply, bytes]:
        """The stored answer: from the response cache, if its records are unchanged, or read.

        A record that was put back after a better one is no reason to answer worse than before.
        """
        cached = self._responses.get(name)
        if cached is not None:
            read = functools.partial(self._store.signatures, cached[0].key)
            try:  # a thread costs ten times as much as a read of SQLite
                seals = await asyncio.to_thread(read) if self._store.waits else read()
            except (OSError, sqlite3.Error):  # a store that is away does not end hits
                seals = cached[0].seals
            if seals == cached[0].seals:
                self._on_hit(cached[0])
                return cached
        try:
            reply, data = await self.call_reader(task, body)
        except ProblemError as problem:
            if cached is None or problem.name != "budget-infeasible":
                raise
            return cached
        if cached is not None and reply.found and _is_better(cached[0], reply):
            reply, data = msgspec.structs.replace(cached[0], seals=reply.seals), cached[1]
        record = self._unkept.get(reply.key)
        if record and not reply.found:
            task = msgspec.structs.replace(task, with_record=True)
            reply, data = await self.call_reader(task, body, record)
        self._responses.put(name, reply, data)
        self._on_hit(reply)
        return reply, data

    def _on_hit(self, reply: Reply) -> None:
        if self._improver is not None:
            self._improver.on_hit(reply)

    async def stored_plan(self, key: str, costs: str) -> tuple[Reply, bytes]:
        """The stored plan of a key: that for these costs, if given, or the first."""
        task = WorkerRequest("stored-plan", key=key, costs=costs)
        return await self._find(cache_key(task.do, f"{key} {costs}".encode()), task)

    async def answer(
        self, request: Request, body: Body, wait: float, *, provisional: bool
    ) -> tuple[Reply, bytes, Job | None]:
        """The reply with its plan, and the job that made it, if the plan was not stored.

        After `wait` seconds the job runs on, and the reply is not `final`. The plan is then one for
        a smaller budget, if `provisional` and there is one, or empty.
        """
        caller: Caller = request.state.caller
        find = WorkerRequest("find", body.encoding, limits=caller.within(self.limits))
        reply, data = await self._find(cache_key(body.encoding, body.data), find, body.data)
        if reply.found:
            return reply, data, None
        reply.seconds = caller.check_time_limit(reply.seconds)
        body.release()
        asked = data
        until = asyncio.get_running_loop().time() + wait
        disconnected = asyncio.create_task(_disconnected(request))
        try:
            # The plan of a solve that is shared by a class of costs may be no answer to these.
            for costs in filter(None, (reply.cost_class, reply.costs)):
                job = self.jobs.join(reply, asked, costs, caller.name)
                try:
                    if not await self._wait(job, caller, until, disconnected):
                        data = b""
                        if provisional:
                            smaller = WorkerRequest("for-smaller-budget")
                            reply, data = await self.call_reader(smaller, asked)
                        reply.final = False
                        return reply, data, job
                    record = job.record or self._unkept.get(reply.key)
                finally:
                    self.jobs.unsubscribe(job, returning=self._closing)
                own = job.plan == plan_path(reply.key, reply.costs)
                if job.problem is not None:
                    if own or job.problem.problem in ("busy", "cancelled", "unknown-graph"):
                        _raise(job.problem)
                    continue
                find = WorkerRequest("find", with_record=True)
                found, data = await self.call_reader(find, asked, record)
                if found.found:
                    self._on_hit(found)
                    return found, data, job
                if own:
                    break
        finally:
            disconnected.cancel()
        message = "the plan was made and cannot be read: send the request again"
        raise ProblemError("busy", message, retry_after=1)

    async def _wait(
        self, job: Job, caller: Caller, until: float, disconnected: "asyncio.Task[None]"
    ) -> bool:
        """Wait for a joined job until a time of the loop; False if it is not finished then.

        It runs on then, since the client gets its address.
        """
        try:
            caller.count_job(job)
            async with asyncio.timeout_at(until):
                while not job.finished:
                    changed = asyncio.create_task(job.changed.wait())
                    both = {changed, disconnected}
                    try:
                        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        changed.cancel()
                    if disconnected.done():
                        raise ProblemError("cancelled", "the client disconnected")
        except TimeoutError:
            await self.jobs.detach(job)
        except asyncio.CancelledError:  # this server shuts down; in a cluster the job runs on
            self._closing = True
            message = "the server shuts down: send the request again"
            raise ProblemError("busy", message, retry_after=1) from None
        return job.finished

    async def better_plan(
        self, caller: Caller, key: str, costs: str, overhead: float
    ) -> tuple[bytes, Job | None]:
        """The stored plan if its overhead is below `overhead`; else a job that searches one.

        Neither, if the stored plan cannot be improved.
        """
        reply, data = await self.stored_plan(key, costs)
        if reply.figures.overhead is not None and reply.figures.overhead < overhead:
            return data, None
        if reply.settled:
            return b"", None
        seconds = min(SEARCH_SECONDS, caller.limits.seconds or SEARCH_SECONDS)
        job = self.jobs.search(key, reply.costs, seconds, caller.name)
        try:
            caller.count_job(job)
            await self.jobs.detach(job)
        finally:
            self.jobs.unsubscribe(job)
        if job.problem is not None:
            _raise(job.problem)
        return b"", job

    async def check(self) -> None:
        """Raise `ProblemError` if plans cannot be stored or made."""
        try:
            await asyncio.to_thread(self._store.check)
        except OSError:
            message = "the plan store cannot be written"
            raise ProblemError("busy", message, retry_after=5) from None
        await self.executor.check()

    async def close(self) -> None:
        """Kill all processes."""
        if self._improver is not None:
            await self._improver.close()
        await self._unkept.close()
        await self.jobs.close()
        self._readers.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._store.close()


def _is_better(old: Reply, new: Reply) -> bool:
    """True if the old answer to a request is better than the new one, for the same costs."""
    before, now = old.figures.overhead, new.figures.overhead
    return old.costs == new.costs and before is not None and now is not None and before < now


def _raise(reply: Reply) -> None:
    if reply.problem:
        raise ProblemError(reply.problem, reply.detail, **reply.members)


async def _disconnected(request: Request) -> None:
    """Return when the client disconnects, after its body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def running_service(request: Request) -> PlanService:
    """The service of the app; raises `ProblemError` before the app's lifespan began."""
    service: PlanService | None = getattr(request.app.state, "service", None)
    if service is None:
        raise ProblemError("busy", "the server is starting", retry_after=1)
    return service


Service = Annotated[PlanService, Depends(running_service)]
