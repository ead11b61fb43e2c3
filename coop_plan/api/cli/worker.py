"""`coop-plan worker`: a worker of a cluster."""

import click

from coop_plan.api.cli.server_options import check_broker, open_store_and_secret, server_options


@click.command(short_help="Make plans for servers with the same --broker.")
@click.option(
    "--broker",
    required=True,
    metavar="URL",
    envvar="COOP_PLAN_BROKER",
    show_envvar=True,
    help="redis:// URL of the job queue.",
)
@server_options
def worker(
    broker: str,
    store: str | None,
    store_size: str,
    store_key: str | None,
    max_body: str,
    max_ops: int,
    max_time_limit: float,
    solvers: int,
    solver_memory: str,
) -> None:
    """Make plans for servers with the same --broker and --store.

    SIGTERM ends the worker and releases its running jobs to other workers.
    """
    from coop_plan.planner.plan_cache.store import without_password
    from coop_plan.schemas import parse_bytes

    limit, memory, size = (parse_bytes(text) for text in (max_body, solver_memory, store_size))
    address, secret = open_store_and_secret(store, store_key)
    check_broker(broker, address)
    from coop_plan.api.cluster.celery_worker import ClusterWorker
    from coop_plan.api.jobs.request_handler import Limits
    from coop_plan.api.jobs.worker_process import WorkerSettings

    limits = Limits(body_bytes=limit, ops=max_ops, seconds=max_time_limit)
    settings = WorkerSettings(address, secret, limits, memory, size, solves=True)
    click.echo(
        f"coop-plan: worker of {without_password(broker)}, {solvers} plans at once", err=True
    )
    ClusterWorker(broker, settings, solvers).run()
