"""Worker of a cluster: Celery's processes, each with a job runner."""

import mmap
import tempfile
from pathlib import Path
from typing import Any

from celery import Celery, signals

from coop_plan.api.cluster.celery_queue import QUEUE, SOLVE, CeleryQueue, make_app
from coop_plan.api.cluster.job_runner import JobRunner
from coop_plan.api.cluster.redis_job_store import JobStore
from coop_plan.api.jobs.process_pool import ProcessPool
from coop_plan.api.jobs.worker_process import WorkerSettings, die_with_parent

ALIVE_SECONDS = 5.0
"""Interval at which a worker touches its file, for probes."""


class ClusterWorker:
    """Makes plans for a cluster, `solvers` at once, until SIGTERM.

    Then its running jobs are released, and other workers start them from the beginning. Its main
    process touches `coop-plan-worker.*/alive` in the folder of temporary files.
    """

    def __init__(self, broker: str, settings: WorkerSettings, solvers: int) -> None:
        self._broker, self._settings, self._solvers = broker, settings, solvers
        # Shared with the processes that are forked later; a signal may arrive at any time.
        self._stopping = mmap.mmap(-1, 1)
        self._runner: JobRunner | None = None

    def run(self) -> None:
        """Run jobs until a signal to stop."""
        app = self._app()
        with tempfile.TemporaryDirectory(prefix="coop-plan-worker.") as folder:
            alive = Path(folder, "alive")

            def ready(sender: Any, **_: Any) -> None:
                sender.timer.call_repeatedly(ALIVE_SECONDS, alive.touch)

            signals.worker_ready.connect(ready, weak=False)
            app.Worker(
                pool="prefork",
                concurrency=self._solvers,
                queues=[QUEUE],
                without_gossip=True,
                without_mingle=True,
                without_heartbeat=True,
                loglevel="INFO",
            ).start()

    def _app(self) -> Celery:
        app = make_app(self._broker, self._settings.limits.seconds)

        def stop(**_: Any) -> None:
            self._stopping[0] = 1

        def started(**_: Any) -> None:
            die_with_parent()
            settings = self._settings
            store = JobStore(self._broker, settings.secret)
            queue = CeleryQueue(self._broker, settings.limits.seconds)
            pool = ProcessPool(settings, 1)
            self._runner = JobRunner(store, pool, queue.send, lambda: bool(self._stopping[0]))

        def stopped(**_: Any) -> None:
            if self._runner is not None:
                self._runner.close()

        signals.worker_shutting_down.connect(stop, weak=False)
        signals.worker_process_init.connect(started, weak=False)
        signals.worker_process_shutdown.connect(stopped, weak=False)

        app.task(self._solve, name=SOLVE)
        return app

    def _solve(self, job_id: str) -> None:
        assert self._runner is not None
        self._runner.run(job_id)
