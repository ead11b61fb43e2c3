"""What a worker does with a job: take it up, have a process solve it, say how that gets on."""

import concurrent.futures
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import redis
from celery.exceptions import SoftTimeLimitExceeded

from coop_plan.api.jobs.request_handler import Figures, Reply
from coop_plan.api.cluster.job_store import Board, Claim
from coop_plan.api.jobs.local_executor import LATE
from coop_plan.api.jobs.process_pool import GRACE_SECONDS, Pool, Worker, WorkerLostError

T = TypeVar("T")

BEAT_SECONDS = 0.5
"""How often a lease is renewed; so long it takes until a cancelled solve is known to be."""

AWAY_SECONDS = 60.0
"""How long a broker that does not answer is waited for when a job is over."""

log = logging.getLogger(__name__)


class Hand:
    """Does one job after the other, in a process that it can kill. To be used from one thread."""

    def __init__(
        self, board: Board, pool: Pool, send: Callable[[str], None], leaving: Callable[[], bool]
    ) -> None:
        self._board, self._pool = board, pool
        self._send, self._leaving = send, leaving
        # One thread for good: the process dies with the thread that started it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="solver")

    def do(self, job_id: str) -> None:
        """Take up a job, if it is to be done; it is over, handed back or another's afterwards."""
        claim = _insist(lambda: self._board.claim(job_id))
        if claim is None:
            return
        solve = _Solve(self._pool, claim)
        future = self._thread.submit(solve.run)
        try:
            while not concurrent.futures.wait([future], BEAT_SECONDS).done:
                if self._leaving():
                    solve.kill(future)
                    self._hand_back(claim, counts=False)
                    return
                with contextlib.suppress(redis.RedisError):  # the lease outlasts a restart
                    if not self._board.renew(claim, solve.message, solve.figures):
                        solve.kill(future)
                        return
            reply, record = future.result()
        except SoftTimeLimitExceeded:
            solve.kill(future)
            reply, record = LATE, b""
        except WorkerLostError as lost:
            if not lost.late:
                log.warning("job %s: its process ended", job_id)
                self._hand_back(claim, counts=True)
                return
            reply, record = LATE, b""
        problem = reply if reply.problem else None
        if not _insist(lambda: self._board.finish(claim, problem, record)):
            log.warning("job %s: another has taken it over", job_id)

    def _hand_back(self, claim: Claim, *, counts: bool) -> None:
        if _insist(lambda: self._board.hand_back(claim, counts=counts)):
            _insist(lambda: self._send(claim.job_id))

    def close(self) -> None:
        """End its process."""
        self._pool.close()


class _Solve:
    """One solve in a process."""

    def __init__(self, pool: Pool, claim: Claim) -> None:
        self._pool, self._claim = pool, claim
        self._worker: Worker | None = None
        self._killed = False
        self.message, self.figures = "", Figures()

    def run(self) -> tuple[Reply, bytes]:
        work = self._claim.work
        return self._pool.call(
            work.task,
            self._claim.body,
            seconds=work.seconds + GRACE_SECONDS,
            say=self._heard,
            taken=self._taken,
        )

    def _heard(self, reply: Reply) -> None:
        self.message, self.figures = reply.detail, reply.figures

    def _taken(self, worker: Worker) -> None:
        self._worker = worker
        if self._killed:
            worker.kill()

    def kill(self, future: "concurrent.futures.Future[tuple[Reply, bytes]]") -> None:
        """End the process, and wait until that is known."""
        self._killed = True
        if self._worker is not None:
            self._worker.kill()
        concurrent.futures.wait([future])


def _insist(call: Callable[[], T]) -> T:
    """What the broker says, as soon as it answers."""
    until = time.monotonic() + AWAY_SECONDS
    while True:
        try:
            return call()
        except (redis.ConnectionError, redis.TimeoutError, OSError):
            if time.monotonic() > until:
                raise
            time.sleep(BEAT_SECONDS)
