"""On-disk cache of op profiles: a second start measures nothing.

The cache is one SQLite file. It is not in WAL mode, so that it can be read from a read-only image.
Records are read one by one, and written in one transaction at the end of a session.
"""

import contextlib
import functools
import hashlib
import json
import platform
import sqlite3
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from coop_plan.planner.cache_files import cache_dir
from coop_plan.planner.plan_cache.store import create_tables
from coop_plan.runtime.cache.files import LOCK_SECONDS, open_private, tolerate_failures

MEASURING_SOURCES = (
    "op_profile.py",
    "capture/profiler.py",
    "capture/op_timing.py",
    "capture/nondeterminism.py",
    "capture/op_replacements.py",
    "torch_internals/fakes.py",
    "torch_internals/inductor.py",
    "variants/*.py",
    "device/cuda.py",
    "device/arena.*",
    "device/bernoulli.cpp",
    "device/copy_engines.*",
    "execute/launch_times.py",
    "execute/straight_line.py",
    "execute/transfers.py",
)
"""Source files of the runtime that determine profiles and checks; their digest is in the key."""

TABLE = "create table profile (key text primary key, record text not null) without rowid"


class ProfileCache:
    """Records (text) by signature (text), for this machine and these settings of PyTorch.

    After a failure `get` finds no record, `close` writes none, and the log has one line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unsaved: dict[str, str] = {}
        self._environment = environment(MEASURING_SOURCES)
        self._connection: sqlite3.Connection | None = None
        with self._disable_on_error():
            open_private(path)
            self._connection = sqlite3.connect(path, timeout=LOCK_SECONDS)
            create_tables(self._connection, [TABLE])

    def get(self, signature: str) -> str | None:
        """The record of a signature, if there is one."""
        with self._disable_on_error():
            if self._connection is not None:
                found = self._connection.execute(
                    "select record from profile where key = ?", (self.key_of(signature),)
                ).fetchone()
                return None if found is None else str(found[0])
        return None

    def put(self, signature: str, record: str) -> None:
        """Write or replace a record when the session ends."""
        self._unsaved[self.key_of(signature)] = record

    def close(self) -> None:
        """Write the new records, and close the file."""
        with self._disable_on_error():
            if self._connection is not None and self._unsaved:
                with self._connection:
                    self._connection.executemany(
                        "insert or replace into profile values (?, ?)", self._unsaved.items()
                    )
        if self._connection is not None:
            self._connection.close()

    def key_of(self, signature: str) -> str:
        """Key of a signature: equal on machines and settings that measure alike."""
        return key_in(self._environment, signature)

    @contextlib.contextmanager
    def _disable_on_error(self) -> Iterator[None]:
        with tolerate_failures(self.path):
            try:
                yield
            except sqlite3.Error:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
                raise


_session: ContextVar[ProfileCache | None] = ContextVar("profiles", default=None)


@contextlib.contextmanager
def profile_session() -> Iterator[None]:
    """Read profiles from the cache on disk in this context, and write new ones at its end."""
    cache = ProfileCache(cache_dir() / "profiles.sqlite3")
    token = _session.set(cache)
    try:
        yield
    finally:
        _session.reset(token)
        cache.close()


def session() -> ProfileCache | None:
    """The cache of the current session, if any."""
    return _session.get()


def environment(sources: tuple[str, ...]) -> str:
    """Digest of source files, machine and settings: records of others may not be comparable."""
    return json.dumps([_source_digest(sources), _processor(), _settings()])


def key_in(place: str, signature: str) -> str:
    """Key of a signature in an `environment`."""
    # Only where a GPU is named: the query allocates memory on it.
    gpus = _gpus() if "cuda" in signature else ""
    return hashlib.sha256(f"{place}\n{gpus}\n{signature}".encode()).hexdigest()


@functools.cache
def _source_digest(sources: tuple[str, ...]) -> str:
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for name in sources:
        for path in sorted(folder.glob(name)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _processor() -> list[str]:
    model = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line for line in lines if line.startswith("model name")), "")
    capability = torch.backends.cpu.get_cpu_capability()
    return [platform.machine(), platform.processor(), model, capability]


def _settings() -> list[object]:
    """Version and settings of PyTorch that select kernels."""
    backend: Any = torch.backends.mkldnn
    return [
        torch.__version__,
        torch.are_deterministic_algorithms_enabled(),
        backend.is_available() and backend.enabled,
        backend.matmul.fp32_precision,
        backend.conv.fp32_precision,
    ]


def _gpus() -> list[object]:
    backend: Any = torch.backends.cudnn
    return [
        *sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}),
        torch.version.cuda,
        backend.version(),
        backend.enabled,
        backend.deterministic,
        backend.conv.fp32_precision,
        torch.backends.cuda.matmul.fp32_precision,
    ]
