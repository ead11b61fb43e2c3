"""A server's side of a cluster: jobs are put on the board, sent to the workers and watched."""

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

from coop_plan.api.jobs.request_handler import Reply
from coop_plan.api.cluster.job_store import Board, View
from coop_plan.api.cluster.celery_queue import Messages
from coop_plan.api.jobs.jobs import Job
from coop_plan.api.service.problems import ProblemError
from coop_plan.api.jobs.worker_process import Work

T = TypeVar("T")

AWAY_SECONDS = 60.0
"""How long a broker that does not answer is waited for: it may be restarting."""

LOOK_SECONDS = 1.0
"""How often a job is looked at of which nothing is heard."""

PAUSE_SECONDS = 0.5

CLOSE_SECONDS = 2.0

THREADS = 8

FULL = Reply(problem="busy", detail="too many plans wait to be made", members={"retry_after": 5})
AWAY = Reply(
    problem="busy", detail="the broker of the cluster does not answer", members={"retry_after": 10}
)

log = logging.getLogger("coop_plan.cluster")


class ClusterBench:
    """
    Jobs that the workers of a cluster do, whichever server they were asked of.

    What a server waits for it keeps by heart: a job that the broker forgets is put there again. To
    be used from one event loop; Redis is asked in threads.
    """

    def __init__(self, address: str, secret: bytes, *, queue: int, seconds: float) -> None:
        self._board = Board(address, secret)
        self._messages = Messages(address, seconds)
        self._queue = queue
        self._name = secrets.token_hex(8)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="board")
        self._entered: dict[Job, asyncio.Event] = {}
        self._stirred: dict[str, set[asyncio.Event]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._closed = threading.Event()
        self._listener = threading.Thread(
            target=self._listen, args=[asyncio.get_running_loop()], daemon=True, name="news"
        )
        self._listener.start()

    def admit(self, running: int) -> None:
        """The board says whether too many wait."""

    async def work(self, job: Job, work: Work, body: bytes) -> None:
        """Have the cluster do the job, and keep it up to date until it is over."""
        entered = self._entered[job] = asyncio.Event()
        try:
            await self._enter(job, work, body)
            entered.set()
            while not job.over:
                await self._watch(job, self._who(job))
                if not job.over:  # the broker lost it
                    await self._enter(job, work, body)
        finally:
            entered.set()
            del self._entered[job]

    async def _enter(self, job: Job, work: Work, body: bytes) -> None:
        who = self._who(job)
        how = await self._insist(
            job, lambda: self._board.begin(job.id, who, work, body, self._queue)
        )
        if how == "full":
            job.end("failed", FULL)
        elif how == "new":
            await self._send(job)

    async def _send(self, job: Job) -> None:
        await self._insist(job, lambda: self._messages.send(job.id))

    async def _watch(self, job: Job, who: str) -> None:
        """Keep a job up to date until it is over or the board does not know it."""
        stirred = asyncio.Event()
        self._stirred.setdefault(job.id, set()).add(stirred)
        try:
            while not job.over:
                stirred.clear()
                view = await self._insist(job, lambda: self._board.look(job.id, who))
                if view is None:
                    return
                if view.publish:
                    await self._send(job)
                await self._take(job, view)
                if not job.over:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_SECONDS):
                            await stirred.wait()
        finally:
            self._stirred[job.id].discard(stirred)
            if not self._stirred[job.id]:
                del self._stirred[job.id]

    async def _take(self, job: Job, view: View) -> None:
        """Bring a job up to date."""
        job.began = time.monotonic() - view.elapsed_seconds
        job.plan, job.message, job.figures = view.key, view.message, view.figures
        if view.state == "done" and job in self._entered:  # somebody here waits for it
            job.record = await self._insist(job, lambda: self._board.record(job.id)) or b""
        if job.over:
            return
        if view.state in ("done", "failed", "cancelled"):
            job.end(view.state, view.problem)
        elif (job.state, job.version) != (view.state, view.version):
            job.state = view.state
            job.tell(view.version)

    async def _insist(self, job: Job, call: Callable[[], T]) -> T | None:
        """What the broker says; a job ends with a problem where it stays away."""
        until = time.monotonic() + AWAY_SECONDS
        while not job.over:
            try:
                return await self._in_thread(call)
            except (redis.RedisError, OSError) as error:
                log.warning("broker: %s", error)
                if time.monotonic() > until or isinstance(error, redis.ResponseError):
                    job.end("failed", AWAY)
                await asyncio.sleep(PAUSE_SECONDS)
        return None

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def _ask(self, call: Callable[[], T]) -> T:
        """What the broker says; raises `ProblemError` where that is nothing."""
        try:
            return await self._in_thread(call)
        except (redis.RedisError, OSError):
            raise ProblemError(AWAY.problem, AWAY.detail, **AWAY.members) from None

    async def want(self, job: Job) -> None:
        """Let a job go on though nobody waits."""
        if job not in self._entered:
            await asyncio.sleep(0)  # its task begins
        entered = self._entered.get(job)
        if entered is not None:
            await entered.wait()
        if not job.over:
            await self._ask(lambda: self._board.want(job.id))

    def abandon(self, job: Job) -> None:
        """Nobody waits here any more; others may."""
        job.end("cancelled", Reply(problem="cancelled", detail="nobody waits here any more"))
        if job.task is not None:
            job.task.cancel()
        leaving = asyncio.create_task(self._leave(job))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _leave(self, job: Job) -> None:
        with contextlib.suppress(ProblemError):  # then it is forgotten after a while
            await self._ask(lambda: self._board.leave(job.id, self._who(job)))

    async def cancel(self, job: Job) -> None:
        """End a job, wherever it is worked on."""
        await self._ask(lambda: self._board.cancel(job.id))
        view = await self._ask(lambda: self._board.look(job.id))
        if view is not None:
            await self._take(job, view)

    async def find(self, job_id: str) -> Job | None:
        """A job that another server was asked for, kept up to date from now on."""
        view = await self._ask(lambda: self._board.look(job_id))
        if view is None:
            return None
        job = Job(job_id)
        await self._take(job, view)
        if not job.over:
            job.task = asyncio.create_task(self._mirror(job))
        return job

    async def _mirror(self, job: Job) -> None:
        await self._watch(job, "")
        job.end("failed", Reply(problem="not-found", detail="the job is not known any more"))

    async def queued(self) -> int:
        """How many jobs no worker of the cluster has taken up."""
        return (await self._ask(self._board.sizes))[0]

    async def check(self) -> None:
        """Raise `ProblemError` where the broker does not answer."""
        await self._ask(self._board.ping)

    def _who(self, job: Job) -> str:
        # One who leaves must not take along who has just come for the same job.
        return f"{self._name}:{id(job)}"

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stir those who watch a job of which there is news."""
        while not self._closed.is_set():
            try:
                for job_id in self._board.news():
                    if self._closed.is_set():
                        return
                    if job_id:
                        loop.call_soon_threadsafe(self._stir, job_id)
            except (redis.RedisError, OSError, ValueError):  # its connection may be closed by us
                self._closed.wait(PAUSE_SECONDS)
            except RuntimeError:  # the loop is closed
                return

    def _stir(self, job_id: str) -> None:
        for stirred in self._stirred.get(job_id, ()):
            stirred.set()

    async def close(self) -> None:
        """
        Leave the jobs to the cluster.

        Clients that waited for them ask another server; those that nobody asks for are given up.
        """
        self._closed.set()
        await asyncio.to_thread(self._listener.join, CLOSE_SECONDS)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._board.close()
        self._messages.close()
