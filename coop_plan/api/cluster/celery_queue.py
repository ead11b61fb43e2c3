"""Messages to the workers, by Celery: that there is a job. All else about it is on the board."""

from typing import Any

from celery import Celery
from kombu.exceptions import OperationalError

from coop_plan.api.jobs.process_pool import GRACE_SECONDS

SOLVE = "coop-plan.solve"
QUEUE = "coop-plan"

SOFT_SECONDS = 30.0
HARD_SECONDS = 60.0
"""Beyond what a solve's own process is given: Celery's limits only meet a worker that hangs."""


def make_app(address: str, seconds: float) -> Celery:
    """
    Celery at a Redis, for solves of so many seconds at most.

    A message is acknowledged when its job is over or handed back. One that a dead worker holds
    comes again after the visibility timeout; the servers that wait send it again long before.
    """
    longest = seconds + GRACE_SECONDS
    app = Celery("coop-plan", broker=address, set_as_current=False)
    app.conf.update(
        accept_content=["json"],
        task_serializer="json",
        result_backend=None,
        task_ignore_result=True,
        task_default_queue=QUEUE,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        task_soft_time_limit=longest + SOFT_SECONDS,
        task_time_limit=longest + HARD_SECONDS,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_hijack_root_logger=False,
        broker_transport_options={
            # A message may wait in a worker for the one before it.
            "visibility_timeout": int(2 * (longest + HARD_SECONDS)) + 60,
            "global_keyprefix": "coop-plan:",
            "socket_connect_timeout": 5,
            "socket_timeout": 30,
            "socket_keepalive": True,
        },
    )
    return app


class Messages:
    """Sends them. Safe to use from several threads."""

    def __init__(self, address: str, seconds: float) -> None:
        self._app = make_app(address, seconds)

    def send(self, job_id: str) -> None:
        """Say that a job waits; raises `OSError` where the broker does not answer."""
        policy: dict[str, Any] = {"max_retries": 1, "interval_start": 0.1}
        try:
            self._app.send_task(SOLVE, args=[job_id], retry=True, retry_policy=policy)
        except OperationalError as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Let go of the connections."""
        self._app.close()
