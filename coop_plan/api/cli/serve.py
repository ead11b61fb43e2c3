"""`coop-plan serve`: the planning service on a socket."""

import gc
import socket
from typing import Any

import click

from coop_plan.api.cli.exit_codes import EXIT_ERROR, EXIT_INVALID, fail, needs_extra
from coop_plan.api.cli.server_options import (
    OPTIONS,
    check_broker,
    open_store_and_secret,
    settings_options,
)

SHUTDOWN_SECONDS = 5


@click.command(short_help="Serve POST /plan with a plan cache.")
@settings_options(
    {
        "host": ("ADDRESS", "Address to listen on.  [default: 127.0.0.1]"),
        "port": ("N", "Port to listen on; 0 takes a free one.  [default: 8000]"),
        "tokens": ("FILE", "Require an API token of this file; `coop-plan token` creates it."),
        "queue": ("N", "Limit on jobs that wait for a solver.  [default: 64]"),
    }
    | OPTIONS
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="Also serve requests with this Host header; * allows any. May be repeated.",
)
@click.option(
    "--improve/--no-improve",
    default=None,
    help="Search better plans for stored ones while the solvers are idle.  [default: improve]",
)
def serve(**flags: Any) -> None:
    """Serve POST /plan with a plan cache.

    Plans are made in processes of this server, or with --broker by `coop-plan worker`. Without
    --tokens every client on this machine is served; another --host than loopback needs --tokens.
    Each option is also an environment variable, --max-body COOP_PLAN_MAX_BODY, and a field of
    --config, max_body. A flag comes first, then the variable.
    """
    from coop_plan.planner.plan_cache.store import without_password

    with needs_extra("serve", "server"):
        import uvicorn

        from coop_plan.api.service import logging
        from coop_plan.api.service.app import create_app
        from coop_plan.api.service.connection import HeadTimeoutProtocol
        from coop_plan.api.service.host_check import LOOPBACK, is_loopback
        from coop_plan.api.service.settings import settings_of
        from coop_plan.api.service.tokens import TokenFile
    given = settings_of(flags)
    host, allowed = given.host, given.allow_host
    if given.tokens is None and not is_loopback(host):
        raise click.UsageError(
            f"--host {host} is reachable from other machines: give --tokens FILE"
        )
    holders = None if given.tokens is None else TokenFile(given.tokens)
    address, secret = open_store_and_secret(given.store, given.store_key)
    if given.broker is not None:
        check_broker(given.broker, address)
        if not given.queue:
            message = "--queue 0 refuses every job of a --broker: allow at least one to wait"
            fail(message, EXIT_INVALID)
    hosts = (*LOOPBACK, *allowed) if is_loopback(host) else (allowed or ("*",))
    settings = given.service(address, secret, hosts=hosts, tokens=holders)
    config = uvicorn.Config(
        create_app(settings),
        http=HeadTimeoutProtocol,
        log_config=logging.CONFIG,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=64 << 10,
    )
    server = uvicorn.Server(config)
    gc.collect()  # freeze what is loaded: collections during requests do not visit it
    gc.freeze()
    with _listen(host, given.port) as listening:
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
