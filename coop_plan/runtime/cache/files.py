"""Where caches lie, and what happens when a file of one fails: the run goes on without it."""

import contextlib
import functools
import logging
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from coop_plan.planner.plan_cache.store import StoreError

log = logging.getLogger("coop-plan")

DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def cache_dir() -> Path:
    """Where compiled extensions and profiles are kept: `$XDG_CACHE_HOME` or `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "coop-plan"


@contextlib.contextmanager
def going_on_without(path: Path) -> Iterator[None]:
    """Say in one line what the cache in `path` failed with, once a process, and go on.

    A damaged file is moved aside, so that the next start has a cache again.
    """
    try:
        yield
    except (OSError, sqlite3.Error, StoreError) as error:
        cause = error.__cause__ if isinstance(error, StoreError) else error
        _say(path, str(cause))
        # The low byte is the error; the rest says where in the file.
        if getattr(cause, "sqlite_errorcode", 0) & 0xFF in DAMAGED:
            _set_aside(path)


def _set_aside(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.replace(f"{path}.damaged")
        # A journal left behind would be played back into the file that comes next.
        for suffix in ("-journal", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)


@functools.cache
def _say(path: Path, message: str) -> None:
    log.warning("going on without the cache %s: %s", path, message)
