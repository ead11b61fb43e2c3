"""Options that a server and a worker of a cluster share, and the store they open."""

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


def server_options(command: F) -> F:
    """Decorator that adds the options of a process that makes and stores plans."""
    options = (
        click.option(
            "--store",
            metavar="ADDRESS",
            envvar="COOP_PLAN_STORE",
            show_envvar=True,
            help="Plan cache: a SQLite file, or a redis:// URL.",
        ),
        click.option(
            "--store-size",
            default="1GiB",
            show_default=True,
            help="Limit on the size of a SQLite plan cache; graphs may take as much.",
        ),
        click.option(
            "--store-key",
            metavar="FILE",
            help="File of the secret that signs stored plans.  [default: PATH.key]",
        ),
        click.option(
            "--max-body", default="64MiB", show_default=True, help="Limit on a request body."
        ),
        click.option(
            "--max-ops",
            type=click.IntRange(1),
            default=100_000,
            show_default=True,
            help="Limit on the ops of a graph.",
        ),
        click.option(
            "--max-time-limit",
            type=Seconds(1, 1e6),
            default=600.0,
            show_default=True,
            metavar="S",
            help="Limit on the time limit of a request, in seconds.",
        ),
        click.option(
            "--solvers",
            type=click.IntRange(1),
            default=os.cpu_count() or 1,
            show_default="cores",
            help="Plans made at once, each in a process.",
        ),
        click.option(
            "--solver-memory",
            default="8GiB",
            show_default=True,
            help="Limit on the memory of each of these processes.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def parse_limits(options: dict[str, Any]) -> dict[str, Any]:
    """Limits and sizes by the names of `ServiceSettings`, from the values of `server_options`."""
    from coop_plan.api.jobs.request_handler import Limits
    from coop_plan.schemas import parse_bytes

    body, ops, seconds = (options[f"max_{name}"] for name in ("body", "ops", "time_limit"))
    return {
        "limits": Limits(parse_bytes(body), ops, seconds),
        "solvers": options["solvers"],
        "solver_memory": parse_bytes(options["solver_memory"]),
        "store_bytes": parse_bytes(options["store_size"]),
    }


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
            fail(
                "a store in Redis needs --store-key: the same file on all servers and workers",
                EXIT_ERROR,
            )
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
        fail(
            "--broker and --store are the same Redis: the store may evict keys, a broker must not",
            1,
        )
    try:
        import coop_plan.api.cluster.celery_queue  # noqa: F401 - fails if Celery is missing
    except ModuleNotFoundError as error:
        from coop_plan.schemas.errors import missing_package

        fail(missing_package("--broker", error.name, "cluster"), EXIT_ERROR)


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
