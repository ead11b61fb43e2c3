"""`coop-plan worker`: a worker of a cluster."""

from typing import Any

import click

from coop_plan.api.cli.server_options import (
    check_broker,
    open_store_and_secret,
    parse_limits,
    server_options,
)


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
def worker(broker: str, **options: Any) -> None:
    """Make plans for servers with the same --broker and --store.

    SIGTERM ends the worker and releases its running jobs to other workers.
    """
    from coop_plan.planner.plan_cache.store import without_password

    limits = parse_limits(options)
    address, secret = open_store_and_secret(options["store"], options["store_key"])
    check_broker(broker, address)
    from coop_plan.api.cluster.celery_worker import ClusterWorker
    from coop_plan.api.jobs.worker_process import WorkerSettings

    settings = WorkerSettings(
        address,
        secret,
        limits["limits"],
        limits["solver_memory"],
        limits["store_bytes"],
        solves=True,
    )
    place, solvers = without_password(broker), limits["solvers"]
    click.echo(f"coop-plan: worker of {place}, {solvers} plans at once", err=True)
    ClusterWorker(broker, settings, solvers).run()
