"""Celery queue of job ids; all else about a job is in the job store."""

from typing import Any

from celery import Celery

from coop_plan.api.jobs.process_pool import GRACE_SECONDS

SOLVE = "coop-plan.solve"
QUEUE = "coop-plan"

SOFT_SECONDS = 30.0
HARD_SECONDS = 60.0
"""Added to the limit of a solve's own process: Celery's limits end only a worker that hangs."""


def make_app(address: str, seconds: float) -> Celery:
    """The Celery application at a Redis, for solves of up to `seconds`.

    A message is acknowledged when its job is finished or released. The message of a dead worker is
    redelivered after the visibility timeout; the waiting servers send it again long before.
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
            # A prefetched message may wait for the job before it, so twice the limit.
            "visibility_timeout": int(2 * (longest + HARD_SECONDS)) + 60,
            "global_keyprefix": "coop-plan:",
            "socket_connect_timeout": 5,
            "socket_timeout": 30,
            "socket_keepalive": True,
        },
    )
    return app


class CeleryQueue:
    """Sends job ids to the workers. Safe to use from several threads."""

    def __init__(self, address: str, seconds: float) -> None:
        self._app = make_app(address, seconds)

    def send(self, job_id: str) -> None:
        """Send a job id; raises `OSError` if the broker does not answer."""
        policy: dict[str, Any] = {"max_retries": 1, "interval_start": 0.1}
        try:
            self._app.send_task(SOLVE, args=[job_id], retry=True, retry_policy=policy)
        except Exception as error:  # of many types, for example from another thread's failure
            raise OSError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Close the connections."""
        self._app.close()
