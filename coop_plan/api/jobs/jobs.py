"""Jobs: one solve for all identical requests, which clients can watch and cancel."""

import abc
import asyncio
import hashlib
import hmac
import logging
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field

import msgspec
from fastapi.sse import ServerSentEvent
from pydantic import BaseModel, Field

from coop_plan.api.jobs.request_handler import Figures, ProblemError, Reply, State
from coop_plan.api.jobs.worker_process import JobRequest, WorkerRequest
from coop_plan.api.service.request_body import Memory
from coop_plan.planner.plan_cache.store import planner_version

log = logging.getLogger("coop_plan.jobs")

FINISHED_JOBS = 1000
"""Finished jobs that are kept, so that clients can still read them."""

RETRY_SECONDS = 2
"""`Retry-After` of a client that was sent to a job's URL."""


class JobProblem(BaseModel):
    """The problem that a job ended with."""

    name: str
    detail: str


class JobDocument(BaseModel):
    """State of a job: the document of `GET /jobs/{id}`, and of each of its events."""

    id: str
    state: State
    elapsed_seconds: float = Field(description="Since its first request, or until its end")
    message: str = Field(description="Phase of the solve")
    fraction: float | None = Field(description="Share of the solve that is done")
    overhead: float | None = Field(description="Overhead of the best plan so far")
    bound: float | None = Field(description="Lower bound on the overhead")
    gap: float | None = Field(description="Distance of the best plan from the bound")
    plan: str | None = Field(description="Path of the plan, if the job is done")
    problem: JobProblem | None = Field(None, description="Absent if there is none")


@dataclass(eq=False)
class Job:
    """One solve.

    Attributes:
        started: `time.monotonic` of its first request; `ended`, of its end.
        plan: path of its plan below `/plans/`.
        caller: name of the caller that started it.
        waiting: number of clients that wait for it.
        detached: a client has its URL and may read it later, so that it runs without clients.
        record: the answer as it was stored, or `unkept` if the store may not have it; empty when no
            client waits for it, or memory is full.
        counted: bytes of the record that are counted.
    """

    id: str
    started: float = field(default_factory=time.monotonic)
    plan: str = ""
    caller: str = ""
    state: State = "queued"
    message: str = ""
    figures: Figures = field(default_factory=Figures)
    waiting: int = 0
    detached: bool = False
    record: bytes = b""
    counted: int = 0
    unkept: bool = False
    problem: Reply | None = None
    ended: float | None = None
    task: "asyncio.Task[None] | None" = None
    version: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def finished(self) -> bool:
        """True if the state is final."""
        return self.state in ("done", "failed", "cancelled")

    @property
    def seconds(self) -> float:
        """Seconds since its first request, or until its end."""
        return (time.monotonic() if self.ended is None else self.ended) - self.started

    def document(self) -> JobDocument:
        """The job's document; `problem` is set only if there is one."""
        document = JobDocument(
            id=self.id,
            state=self.state,
            elapsed_seconds=round(self.seconds, 3),
            message=self.message,
            **msgspec.structs.asdict(self.figures),
            plan=f"/plans/{self.plan}" if self.state == "done" else None,
        )
        if self.problem is not None:
            document.problem = JobProblem(name=self.problem.problem, detail=self.problem.detail)
        return document

    def notify(self, version: int | None = None) -> None:
        """Wake the coroutines that wait for `changed`."""
        self.version = self.version + 1 if version is None else version
        self.changed.set()
        self.changed = asyncio.Event()

    def finish(self, state: State, problem: Reply | None = None) -> None:
        """Set the final state, unless there is one."""
        if not self.finished:
            self.state, self.problem, self.ended = state, problem, time.monotonic()
            self.notify()


class JobExecutor(abc.ABC):
    """Runs jobs: in processes of this server, or on the workers of a cluster.

    Methods that are not abstract are optional.
    """

    def admit(self, caller: str, unfinished: Collection[Job]) -> None:  # noqa: B027
        """Raise `ProblemError` if the queue is full for a caller; `unfinished` are all jobs."""

    @abc.abstractmethod
    async def run(self, job: Job, request: JobRequest, body: bytes) -> None:
        """Run the job, and update it until it is finished."""

    async def detach(self, job: Job) -> None:  # noqa: B027
        """Keep the job running on other servers, too; this one does not cancel a detached job."""

    @abc.abstractmethod
    def cancel_if_unwatched(self, job: Job) -> None:
        """Cancel the job after the last client of this server left, if no other server has one."""

    async def cancel(self, job: Job) -> None:
        """Cancel the job for all its clients, on any server."""
        self.cancel_if_unwatched(job)

    async def find(self, job_id: str) -> Job | None:
        """A job that another server started, updated from now on."""
        return None

    @abc.abstractmethod
    async def queued(self) -> int:
        """Number of jobs that no process runs yet; raises `ProblemError`."""

    async def check(self) -> None:  # noqa: B027
        """Raise `ProblemError` if no job can run."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Stop running jobs."""


