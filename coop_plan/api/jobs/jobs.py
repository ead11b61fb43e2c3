"""Solves under way: one a question, however many ask; they can be followed and cancelled."""

import asyncio
import hashlib
import hmac
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from coop_plan.api.jobs.request_handler import Figures, Reply
from coop_plan.api.service.problems import ProblemError
from coop_plan.api.jobs.worker_process import Task, Work

KEPT_JOBS = 1000
"""Jobs that ended and can still be asked for."""

HEARTBEAT_SECONDS = 15.0

RETRY_SECONDS = 2
"""When whoever was told a job's address may look again."""


@dataclass(eq=False)
class Job:
    """
    One solve. `state` is "queued", "running", "done", "failed" or "cancelled".

    `waiting` counts the clients that wait for it; one that was told its address may come back for
    it (`wanted`). `record` is the answer as it was stored. Times are `time.monotonic`'s.
    """

    id: str
    began: float = field(default_factory=time.monotonic)
    plan: str = ""
    """The key of its answer."""
    state: str = "queued"
    message: str = ""
    figures: Figures = field(default_factory=Figures)
    waiting: int = 0
    wanted: bool = False
    record: bytes = b""
    problem: Reply | None = None
    ended: float | None = None
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
            **msgspec.to_builtins(self.figures),
            "plan": f"/plans/{self.plan}" if self.state == "done" else None,
        }
        if self.problem is not None:
            told["problem"] = {"name": self.problem.problem, "detail": self.problem.detail}
        return told

    def tell(self, version: int | None = None) -> None:
        """Wake whoever follows the job."""
        self.version = self.version + 1 if version is None else version
        self.changed.set()
        self.changed = asyncio.Event()

    def end(self, state: str, problem: Reply | None = None) -> None:
        """Nothing more will happen."""
        if not self.over:
            self.state, self.problem, self.ended = state, problem, time.monotonic()
            self.tell()


class Bench(Protocol):
    """Where jobs are worked on: in processes of this server's, or somewhere in a cluster."""

    def admit(self, running: int) -> None:
        """Raise `ProblemError` where one job more than those would be too many."""

    async def work(self, job: Job, work: Work, body: bytes) -> None:
        """Have the job done, and keep it up to date until it is over."""

    async def want(self, job: Job) -> None:
        """Let a job go on though nobody waits."""

    def abandon(self, job: Job) -> None:
        """Nobody waits here any more."""

    async def cancel(self, job: Job) -> None:
        """End a job."""

    async def find(self, job_id: str) -> Job | None:
        """A job that this server does not know of, kept up to date from now on."""

    async def queued(self) -> int:
        """How many jobs wait for somebody who does them; raises `ProblemError`."""

    async def check(self) -> None:
        """Raise `ProblemError` where no job can be done."""

    async def close(self) -> None:
        """Stop working."""


class Jobs:
    """
    Joins those who ask one question, and keeps jobs. To be used from one event loop.

    A job's id is made of its question and `secret`: servers that share the secret agree on it, and
    nobody guesses it. `solved` is told the state, the seconds and the gap of one that is over.
    """

    def __init__(
        self,
        bench: Bench,
        *,
        secret: bytes,
        seconds: float,
        solved: Callable[[str, float, float | None], None] | None = None,
    ) -> None:
        self._bench, self._secret, self._seconds = bench, secret, seconds
        self._solved = solved
        self._running: dict[str, Job] = {}
        self._all: OrderedDict[str, Job] = OrderedDict()

    async def get(self, job_id: str) -> Job:
        """The job of an id; raises `ProblemError`."""
        job = self._all.get(job_id)
        if job is None or job.over:
            found = await self._bench.find(job_id)
            if found is not None:
                self._keep(found)
                return found
        if job is None:
            raise ProblemError("not-found", "no such job (any more)")
        return job

    def join(self, asked: Reply, body: bytes, encoding: str) -> Job:
        """
        The job that solves what was asked: the one that is under way, or a new one.

        Raises:
            ProblemError: too many wait already.
        """
        task = Task("solve", encoding, another=bool(asked.costs))
        seconds = self._seconds if asked.seconds is None else asked.seconds
        work = Work(key=asked.key, task=task, seconds=seconds)
        return self._start(f"{asked.key} {asked.costs}", work, body)

    def search(self, key: str, seconds: float) -> Job:
        """
        A job that looks for a better plan than the kept one of a key.

        Raises:
            ProblemError: too many wait already.
        """
        seconds = min(seconds, self._seconds)
        task = Task("improve", key=key, seconds=seconds)
        return self._start(f"{key} better", Work(key=key, task=task, seconds=seconds), b"")

    def states(self) -> Counter[str]:
        """How many jobs that are not over are in which state."""
        return Counter(job.state for job in self._running.values())

    def _start(self, question: str, work: Work, body: bytes) -> Job:
        job_id = hmac.new(self._secret, question.encode(), hashlib.sha256).hexdigest()[:32]
        job = self._running.get(job_id)
        if job is None or job.over:
            self._bench.admit(len(self._running))
            last = self._all.get(job_id)
            job = Job(job_id, plan=work.key, version=0 if last is None else last.version + 1)
            self._running[job_id] = job
            self._keep(job)
            job.task = asyncio.create_task(self._bench.work(job, work, body))
            job.task.add_done_callback(lambda _: self._end(job))
        job.waiting += 1
        return job

    async def want(self, job: Job) -> None:
        """Somebody is told a job's address: it goes on though nobody waits."""
        job.wanted = True
        await self._bench.want(job)

    def leave(self, job: Job, *, back: bool = False) -> None:
        """A client waits no longer; a job that nobody wants is given up, unless it comes `back`."""
        job.waiting -= 1
        if not (job.waiting or job.wanted or job.over or back):
            self._bench.abandon(job)

    async def cancel(self, job: Job) -> None:
        """End a job."""
        if not job.over:
            await self._bench.cancel(job)

    def _end(self, job: Job) -> None:
        if self._running.get(job.id) is job:
            del self._running[job.id]
        if job.task is not None and not job.task.cancelled():
            job.task.exception()  # said by the state
        job.end("failed", Reply(problem="internal-error", detail="the solve could not be run"))
        if self._solved is not None and job.ended is not None:
            self._solved(job.state, job.ended - job.began, job.figures.gap)

    def _keep(self, job: Job) -> None:
        self._all[job.id] = job
        self._all.move_to_end(job.id)
        while len(self._all) > KEPT_JOBS + len(self._running):
            for oldest in list(self._all.values()):
                if oldest.over:
                    del self._all[oldest.id]
                    break
            else:
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
        """Stop working."""
        await self._bench.close()
