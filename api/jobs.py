"""Solves under way: one a question, however many ask; a limited number, which can be cancelled."""

import asyncio
import functools
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec

from coop_plan.api.answers import Reply
from coop_plan.api.problems import ProblemError
from coop_plan.api.worker import Task
from coop_plan.api.workers import Pool, Worker, WorkerLostError

GRACE_SECONDS = 30.0
"""How long a solve may go on after its time limit before its process is killed."""

KEPT_JOBS = 1000
"""Jobs that ended and can still be asked for."""

HEARTBEAT_SECONDS = 15.0


@dataclass(eq=False)
class Job:
    """
    One solve. `state` is "queued", "running", "done", "failed" or "cancelled".

    `waiting` counts the clients that wait for it; one that was told its address may come back for
    it (`wanted`). `record` is the answer as it was stored.
    """

    id: str
    key: str
    began: float = field(default_factory=time.monotonic)
    state: str = "queued"
    message: str = ""
    fraction: float | None = None
    waiting: int = 0
    wanted: bool = False
    record: bytes = b""
    problem: Reply | None = None
    ended: float | None = None
    worker: Worker | None = None
    task: "asyncio.Task[None] | None" = None
    version: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in ("done", "failed", "cancelled")

    def document(self) -> dict[str, Any]:
        """What `GET /jobs/{id}` says."""
        until = time.monotonic() if self.ended is None else self.ended
        told: dict[str, Any] = {
            "id": self.id,
            "state": self.state,
            "elapsed_seconds": round(until - self.began, 3),
            "message": self.message,
            "fraction": self.fraction,
            "plan": f"/plans/{self.key}" if self.state == "done" else None,
        }
        if self.problem is not None:
            told["problem"] = {"name": self.problem.problem, "detail": self.problem.detail}
        return told

    def tell(self) -> None:
        """Wake whoever follows the job."""
        self.version += 1
        self.changed.set()
        self.changed = asyncio.Event()


class Jobs:
    """
    Starts and keeps jobs. To be used from one event loop.

    `solvers` run at once, `queue` more may wait.
    """

    def __init__(self, pool: Pool, *, solvers: int, queue: int, seconds: float) -> None:
        self._pool, self._seconds = pool, seconds
        self._solvers, self._queue = solvers, queue
        self._threads = ThreadPoolExecutor(solvers, thread_name_prefix="solver")
        self._slots = asyncio.Semaphore(solvers)
        self._running: dict[tuple[str, str], Job] = {}
        self._all: OrderedDict[str, Job] = OrderedDict()

    def get(self, job_id: str) -> Job:
        """The job of an id; raises `ProblemError`."""
        if job_id not in self._all:
            raise ProblemError("not-found", "no such job (any more)")
        return self._all[job_id]

    def join(self, asked: Reply, body: bytes, encoding: str) -> Job:
        """
        The job that solves what was asked: the one that is under way, or a new one.

        Raises:
            ProblemError: too many wait already.
        """
        question = asked.key, asked.costs
        job = self._running.get(question)
        if job is None or job.over:
            if len(self._running) >= self._solvers + self._queue:
                raise ProblemError("busy", "too many plans wait to be made", retry_after=5)
            job = Job(secrets.token_hex(16), asked.key)
            self._running[question] = self._all[job.id] = job
            seconds = self._seconds if asked.seconds is None else asked.seconds
            task = Task("solve", encoding, another=bool(asked.costs))
            work = self._run(job, task, body, seconds + GRACE_SECONDS)
            job.task = asyncio.create_task(work)
            job.task.add_done_callback(lambda _: self._end(question, job))
        job.waiting += 1
        return job

    def leave(self, job: Job) -> None:
        """A client waits no longer; a job that nobody wants is cancelled."""
        job.waiting -= 1
        if not job.waiting and not job.wanted:
            self.cancel(job)

    def cancel(self, job: Job) -> None:
        """End a job; its process is gone at once."""
        if job.over:
            return
        job.state = "cancelled"
        job.problem = Reply(problem="cancelled", detail="the solve was cancelled")
        if job.worker is not None:
            job.worker.kill()
        elif job.task is not None:
            job.task.cancel()

    async def _run(self, job: Job, task: Task, body: bytes, seconds: float) -> None:
        loop = asyncio.get_running_loop()

        def news(reply: Reply) -> None:
            job.message, job.fraction = reply.detail, reply.fraction
            job.tell()

        def heard(reply: Reply) -> None:  # in a thread
            loop.call_soon_threadsafe(news, reply)

        def taken(worker: Worker) -> None:
            job.worker = worker
            if job.state == "cancelled":
                worker.kill()

        async with self._slots:
            if job.over:
                return
            job.state = "running"
            job.tell()
            call = functools.partial(
                self._pool.call,
                task,
                body,
                seconds=seconds,
                say=heard,
                taken=taken,
            )
            try:
                reply, job.record = await loop.run_in_executor(self._threads, call)
            except WorkerLostError as lost:
                if job.state == "cancelled":
                    return
                reply = (
                    Reply(problem="time-limit", detail="no plan within the time limit")
                    if lost.late
                    else Reply(problem="too-much-work", detail="the process that planned it ended")
                )
            finally:
                job.worker = None
        if not job.over:
            job.problem = reply if reply.problem else None
            job.state = "failed" if reply.problem else "done"

    def _end(self, question: tuple[str, str], job: Job) -> None:
        if self._running.get(question) is job:
            del self._running[question]
        if not job.over:
            job.state = "failed"
            job.problem = Reply(problem="internal-error", detail="the solve could not be run")
        if job.task is not None and not job.task.cancelled():
            job.task.exception()  # said by the state
        job.ended = time.monotonic()
        job.tell()
        while len(self._all) > KEPT_JOBS + len(self._running):
            for oldest in list(self._all.values()):
                if oldest.over:
                    del self._all[oldest.id]
                    break

    async def follow(self, job: Job, last: int) -> AsyncIterator[bytes]:
        """Server-sent events: the job's document whenever it has changed since event `last`."""
        while True:
            changed = job.changed
            if job.version > last or job.over:
                last = job.version
                data = msgspec.json.encode(job.document())
                yield b"id: %d\nevent: %b\ndata: %b\n\n" % (last, job.state.encode(), data)
                if job.over:
                    return
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await changed.wait()
            except TimeoutError:
                yield b": still here\n\n"

    async def close(self) -> None:
        """Cancel what is under way."""
        for job in list(self._running.values()):
            self.cancel(job)
        self._pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
