"""`coop-plan serve`: the planning service on a socket."""

import gc
import socket
from typing import Any

import click

from coop_plan.api.cli.exit_codes import EXIT_ERROR, EXIT_INVALID, fail
from coop_plan.api.cli.server_options import (
    check_broker,
    open_store_and_secret,
    parse_limits,
    server_options,
)

SHUTDOWN_SECONDS = 5


@click.command(short_help="Serve POST /plan with a plan cache.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="Also serve requests with this Host header; * allows any. May be repeated.",
)
@click.option(
    "--tokens",
    metavar="FILE",
    help="Require an API token of this file; `coop-plan token` creates it.",
)
@server_options
@click.option(
    "--queue",
    type=click.IntRange(0),
    default=64,
    show_default=True,
    help="Limit on jobs that wait for a solver.",
)
@click.option(
    "--broker",
    metavar="URL",
    envvar="COOP_PLAN_BROKER",
    show_envvar=True,
    help="redis:// URL of a cluster's job queue: let its workers make the plans.",
)
@click.option(
    "--improve/--no-improve",
    default=True,
    show_default=True,
    help="Search better plans for stored ones while the solvers are idle.",
)
def serve(
    host: str,
    port: int,
    allow_host: tuple[str, ...],
    tokens: str | None,
    queue: int,
    broker: str | None,
    improve: bool,
    **options: Any,
) -> None:
    """Serve POST /plan with a plan cache.

    Plans are made in processes of this server, or with --broker by `coop-plan worker`. Without
    --tokens every client on this machine is served; another --host than loopback needs --tokens.
    """
    from coop_plan.planner.plan_cache.store import without_password

    limits = parse_limits(options)
    try:
        import uvicorn

        from coop_plan.api.service import logging
        from coop_plan.api.service.app import create_app
        from coop_plan.api.service.connection import HeadTimeoutProtocol
        from coop_plan.api.service.host_check import LOOPBACK, is_loopback
        from coop_plan.api.service.plan_service import ServiceSettings
        from coop_plan.api.service.tokens import TokenFile
    except ModuleNotFoundError as error:
        from coop_plan.schemas.errors import missing_package

        fail(missing_package("serve", error.name, "server"), EXIT_ERROR)
    if tokens is None and not is_loopback(host):
        raise click.UsageError(
            f"--host {host} is reachable from other machines: give --tokens FILE"
        )
    holders = None if tokens is None else TokenFile(tokens)
    address, secret = open_store_and_secret(options["store"], options["store_key"])
    if broker is not None:
        check_broker(broker, address)
        if not queue:
            fail(
                "--queue 0 refuses every job of a --broker: allow at least one to wait",
                EXIT_INVALID,
            )
    hosts = (*LOOPBACK, *allow_host) if is_loopback(host) else (allow_host or ("*",))
    settings = ServiceSettings(
        store=address,
        secret=secret,
        broker=broker or "",
        queue=queue,
        hosts=hosts,
        tokens=holders,
        improve=improve,
        **limits,
    )
    config = uvicorn.Config(
        create_app(settings),
        http=HeadTimeoutProtocol,
        log_config=logging.configure(),
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=64 << 10,
    )
    server = uvicorn.Server(config)
    gc.collect()  # freeze what is loaded: collections during requests do not visit it
    gc.freeze()
    with _listen(host, port) as listening:
        bound = listening.getsockname()
        click.echo(
            f"coop-plan: http://{bound[0]}:{bound[1]}, plans in {without_password(address)}",
            err=True,
        )
        server.run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        fail(f"cannot listen on {host}:{port}: {error.strerror}", EXIT_ERROR)
    # Connections inherit TCP_NODELAY; asyncio sets it only on sockets that it opened itself.
    # Without it the second packet of a response waits 40 ms for the client's acknowledgement.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
