"""Jobs done in processes of this server's own."""

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor

from coop_plan.api.jobs.request_handler import Reply
from coop_plan.api.jobs.jobs import Job
from coop_plan.api.service.problems import ProblemError
from coop_plan.api.jobs.worker_process import Work
from coop_plan.api.jobs.process_pool import GRACE_SECONDS, Pool, Worker, WorkerLostError

CANCELLED = Reply(problem="cancelled", detail="the solve was cancelled")
LATE = Reply(problem="time-limit", detail="no plan within the time limit")
LOST = Reply(problem="too-much-work", detail="the process that planned it ended")


class LocalBench:
    """`solvers` processes of a pool work at once, `queue` more jobs may wait for one."""

    def __init__(self, pool: Pool, *, solvers: int, queue: int) -> None:
        self._pool, self._most = pool, solvers + queue
        self._threads = ThreadPoolExecutor(solvers, thread_name_prefix="solver")
        self._slots = asyncio.Semaphore(solvers)
        self._workers: dict[Job, Worker] = {}
        self._queued = 0

    def admit(self, running: int) -> None:
        """Raise `ProblemError` where one job more than those would be too many."""
        if running >= self._most:
            raise ProblemError("busy", "too many plans wait to be made", retry_after=5)

    async def work(self, job: Job, work: Work, body: bytes) -> None:
        """Have a process do the job."""
        loop = asyncio.get_running_loop()

        def news(reply: Reply) -> None:
            job.message, job.figures = reply.detail, reply.figures
            job.tell()

        def heard(reply: Reply) -> None:  # in a thread
            loop.call_soon_threadsafe(news, reply)

        def taken(worker: Worker) -> None:
            self._workers[job] = worker
            if job.over:
                worker.kill()

        self._queued += 1
        try:
            await self._slots.acquire()
        finally:
            self._queued -= 1
        try:
            if job.over:
                return
            job.state = "running"
            job.tell()
            call = functools.partial(
                self._pool.call,
                work.task,
                body,
                seconds=work.seconds + GRACE_SECONDS,
                say=heard,
                taken=taken,
            )
            try:
                reply, job.record = await loop.run_in_executor(self._threads, call)
            except WorkerLostError as lost:
                reply = LATE if lost.late else LOST
            finally:
                self._workers.pop(job, None)
        finally:
            self._slots.release()
        job.end("failed" if reply.problem else "done", reply if reply.problem else None)

    async def want(self, job: Job) -> None:
        """Nothing more than that it is not abandoned."""

    def abandon(self, job: Job) -> None:
        """End a job; its process is gone at once."""
        job.end("cancelled", CANCELLED)
        worker = self._workers.get(job)
        if worker is not None:
            worker.kill()
        elif job.task is not None:
            job.task.cancel()

    async def cancel(self, job: Job) -> None:
        """End a job; its process is gone at once."""
        self.abandon(job)

    async def find(self, job_id: str) -> Job | None:
        """There are no others."""
        return None

    async def queued(self) -> int:
        """How many jobs wait for a process."""
        return self._queued

    async def check(self) -> None:
        """Processes are started when they are needed."""

    async def close(self) -> None:
        """End all processes and their work."""
        self._pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
