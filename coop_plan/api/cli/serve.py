"""`coop-plan serve`: the service on a socket."""

import gc
import socket

import click

from coop_plan.api.cli.exit_codes import EXIT_ERROR, EXIT_INVALID, fail
from coop_plan.api.cli.server_options import check_broker, open_the_store, work_options

SHUTDOWN_SECONDS = 5


@click.command(short_help="Serve POST /plan with a plan cache.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option(
    "--allow-host", multiple=True, metavar="NAME", help="Also answer to this Host; *: any."
)
@click.option("--tokens", metavar="FILE", help="Who may ask: see `coop-plan token`.")
@work_options
@click.option(
    "--queue", type=click.IntRange(0), default=64, show_default=True, help="Plans that may wait."
)
@click.option("--broker", metavar="URL", help="redis://: plans are made by its workers.")
@click.option(
    "--improve/--no-improve",
    default=True,
    show_default=True,
    help="Look for better plans while nothing else is to be done.",
)
def serve(
    host: str,
    port: int,
    allow_host: tuple[str, ...],
    store: str | None,
    store_size: str,
    store_key: str | None,
    tokens: str | None,
    max_body: str,
    max_ops: int,
    max_time_limit: float,
    solvers: int,
    solver_memory: str,
    queue: int,
    broker: str | None,
    improve: bool,
) -> None:
    """Serve POST /plan with a plan cache.

    Plans are made in processes of their own, or with --broker by coop-plan worker. Anybody on this
    machine may ask, unless --tokens says who; on an address that others reach it must.
    """
    from coop_plan.schemas import parse_bytes

    limit, memory, size = (parse_bytes(text) for text in (max_body, solver_memory, store_size))
    try:
        import uvicorn

        from coop_plan.api.service import logging
        from coop_plan.api.jobs.request_handler import Limits
        from coop_plan.api.service.connection import Connection
        from coop_plan.api.service.plan_service import Service
        from coop_plan.api.service.host_check import LOOPBACK, is_loopback
        from coop_plan.api.service.app import create_app
        from coop_plan.api.service.tokens import load
    except ModuleNotFoundError as error:
        fail(f"serve needs {error.name}: pip install 'coop-plan[server]'", EXIT_ERROR)
    if tokens is None and not is_loopback(host):
        raise click.UsageError(f"{host} is reached by others: say who may ask (--tokens FILE)")
    holders = None if tokens is None else load(tokens)
    address, secret = open_the_store(store, store_key)
    if broker is not None:
        check_broker(broker, address)
        if not queue:
            fail("--queue 0 takes no plan to be made by the workers of a --broker", EXIT_INVALID)
    hosts = (*LOOPBACK, *allow_host) if is_loopback(host) else (allow_host or ("*",))
    service = Service(
        store=address,
        secret=secret,
        broker=broker or "",
        limits=Limits(body_bytes=limit, ops=max_ops, seconds=max_time_limit),
        solvers=solvers,
        queue=queue,
        solver_memory=memory,
        store_bytes=size,
        hosts=hosts,
        tokens=holders,
        improve=improve,
    )
    config = uvicorn.Config(
        create_app(service),
        http=Connection,
        log_config=logging.configure(),
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=64 << 10,
    )
    server = uvicorn.Server(config)
    gc.collect()  # what is loaded stays: an answer does not wait until all of it is looked through
    gc.freeze()
    with _listen(host, port) as listening:
        at = listening.getsockname()
        click.echo(f"coop-plan: http://{at[0]}:{at[1]}, plans in {address}", err=True)
        server.run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        fail(f"{host}:{port} cannot be listened on: {error.strerror}", EXIT_ERROR)
    # Connections inherit it. asyncio sets it only where it has opened the socket itself, and
    # without it an answer's second packet waits 40 ms for the client to acknowledge the first.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