class Jobs:
    """Jobs of this server, one for all identical requests. For one event loop.

    A job's id is an HMAC of its request: servers that share `secret` agree on it, and clients
    cannot guess it. `on_finish` gets each finished job. `memory` counts the bodies of unfinished
    jobs, and the records that finished ones hold until their clients have read them.
    """

    def __init__(
        self,
        executor: JobExecutor,
        *,
        secret: bytes,
        seconds: float,
        memory: Memory | None = None,
        on_finish: Callable[[Job], None] | None = None,
    ) -> None:
        self._executor, self._secret, self._seconds = executor, secret, seconds
        self._memory = memory or Memory(sys.maxsize)
        self._on_finish = on_finish
        self._running: dict[str, Job] = {}
        self._all: OrderedDict[str, Job] = OrderedDict()

    async def get(self, job_id: str) -> Job:
        """The job with this id; raises `ProblemError` if there is none."""
        job = self._all.get(job_id)
        if job is None or job.finished:
            found = await self._executor.find(job_id)
            if found is not None:
                self._keep(found)
                return found
        if job is None:
            raise ProblemError("not-found", f"no job '{job_id[:50]}': it is unknown or too old")
        return job

    def join(self, miss: Reply, body: bytes, costs: str = "", caller: str = "") -> Job:
        """The job for a request without a stored plan: the running one, or a new one.

        `costs` is the reply's `costs` or `cost_class`, to share a solve by.

        Raises:
            ProblemError: the queue is full.
        """
        task = WorkerRequest("solve", version=planner_version())
        seconds = self._seconds if miss.seconds is None else miss.seconds
        request = JobRequest(key=miss.key, costs=miss.costs, task=task, seconds=seconds)
        # A solve with less time is not shared: it may fail where one's own would not.
        return self._start(f"{miss.key} {costs} {seconds:g}", request, body, caller)

    def search(self, key: str, costs: str, seconds: float, caller: str = "") -> Job:
        """The job that searches a better plan than the stored one of a key and costs.

        Raises:
            ProblemError: the queue is full.
        """
        seconds = min(seconds, self._seconds)
        task = WorkerRequest("improve", "", key, costs, seconds=seconds, version=planner_version())
        request = JobRequest(key=key, costs=costs, task=task, seconds=seconds)
        return self._start(f"{key} {costs} better", request, b"", caller)

    def states(self) -> Counter[str]:
        """Number of unfinished jobs by state."""
        return Counter(job.state for job in self._running.values())

    def _start(self, name: str, request: JobRequest, body: bytes, caller: str) -> Job:
        job_id = hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()[:32]
        job = self._running.get(job_id)
        if job is None or job.finished:
            self._executor.admit(caller, self._running.values())
            self._memory.take(len(body))
            last = self._all.get(job_id)
            version = 0 if last is None else last.version + 1
            job = Job(job_id, plan=request.plan, caller=caller, version=version)
            self._running[job_id] = job
            self._keep(job)
            job.task = asyncio.create_task(self._executor.run(job, request, body))
            job.task.add_done_callback(lambda _: self._finished(job, len(body)))
        job.waiting += 1
        return job

    async def detach(self, job: Job) -> None:
        """Keep the job running without waiting clients: one of them got its URL."""
        job.detached = True
        await self._executor.detach(job)

    def unsubscribe(self, job: Job, *, returning: bool = False) -> None:
        """Drop one client; the job is cancelled without any, unless this one is `returning`."""
        job.waiting -= 1
        self._drop_record(job)
        if not (job.waiting or job.detached or job.finished or returning):
            self._executor.cancel_if_unwatched(job)

    async def cancel(self, job: Job) -> None:
        """Cancel the job for all its clients."""
        if not job.finished:
            await self._executor.cancel(job)

    def _drop_record(self, job: Job) -> None:
        """Drop the record of a job that no client waits for; the plan store has it."""
        if job.task is not None and job.task.done() and not job.waiting:
            self._memory.free(job.counted)
            job.record, job.counted = b"", 0

    def _finished(self, job: Job, size: int) -> None:
        self._memory.free(size)
        if self._running.get(job.id) is job:
            del self._running[job.id]
        if job.task is not None and not job.task.cancelled() and (error := job.task.exception()):
            log.error("job %s could not be run", job.id, exc_info=error)
        job.finish("failed", Reply(problem="internal-error", detail="the solve could not be run"))
        if self._on_finish is not None:
            self._on_finish(job)
        try:
            self._memory.take(len(job.record))
            job.counted = len(job.record)
        except ProblemError:  # the clients read the plan store
            job.record = b""
        self._drop_record(job)

    def _keep(self, job: Job) -> None:
        self._all[job.id] = job
        self._all.move_to_end(job.id)
        finished = [old.id for old in self._all.values() if old.finished]
        for old_id in finished[:-FINISHED_JOBS]:
            del self._all[old_id]

    async def events(self, job: Job, last: int) -> AsyncIterator[ServerSentEvent]:
        """Server-sent events: the job's document at each change after event `last`."""
        while True:
            changed = job.changed
            if job.version > last or job.finished:
                last = job.version
                data = job.document().model_dump_json(exclude_unset=True)
                yield ServerSentEvent(id=str(last), event=job.state, raw_data=data)
                if job.finished:
                    return
            await changed.wait()

    async def close(self) -> None:
        """Stop running jobs."""
        await self._executor.close()
