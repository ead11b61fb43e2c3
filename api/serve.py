"""`coop-plan serve`: the service on a socket."""

import contextlib
import os
import secrets
import socket
import tempfile
from pathlib import Path

import click

from coop_plan.api.exits import EXIT_ERROR, fail

SHUTDOWN_SECONDS = 5

MIN_SECRET = 16


@click.command(short_help="Serve POST /plan with a plan cache.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option(
    "--allow-host", multiple=True, metavar="NAME", help="Also answer to this Host; *: any."
)
@click.option("--store", metavar="PATH", help="SQLite file of the plan cache.")
@click.option("--store-size", default="1GiB", show_default=True, help="Of its records.")
@click.option("--store-key", metavar="FILE", help="Secret that seals them [default: PATH.key].")
@click.option("--tokens", metavar="FILE", help="Who may ask: see `coop-plan token`.")
@click.option("--max-body", default="64MiB", show_default=True, help="Largest request body.")
@click.option("--max-ops", type=click.IntRange(1), default=100_000, show_default=True)
@click.option(
    "--max-time-limit",
    type=click.FloatRange(min=1, max=1e6),
    default=600.0,
    show_default=True,
    metavar="S",
    help="Seconds a solve may take.",
)
@click.option(
    "--solvers",
    type=click.IntRange(1),
    default=os.cpu_count() or 1,
    show_default="cores",
    help="Plans made at once.",
)
@click.option("--solver-memory", default="8GiB", show_default=True, help="Of each of them.")
@click.option(
    "--queue", type=click.IntRange(0), default=64, show_default=True, help="Plans that may wait."
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
) -> None:
    """Serve POST /plan with a plan cache.

    Plans are made in processes of their own. Anybody on this machine may ask, unless --tokens says
    who; on an address that others reach it must.
    """
    from coop_plan.schemas import parse_bytes

    limit, memory, size = (parse_bytes(text) for text in (max_body, solver_memory, store_size))
    try:
        import uvicorn

        from coop_plan.api import logs
        from coop_plan.api.answers import Limits
        from coop_plan.api.doorkeeper import LOOPBACK, is_loopback
        from coop_plan.api.service import Service, create_app
        from coop_plan.api.tokens import load
    except ModuleNotFoundError as error:
        fail(f"serve needs {error.name}: pip install 'coop-plan[server]'", EXIT_ERROR)
    from coop_plan.planner.cache.store import SqliteStore, StoreError, default_path

    if tokens is None and not is_loopback(host):
        raise click.UsageError(f"{host} is reached by others: say who may ask (--tokens FILE)")
    holders = None if tokens is None else load(tokens)
    path = Path(store) if store else default_path()
    try:
        SqliteStore(path).close()  # made or refused here, in one line
        secret = _secret(Path(store_key) if store_key else Path(f"{path}.key"))
    except (StoreError, OSError) as error:
        fail(error, EXIT_ERROR)
    hosts = (*LOOPBACK, *allow_host) if is_loopback(host) else (allow_host or ("*",))
    service = Service(
        store=path.absolute(),
        secret=secret,
        limits=Limits(body_bytes=limit, ops=max_ops, seconds=max_time_limit),
        solvers=solvers,
        queue=queue,
        solver_memory=memory,
        store_bytes=size,
        hosts=hosts,
        tokens=holders,
    )
    config = uvicorn.Config(
        create_app(service),
        log_config=logs.configure(),
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=64 << 10,
    )
    server = uvicorn.Server(config)
    with _listen(host, port) as listening:
        at = listening.getsockname()
        click.echo(f"coop-plan: http://{at[0]}:{at[1]}, plans in {path}", err=True)
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


def _secret(path: Path) -> bytes:
    """The secret in a file; it is made, for its owner only, where there is none."""
    if not path.exists():
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".coop-plan.")
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):  # another server was first
            os.link(name, path)
        Path(name).unlink()
    secret = path.read_bytes()
    if len(secret) < MIN_SECRET:
        raise OSError(f"{path} holds no secret of {MIN_SECRET} bytes or more")
    return secret
