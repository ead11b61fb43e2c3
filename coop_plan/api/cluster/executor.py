"""Job executor of a server in a cluster: submits jobs to the workers and watches them."""

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import redis

from coop_plan.api.cluster.celery_queue import CeleryQueue
from coop_plan.api.cluster.redis_job_store import JobStore, JobView
from coop_plan.api.jobs.jobs import Job, JobExecutor
from coop_plan.api.jobs.request_handler import ProblemError, Reply
from coop_plan.api.jobs.worker_process import JobRequest

T = TypeVar("T")

AWAY_SECONDS = 60.0
"""Time for which calls of a broker that does not answer are repeated: it may be restarting."""

POLL_SECONDS = 1.0
"""Interval at which a job is viewed that sends no change."""

PAUSE_SECONDS = 0.5

CLOSE_SECONDS = 2.0

THREADS = 8

FULL = Reply(
    problem="busy", detail="the queue of plans to be made is full", members={"retry_after": 5}
)
AWAY = Reply(
    problem="busy", detail="the broker of the cluster does not answer", members={"retry_after": 10}
)

log = logging.getLogger("coop_plan.cluster")


class ClusterExecutor(JobExecutor):
    """Runs jobs on the workers of a cluster; identical requests to any server are one job.

    A server submits its job again if the broker lost it. For one event loop; calls of Redis are
    made in threads.
    """

    def __init__(self, address: str, secret: bytes, *, queue: int, seconds: float) -> None:
        self._store = JobStore(address, secret)
        self._queue = CeleryQueue(address, seconds)
        self._max_queued = queue
        self._name = secrets.token_hex(8)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="job-store")
        self._submitted: dict[Job, asyncio.Event] = {}
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._unsubscribing: set[asyncio.Task[None]] = set()
        self._closed = threading.Event()
        self._listener = threading.Thread(
            target=self._listen, args=[asyncio.get_running_loop()], daemon=True, name="job-changes"
        )
        self._listener.start()

    async def run(self, job: Job, request: JobRequest, body: bytes) -> None:
        """Run the job on a worker, and update it until it is finished."""
        submitted = self._submitted[job] = asyncio.Event()
        try:
            await self._submit(job, request, body)
            submitted.set()
            while not job.finished:
                await self._watch(job, self._server_of(job))
                if not job.finished:  # the broker lost it
                    await self._submit(job, request, body)
        finally:
            submitted.set()
            del self._submitted[job]

    async def _submit(self, job: Job, request: JobRequest, body: bytes) -> None:
        server, limit = self._server_of(job), self._max_queued
        result = await self._with_retries(
            job, lambda: self._store.submit(job.id, server, request, body, limit, job.caller)
        )
        if result == "full":
            job.finish("failed", FULL)
        elif result == "new":
            await self._send(job)
            if job.detached:  # the broker lost it
                await self._with_retries(job, lambda: self._store.detach(job.id))

    async def _send(self, job: Job) -> None:
        await self._with_retries(job, lambda: self._queue.send(job.id))

    async def _watch(self, job: Job, server: str) -> None:
        """Update a job until it is finished, or unknown to the job store."""
        changed = asyncio.Event()
        self._watchers.setdefault(job.id, set()).add(changed)
        try:
            while not job.finished:
                changed.clear()
                view = await self._with_retries(job, lambda: self._store.view(job.id, server))
                if view is None:
                    return
                if view.resend:
                    await self._send(job)
                await self._update(job, view)
                if not job.finished:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(POLL_SECONDS):
                            await changed.wait()
        finally:
            self._watchers[job.id].discard(changed)
            if not self._watchers[job.id]:
                del self._watchers[job.id]

    async def _update(self, job: Job, view: JobView) -> None:
        job.started = time.monotonic() - view.elapsed_seconds
        job.plan, job.message, job.figures = view.plan, view.message, view.figures
        if view.state == "done" and job in self._submitted:  # a client of this server waits for it
            job.unkept = True  # only the worker knows
            job.record = await self._with_retries(job, lambda: self._store.record(job.id)) or b""
        if job.finished:
            return
        if view.state in ("done", "failed", "cancelled"):
            job.finish(view.state, view.problem)
        elif (job.state, job.version) != (view.state, view.version):
            job.state = view.state
            job.notify(view.version)

    async def _with_retries(self, job: Job, call: Callable[[], T]) -> T | None:
        """The result of a call of the broker, repeated until it answers or the job fails."""
        until = time.monotonic() + AWAY_SECONDS
        while not job.finished:
            try:
                return await self._in_thread(call)
            except (redis.RedisError, OSError) as error:
                log.warning("broker: %s", error)
                if time.monotonic() > until or isinstance(error, redis.ResponseError):
                    job.finish("failed", AWAY)
                await asyncio.sleep(PAUSE_SECONDS)
        return None

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def _once(self, call: Callable[[], T]) -> T:
        """The result of a call of the broker; raises `ProblemError` if it does not answer."""
        try:
            return await self._in_thread(call)
        except (redis.RedisError, OSError):
            raise ProblemError(AWAY.problem, AWAY.detail, **AWAY.members) from None

    async def detach(self, job: Job) -> None:
        """Keep the job running without waiting clients."""
        if job not in self._submitted:
            await asyncio.sleep(0)  # its task begins
        submitted = self._submitted.get(job)
        if submitted is not None:
            await submitted.wait()
        if not job.finished:
            await self._once(lambda: self._store.detach(job.id))

    def cancel_if_unwatched(self, job: Job) -> None:
        """Unsubscribe this server; the job is cancelled if no other server has clients of it."""
        job.finish("cancelled", Reply(problem="cancelled", detail="the last client here left"))
        if job.task is not None:
            job.task.cancel()
        task = asyncio.create_task(self._unsubscribe(job))
        self._unsubscribing.add(task)
        task.add_done_callback(self._unsubscribing.discard)

    async def _unsubscribe(self, job: Job) -> None:
        with contextlib.suppress(ProblemError):  # then the subscription expires
            await self._once(lambda: self._store.unsubscribe(job.id, self._server_of(job)))

    async def cancel(self, job: Job) -> None:
        """Cancel the job for all its clients, on any server."""
        await self._once(lambda: self._store.cancel(job.id))
        view = await self._once(lambda: self._store.view(job.id))
        if view is not None:
            await self._update(job, view)

    async def find(self, job_id: str) -> Job | None:
        """A job that another server submitted, updated from now on."""
        view = await self._once(lambda: self._store.view(job_id))
        if view is None:
            return None
        job = Job(job_id)
        await self._update(job, view)
        if not job.finished:
            job.task = asyncio.create_task(self._mirror(job))
        return job

    async def _mirror(self, job: Job) -> None:
        await self._watch(job, "")
        job.finish("failed", Reply(problem="not-found", detail="the cluster has lost the job"))

    async def queued(self) -> int:
        """Number of jobs that no worker has leased."""
        return (await self._once(self._store.sizes))[0]

    async def check(self) -> None:
        """Raise `ProblemError` if the broker does not answer."""
        await self._once(self._store.redis.ping)

    def _server_of(self, job: Job) -> str:
        # Unsubscribing a cancelled job must not unsubscribe a new one of the same id.
        return f"{self._name}:{id(job)}"

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the watchers of each job that changes. Runs in a thread."""
        while not self._closed.is_set():
            try:
                for job_id in self._store.changes():
                    if self._closed.is_set():
                        return
                    if job_id:
                        loop.call_soon_threadsafe(self._wake, job_id)
            except (redis.RedisError, OSError, ValueError):  # `close` closes its connection
                self._closed.wait(PAUSE_SECONDS)
            except RuntimeError:  # the loop is closed
                return

    def _wake(self, job_id: str) -> None:
        for changed in self._watchers.get(job_id, ()):
            changed.set()

    async def close(self) -> None:
        """Close the connections; the cluster runs the jobs on.

        Clients may ask another server. A job without clients is cancelled when its subscription
        expires.
        """
        self._closed.set()
        await asyncio.to_thread(self._listener.join, CLOSE_SECONDS)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._store.close()
        self._queue.close()
