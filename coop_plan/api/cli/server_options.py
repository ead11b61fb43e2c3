"""Options that a server and a worker of a cluster share, and the store they open."""

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from coop_plan.api.cli.exit_codes import EXIT_ERROR, fail, needs_extra

MIN_SECRET = 16

F = TypeVar("F", bound=Callable[..., Any])


OPTIONS = {
    "config": ("FILE", 'TOML file with values of options, such as max_body = "64MiB".'),
    "store": ("ADDRESS", "Plan cache: a SQLite file, or a redis:// URL."),
    "store-size": (
        "SIZE",
        "Limit on the size of a SQLite plan cache; graphs may take as much.  [default: 1GiB]",
    ),
    "store-key": ("FILE", "File of the secret that signs stored plans.  [default: PATH.key]"),
    "max-body": ("SIZE", "Limit on a request body.  [default: 64MiB]"),
    "max-ops": ("N", "Limit on the ops of a graph.  [default: 100000]"),
    "max-time-limit": ("S", "Limit on the time limit of a request, in seconds.  [default: 600]"),
    "solvers": ("N", "Plans made at once, each in a process.  [default: cores]"),
    "solver-memory": ("SIZE", "Limit on the memory of each of these processes.  [default: 8GiB]"),
    "broker": (
        "URL",
        "redis:// URL of a cluster's job queue: its workers make the plans of its servers.",
    ),
}
"""Options of a server and of a worker, each with its metavar; `Settings` has types and defaults."""


def settings_options(options: dict[str, tuple[str, str]]) -> Callable[[F], F]:
    """Decorator that adds options whose values `settings_of` parses."""

    def decorate(command: F) -> F:
        for name, (metavar, text) in reversed(options.items()):
            command = click.option(f"--{name}", metavar=metavar, help=text)(command)
        return command

    return decorate


def open_store_and_secret(store: str | None, store_key: str | None) -> tuple[str, bytes]:
    """The address of the plan store, created if needed, and its secret; exits if it fails.

    Machines that share a store need the same `store_key` file.
    """
    from coop_plan.api.service.open_graph_store import open_graph_store
    from coop_plan.planner.cache_files import cache_dir, private_file
    from coop_plan.planner.plan_cache.open_store import in_redis, open_store
    from coop_plan.planner.plan_cache.store import StoreError

    address = store or str(cache_dir() / "plans.sqlite3")
    if in_redis(address):
        if store_key is None:
            message = "a store in Redis needs --store-key: the same file on all servers and workers"
            fail(message, EXIT_ERROR)
        key = Path(store_key)
    else:
        address = str(Path(address).absolute())
        key = Path(store_key or f"{address}.key")
    try:
        if store is None:
            private_file(Path(address))
        # Create both now: opening an existing store writes nothing, even on a full disk.
        open_store(address, b"").close()
        open_graph_store(address, 0).close()
        return address, read_secret(key)
    except (StoreError, OSError) as error:
        fail(error, EXIT_ERROR)


def check_broker(broker: str, store: str) -> None:
    """Exit if the broker's address is wrong, is the store's, or Celery is missing."""
    from coop_plan.planner.plan_cache.store import without_password

    if not broker.startswith(("redis://", "rediss://")):
        place = without_password(broker)
        fail(f"--broker {place}: a broker is at redis://HOST:PORT/N", EXIT_ERROR)
    if broker == store:
        same = "--broker and --store are the same Redis"
        fail(f"{same}: the store may evict keys, a broker must not", EXIT_ERROR)
    with needs_extra("--broker", "cluster"):
        import coop_plan.api.cluster.celery_queue  # noqa: F401


def read_secret(path: Path) -> bytes:
    """The secret in a file, which is created if needed, readable by its owner only."""
    if not path.exists():
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".coop-plan.")
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):  # another process created it first
            os.link(name, path)
        Path(name).unlink()
    secret = path.read_bytes()
    if len(secret) < MIN_SECRET:
        raise OSError(
            f"{path} has fewer than {MIN_SECRET} bytes: give a longer secret, or remove the file"
        )
    return secret
