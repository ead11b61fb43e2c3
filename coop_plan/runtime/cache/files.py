"""Error handling of caches: a run continues without a cache whose file fails."""

import contextlib
import functools
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from coop_plan.planner.plan_cache.store import StoreError

log = logging.getLogger("coop-plan")

DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@contextlib.contextmanager
def tolerate_failures(path: Path) -> Iterator[None]:
    """Log a failure of the cache in `path`, once per process, and suppress it.

    A damaged file is moved aside: the next start creates a new cache.
    """
    try:
        yield
    except (OSError, sqlite3.Error, StoreError) as error:
        cause = error.__cause__ if isinstance(error, StoreError) else error
        _warn_once(path, str(cause))
        # The low byte is the error code; the others are details.
        if getattr(cause, "sqlite_errorcode", 0) & 0xFF in DAMAGED:
            _move_aside(path)


def _move_aside(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.replace(f"{path}.damaged")
        # A journal that stays would be replayed into the next file.
        for suffix in ("-journal", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)


@functools.cache
def _warn_once(path: Path, message: str) -> None:
    log.warning("continuing without the cache %s: %s", path, message)
