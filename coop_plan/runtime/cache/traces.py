"""On-disk cache of traced graphs: a second start of the same step does not trace again.

Each trace is one file, a pickle: whoever writes it runs code here. So it is read only if no other
user could have written it. The newest files are kept.
"""

import contextlib
import os
from pathlib import Path

from coop_plan.planner.cache_files import (
    cache_dir,
    check_trusted,
    continue_without,
    private_folder,
    replacing,
)
from coop_plan.runtime.cache.profiles import environment, key_in

KEPT_FILES = 128

TRACING_SOURCES = (
    "cache/traces.py",
    "capture/kept_trace.py",
    "capture/tracing_rules.py",
    "torch_internals/*.py",
)
"""Source files of the runtime that determine traces and their records."""


def key_of(signature: str) -> str:
    """Key of a trace: equal on machines and settings that trace alike."""
    return key_in(environment(TRACING_SOURCES), signature)


def read(key: str) -> bytes | None:
    """The record of a key, if there is one that no other user could have written."""
    path = _folder() / key
    try:
        check_trusted(path)
        record = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        continue_without(path, error)
        return None
    with contextlib.suppress(OSError):  # an image, which is read-only
        os.utime(path)
    return record


def write(key: str, record: bytes) -> None:
    """Write or replace a record, and delete those that were used longest ago."""
    folder = _folder()
    try:
        private_folder(folder.parent)
        private_folder(folder)
        with replacing(folder / key) as file:
            file.write(record)
        for path in sorted(folder.iterdir(), key=_last_used)[:-KEPT_FILES]:
            path.unlink(missing_ok=True)
    except OSError as error:
        continue_without(folder, error)


def _last_used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process has deleted it
        return 0.0


def discard(key: str, error: Exception) -> None:
    """Delete a record that cannot be read, and log it once."""
    path = _folder() / key
    continue_without(path, error)
    with contextlib.suppress(OSError):
        path.unlink()


def _folder() -> Path:
    return cache_dir() / "traces"
