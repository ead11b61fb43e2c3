"""A worker of a cluster: Celery's processes, in each a hand that does jobs."""

import mmap
from typing import Any

from celery import Celery, signals

from coop_plan.api.cluster.job_store import Board
from coop_plan.api.cluster.job_runner import Hand
from coop_plan.api.cluster.celery_queue import QUEUE, SOLVE, Messages, make_app
from coop_plan.api.jobs.worker_process import Settings, die_with_parent
from coop_plan.api.jobs.process_pool import Pool


class ClusterWorker:
    """
    Makes plans for a cluster, `solvers` at once, until SIGTERM.

    Then what is under way is handed back, and another worker begins it anew.
    """

    def __init__(self, broker: str, settings: Settings, solvers: int) -> None:
        self._broker, self._settings, self._solvers = broker, settings, solvers
        # Seen by the processes that are forked later; a signal may come at any time.
        self._leaving = mmap.mmap(-1, 1)
        self._hand: Hand | None = None

    def run(self) -> None:
        """Work until a signal says to stop."""
        app = self._app()
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

        def leave(**_: Any) -> None:
            self._leaving[0] = 1

        def started(**_: Any) -> None:
            die_with_parent()
            self._hand = self._new_hand()

        def stopped(**_: Any) -> None:
            if self._hand is not None:
                self._hand.close()

        signals.worker_shutting_down.connect(leave, weak=False)
        signals.worker_process_init.connect(started, weak=False)
        signals.worker_process_shutdown.connect(stopped, weak=False)

        app.task(self._solve, name=SOLVE)
        return app

    def _solve(self, job_id: str) -> None:
        assert self._hand is not None
        self._hand.do(job_id)

    def _new_hand(self) -> Hand:
        settings = self._settings
        board = Board(self._broker, settings.secret)
        messages = Messages(self._broker, settings.limits.seconds)
        pool = Pool(settings, 1)
        return Hand(board, pool, messages.send, lambda: bool(self._leaving[0]))
