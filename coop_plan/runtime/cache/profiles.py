"""Op profiles that outlive the process: a second start measures nothing.

One SQLite file, not in WAL mode: that one can be read where nothing can be written, as in an image.
Records are read one by one and written in one transaction when a session ends.
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

from coop_plan.runtime.cache.files import cache_dir, going_on_without

MEASURING = (
    "capture/profiler.py",
    "capture/op_replacements.py",
    "capture/dropout.py",
    "variants/*.py",
    "device/cuda.py",
    "device/arena.*",
    "device/bernoulli.cpp",
)
"""The sources, in the runtime's folder, by which ops are measured."""

LOCK_SECONDS = 5.0
"""How long a session waits for another process that is writing."""


class ProfileCache:
    """Records (text) by signature (text), for this machine and these settings of PyTorch.

    Whatever fails, `get` finds nothing more and `close` keeps nothing; the log has one line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._new: dict[str, str] = {}
        self._here = json.dumps([_measured_by(), _processor(), _settings()])
        self._connection: sqlite3.Connection | None = None
        with self._unless_it_fails():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=LOCK_SECONDS)
            self._connection.execute(
                "create table if not exists profile"
                " (key text primary key, record text not null) without rowid"
            )

    def get(self, signature: str) -> str | None:
        """The record of a signature, if there is one."""
        with self._unless_it_fails():
            if self._connection is not None:
                found = self._connection.execute(
                    "select record from profile where key = ?", (self._key(signature),)
                ).fetchone()
                return None if found is None else str(found[0])
        return None

    def put(self, signature: str, record: str) -> None:
        """Keep a record when the session ends, replacing what was there."""
        self._new[self._key(signature)] = record

    def close(self) -> None:
        """Write what is new, and close the file."""
        with self._unless_it_fails():
            if self._connection is not None and self._new:
                with self._connection:
                    self._connection.executemany(
                        "insert or replace into profile values (?, ?)", self._new.items()
                    )
        if self._connection is not None:
            self._connection.close()

    def _key(self, signature: str) -> str:
        # Asked only for ops on a GPU: asking takes memory on it.
        gpus = _gpus() if "cuda" in signature else ""
        return hashlib.sha256(f"{self._here}\n{gpus}\n{signature}".encode()).hexdigest()

    @contextlib.contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        with going_on_without(self.path):
            try:
                yield
            except sqlite3.Error:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
                raise


_session: ContextVar[ProfileCache | None] = ContextVar("profiles", default=None)


@contextlib.contextmanager
def kept_profiles() -> Iterator[None]:
    """While this lasts, profiles are read from the cache on disk; what is new is written after."""
    cache = ProfileCache(cache_dir() / "profiles.sqlite3")
    token = _session.set(cache)
    try:
        yield
    finally:
        _session.reset(token)
        cache.close()


def session() -> ProfileCache | None:
    """The cache of the session that lasts, if any."""
    return _session.get()


@functools.cache
def _measured_by() -> str:
    """Digest of the sources that measure: records of others may not be comparable."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for name in MEASURING:
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
    """What else decides which kernel an op runs."""
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
