"""Job executor that solves in processes of this server."""

import asyncio
from collections import Counter, deque
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from coop_plan.api.jobs.jobs import Job, JobExecutor
from coop_plan.api.jobs.process_pool import ProcessPool, Solve, WorkerLostError
from coop_plan.api.jobs.request_handler import ProblemError, Reply
from coop_plan.api.jobs.worker_process import JobRequest

CANCELLED = Reply(problem="cancelled", detail="the solve was cancelled")
LATE = Reply(problem="time-limit", detail="no plan within the time limit")
LOST = Reply(problem="too-much-work", detail="the process that planned it ended")


class FairSlots:
    """Places of running jobs, shared fairly by callers. For one event loop.

    A free place is for the waiting caller that has the fewest; of several, for the one that got
    its last place longest ago. So a caller has at most half of the places soon after another one
    waits.
    """

    def __init__(self, size: int) -> None:
        self._free, self._grants = size, 0
        self._running: Counter[str] = Counter()
        self._granted: dict[str, int] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def queued(self) -> int:
        """Number of jobs that wait."""
        return sum(map(len, self._waiting.values()))

    async def acquire(self, caller: str) -> None:
        """Wait for a place."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(caller)
            else:
                self._leave(caller, turn)
            raise

    def release(self, caller: str) -> None:
        """Free a place."""
        self._free += 1
        self._running[caller] -= 1
        self._grant()

    def _grant(self) -> None:
        while self._free and self._waiting:
            callers = self._waiting
            caller = min(callers, key=lambda c: (self._running[c], self._granted.get(c, 0)))
            turn = callers[caller][0]
            self._leave(caller, turn)
            self._free -= 1
            self._grants += 1
            self._running[caller] += 1
            self._granted[caller] = self._grants
            turn.set_result(None)

    def _leave(self, caller: str, turn: "asyncio.Future[None]") -> None:
        self._waiting[caller].remove(turn)
        if not self._waiting[caller]:
            del self._waiting[caller]


class LocalExecutor(JobExecutor):
    """Runs `solvers` jobs at once, each in a process of `pool`; `queue` more may wait."""

    def __init__(self, pool: ProcessPool, *, solvers: int, queue: int) -> None:
        self._pool, self._max_jobs = pool, solvers + queue
        self._threads = ThreadPoolExecutor(solvers, thread_name_prefix="solver")
        self._slots = FairSlots(solvers)
        self._solves: dict[Job, Solve] = {}

    def admit(self, caller: str, unfinished: Collection[Job]) -> None:
        """Raise `ProblemError` if the queue is full, or the caller's half of what others leave."""
        mine = sum(job.caller == caller for job in unfinished) if caller else 0
        left = self._max_jobs - len(unfinished)
        if left <= 0 or (caller and mine >= (left + mine + 1) // 2):
            raise ProblemError("busy", "the queue of plans to be made is full", retry_after=5)

    async def run(self, job: Job, request: JobRequest, body: bytes) -> None:
        """Run the job in a process of the pool."""
        loop = asyncio.get_running_loop()

        def update(reply: Reply) -> None:
            job.message, job.figures = reply.detail, reply.figures
            job.notify()

        def on_progress(reply: Reply) -> None:  # in a thread
            loop.call_soon_threadsafe(update, reply)

        await self._slots.acquire(job.caller)
        try:
            if job.finished:
                return
            job.state = "running"
            job.notify()
            solve = self._solves[job] = Solve(self._pool, request, body, on_progress)
            try:
                reply, job.record = await loop.run_in_executor(self._threads, solve.run)
            except WorkerLostError as lost:
                reply = LATE if lost.late else LOST
            finally:
                del self._solves[job]
            job.unkept = reply.unkept
        finally:
            self._slots.release(job.caller)
        job.finish("failed" if reply.problem else "done", reply if reply.problem else None)

    def cancel_if_unwatched(self, job: Job) -> None:
        """Cancel the job: no other server has clients of it. Its process is killed."""
        job.finish("cancelled", CANCELLED)
        if job in self._solves:
            self._solves[job].kill()
        elif job.task is not None:
            job.task.cancel()

    async def queued(self) -> int:
        """Number of jobs that wait for a process."""
        return self._slots.queued

    async def close(self) -> None:
        """Kill all processes; their jobs fail."""
        self._pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
