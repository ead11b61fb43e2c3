"""Job runner of a worker: leases a job, runs it in a process and reports its progress."""

import collections
import concurrent.futures
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import redis
from celery.exceptions import SoftTimeLimitExceeded

from coop_plan.api.cluster.redis_job_store import JobStore, Lease
from coop_plan.api.jobs.local_executor import LATE
from coop_plan.api.jobs.process_pool import ProcessPool, Solve, WorkerLostError
from coop_plan.api.jobs.request_handler import Reply

T = TypeVar("T")

RENEW_SECONDS = 0.5
"""Interval at which a lease is renewed, and a cancellation noticed."""

AWAY_SECONDS = 60.0
"""Time for which calls of a broker that does not answer are repeated."""

log = logging.getLogger(__name__)


class JobRunner:
    """Runs jobs one after the other, in a process that it can kill. For one thread."""

    def __init__(
        self,
        store: JobStore,
        pool: ProcessPool,
        send: Callable[[str], None],
        stopping: Callable[[], bool],
    ) -> None:
        self._store, self._pool = store, pool
        self._send, self._stopping = send, stopping
        # One thread until the end: a process is killed with the thread that started it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="solver")

    def run(self, job_id: str) -> None:
        """Lease and run the job that is next; `job_id` is that of the message.

        The job is then finished, released, or leased by another worker.
        """
        lease = _with_retries(lambda: self._store.lease(job_id))
        if lease is None:
            return
        last = collections.deque([Reply()], maxlen=1)  # the progress to report
        solve = Solve(self._pool, lease.request, lease.body, last.append)
        future = self._thread.submit(solve.run)
        try:
            while not concurrent.futures.wait([future], RENEW_SECONDS).done:
                if self._stopping():
                    solve.kill()
                    self._release(lease, counts=False)
                    return
                with contextlib.suppress(redis.RedisError):  # the lease outlasts a restart
                    if not self._store.renew(lease, last[0].detail, last[0].figures):
                        solve.kill()
                        return
            reply, record = future.result()
        except SoftTimeLimitExceeded:
            solve.kill()
            reply, record = LATE, b""
        except WorkerLostError as lost:
            if not lost.late:
                log.warning("job %s: its process ended without an answer", lease.job_id)
                self._release(lease, counts=True)
                return
            reply, record = LATE, b""
        problem = reply if reply.problem else None
        if not _with_retries(lambda: self._store.finish(lease, problem, record)):
            log.warning("job %s: its lease was lost to another worker", lease.job_id)

    def _release(self, lease: Lease, *, counts: bool) -> None:
        if _with_retries(lambda: self._store.release(lease, counts=counts)):
            _with_retries(lambda: self._send(lease.job_id))

    def close(self) -> None:
        """Kill the process."""
        self._pool.close()


def _with_retries(call: Callable[[], T]) -> T:
    """The result of a call of the broker, repeated while it does not answer."""
    until = time.monotonic() + AWAY_SECONDS
    while True:
        try:
            return call()
        except (redis.ConnectionError, redis.TimeoutError, OSError):
            if time.monotonic() > until:
                raise
            time.sleep(RENEW_SECONDS)
