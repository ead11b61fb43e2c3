"""Options that a server and a worker of a cluster have in common, and what they come to."""

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from coop_plan.api.cli.exit_codes import EXIT_ERROR, fail
from coop_plan.api.cli.types import Seconds

MIN_SECRET = 16

F = TypeVar("F", bound=Callable[..., Any])


def work_options(command: F) -> F:
    """Add the options of whoever makes plans and keeps them."""
    options = (
        click.option(
            "--store", metavar="ADDRESS", help="SQLite file of the plan cache, or redis://."
        ),
        click.option(
            "--store-size", default="1GiB", show_default=True, help="Of a file's records."
        ),
        click.option(
            "--store-key", metavar="FILE", help="Secret that seals them [default: PATH.key]."
        ),
        click.option(
            "--max-body", default="64MiB", show_default=True, help="Largest request body."
        ),
        click.option("--max-ops", type=click.IntRange(1), default=100_000, show_default=True),
        click.option(
            "--max-time-limit",
            type=Seconds(1, 1e6),
            default=600.0,
            show_default=True,
            metavar="S",
            help="Seconds a solve may take.",
        ),
        click.option(
            "--solvers",
            type=click.IntRange(1),
            default=os.cpu_count() or 1,
            show_default="cores",
            help="Plans made at once.",
        ),
        click.option("--solver-memory", default="8GiB", show_default=True, help="Of each of them."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def open_the_store(store: str | None, store_key: str | None) -> tuple[str, bytes]:
    """
    The address of the store, which is made or refused here in one line, and its secret.

    Several machines share one only by a file that was given to each.
    """
    from coop_plan.api.service.graph_store_redis import open_graphs
    from coop_plan.planner.plan_cache.open_store import in_redis, open_store
    from coop_plan.planner.plan_cache.store import StoreError, default_path

    address = store or str(default_path())
    if in_redis(address):
        if store_key is None:
            fail("a store in Redis needs --store-key, the same secret for all", EXIT_ERROR)
        key = Path(store_key)
    else:
        address = str(Path(address).absolute())
        key = Path(store_key or f"{address}.key")
    try:
        # Both, while there is room: who opens them later need not write, on a full disk either.
        open_store(address, b"").close()
        open_graphs(address, 0).close()
        return address, secret_of(key)
    except (StoreError, OSError) as error:
        fail(error, EXIT_ERROR)


def check_broker(broker: str, store: str) -> None:
    """Refuse an address that is no broker's."""
    if not broker.startswith(("redis://", "rediss://")):
        fail(f"--broker {broker}: a broker is at redis://HOST:PORT/N", EXIT_ERROR)
    if broker == store:
        fail("--broker and --store are one Redis: the store may forget, the broker must not", 1)
    try:
        import coop_plan.api.cluster.celery_queue  # noqa: F401 - whether it is installed
    except ModuleNotFoundError as error:
        fail(f"--broker needs {error.name}: pip install 'coop-plan[cluster]'", EXIT_ERROR)


def secret_of(path: Path) -> bytes:
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
