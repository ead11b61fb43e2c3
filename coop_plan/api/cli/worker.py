"""`coop-plan worker`: a worker of a cluster."""

from typing import Any

import click

from coop_plan.api.cli.exit_codes import needs_extra
from coop_plan.api.cli.server_options import (
    OPTIONS,
    check_broker,
    open_store_and_secret,
    settings_options,
)


@click.command(short_help="Make plans for servers with the same --broker.")
@settings_options(OPTIONS)
def worker(**flags: Any) -> None:
    """Make plans for servers with the same --broker and --store.

    SIGTERM ends the worker and releases its running jobs to other workers. Options are also
    environment variables and fields of --config, as of `coop-plan serve`.
    """
    from coop_plan.planner.plan_cache.store import without_password

    with needs_extra("worker", "server"):
        from coop_plan.api.service.settings import settings_of
    given = settings_of(flags)
    if given.broker is None:
        raise click.UsageError("Missing option '--broker'")
    address, secret = open_store_and_secret(given.store, given.store_key)
    check_broker(given.broker, address)
    from coop_plan.api.cluster.celery_worker import ClusterWorker

    settings = given.service(address, secret)
    place, solvers = without_password(given.broker), settings.solvers
    click.echo(f"coop-plan: worker of {place}, {solvers} plans at once", err=True)
    ClusterWorker(given.broker, settings.worker(given.solver_memory, solves=True), solvers).run()
