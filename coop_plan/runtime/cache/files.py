"""Error handling of caches: a run continues without a cache whose file fails."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from coop_plan.planner.cache_files import UntrustedFileError, continue_without, private_file
from coop_plan.planner.plan_cache.store import ForeignTablesError, StoreError

DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

LOCK_SECONDS = 1.0
"""Time that a cache waits for another process's write."""

_unused: set[Path] = set()
"""Caches that failed, which this process does not try again."""


class _UnusedError(OSError):
    """A cache failed earlier."""


def open_private(path: Path) -> None:
    """As `private_file`; raises an error, too, if the cache failed earlier in this process."""
    if path in _unused:
        raise _UnusedError
    private_file(path)


@contextlib.contextmanager
def tolerate_failures(path: Path) -> Iterator[None]:
    """Log a failure of the cache in `path`, once per process, and suppress it.

    A file that is damaged, of another kind, or open to other users is moved aside: the next use
    creates a new one. After another failure, as of a disk or a lock, the cache is not used again.
    """
    try:
        yield
    except _UnusedError:
        pass
    except (OSError, sqlite3.Error) as error:
        cause = error.__cause__ if isinstance(error, StoreError) else error
        assert isinstance(cause, Exception)
        continue_without(path, cause)
        if not (_is_unusable(cause, path) and _move_aside(path)):
            _unused.add(path)


def _is_unusable(cause: Exception, path: Path) -> bool:
    if isinstance(cause, UntrustedFileError):
        return cause.path == path.resolve()
    # The low byte is the error code; the others are details.
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
    return isinstance(cause, ForeignTablesError) or code in DAMAGED


def _move_aside(path: Path) -> bool:
    try:
        path.replace(f"{path}.damaged")
        # A journal that stays would be replayed into the next file.
        for suffix in ("-journal", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
    except OSError:
        return False
    return True
