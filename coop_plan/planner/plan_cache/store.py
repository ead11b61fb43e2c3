"""Where answers are kept: one small interface, and SQLite behind it."""

import contextlib
import functools
import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from coop_plan.planner.plan_cache.record import SEAL_BYTES, Record, seal, unseal
from coop_plan.schemas import InvalidInputError

ALTERNATIVES = 4
"""Answers to one question that are kept, for graphs that cost differently."""

TOUCH_SECONDS = 3600
"""How exactly it is known when a record was last used."""

CANDIDATES = 4
"""Keys of a family that are named."""

Families = Sequence[tuple[str, int | float]]
"""Names of families and the measure of a record in each: its budget, of questions that differ in
nothing else."""


@functools.cache
def planner_version() -> str:
    """Digest of the sources that plans are made by."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for package in ("planner", "schemas"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


class PlanStore(Protocol):
    """
    Keeps answers by key; safe to call from several threads and processes.

    Records are sealed with a secret: who does not have it can forge none. `dropped` counts damaged
    ones that were met. Each method raises `StoreError` or sqlite3's errors where the store fails.
    """

    dropped: int

    def get(self, key: str) -> list[Record]:
        """The answers kept by a key, the first one first; damaged ones are dropped."""

    def seals(self, key: str) -> list[bytes]:
        """The seals of what `get` would find, unchecked: who has seen all of these has seen it."""

    def put(
        self, key: str, record: Record, *, another: bool = False, families: Families = ()
    ) -> None:
        """
        Keep the first answer of a key: what is there stays, and is everybody's.

        With `another` it is kept beside the ones that are there; of too many the oldest goes.
        """

    def replace(self, key: str, old: Record, new: Record) -> bool:
        """Put a record in the place of one that is still there; whether it was."""

    def below(self, family: str, measure: float) -> list[str]:
        """Keys of a family's answers that measure no more than this, the largest first."""

    def delete(self, key: str) -> None:
        """Forget a key."""

    def check(self) -> None:
        """Raise where answers cannot be kept."""

    def close(self) -> None:
        """Let go of files and connections."""


class StoreError(OSError):
    """A plan store cannot be opened, or fails."""


def default_path() -> Path:
    """`$XDG_CACHE_HOME` or `~/.cache`, /coop-plan/plans.sqlite3."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "coop-plan" / "plans.sqlite3"


class SqliteStore:
    """
    Answers in one SQLite file, shared by threads and processes.

    With `wal` readers and a writer do not wait for each other; without, the file can be read where
    nothing can be written. Above `max_bytes` of records those go that were not used for the longest
    time.

    Raises:
        StoreError: the file cannot be opened or is no database of ours.
    """

    def __init__(
        self, path: Path, *, wal: bool = True, secret: bytes = b"", max_bytes: int = 1 << 30
    ) -> None:
        self._lock = threading.Lock()
        self._path, self._secret, self._max_bytes = path, secret, max_bytes
        self.dropped = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                path, timeout=10, check_same_thread=False, isolation_level=None
            )
            try:
                self._create(wal)
            except sqlite3.Error:
                self._connection.close()
                raise
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"plan store {path} cannot be opened: {error}") from error

    def _create(self, wal: bool) -> None:
        if wal:
            self._connection.execute("pragma journal_mode=wal")
        found = self._connection.execute("select 1 from sqlite_master where name = 'family'")
        if found.fetchone() is None:
            self._connection.executescript(
                "begin immediate;"
                "drop table if exists plan;"  # of versions before 0.2, whose plans nobody asks for
                "create table if not exists answer (key text not null, slot integer not null,"
                " record blob not null, bytes integer not null, used integer not null,"
                " primary key (key, slot));"
                "create index if not exists by_use on answer (used, bytes);"
                "create table if not exists family (name text not null, measure not null,"
                " key text not null, primary key (name, key)) without rowid;"
                "commit"
            )

    def get(self, key: str) -> list[Record]:
        """The answers kept by a key, the first one first; damaged ones are dropped."""
        found: list[Record] = []
        for slot, data in self._look("record", key):
            try:
                found.append(unseal(data, key, self._secret))
            except InvalidInputError:
                self.dropped += 1
                with self._lock, contextlib.suppress(sqlite3.Error):
                    self._connection.execute(
                        "delete from answer where key = ? and slot = ? and record = ?",
                        (key, slot, data),
                    )
        return found

    def seals(self, key: str) -> list[bytes]:
        """The seals of a key's answers; see `PlanStore.seals`."""
        return [seal for _, seal in self._look(f"substr(record, 1, {SEAL_BYTES})", key)]

    def _look(self, what: str, key: str) -> list[tuple[int, bytes]]:
        """Slots of a key with something of each record, which has been used now."""
        now = int(time.time())
        query = f"select slot, {what}, used from answer where key = ? order by slot"  # noqa: S608
        with self._lock:
            rows = self._connection.execute(query, (key,)).fetchall()
            if any(used < now - TOUCH_SECONDS for _, _, used in rows):
                with contextlib.suppress(sqlite3.Error):  # as where nothing can be written
                    self._connection.execute("update answer set used = ? where key = ?", (now, key))
        return [(slot, data) for slot, data, _ in rows]

    def put(
        self, key: str, record: Record, *, another: bool = False, families: Families = ()
    ) -> None:
        """Keep the first answer of a key, or another beside it; see `PlanStore.put`."""
        data = seal(record, key, self._secret)
        now = int(time.time())
        with self._lock, self._transaction():
            slots = [
                slot
                for (slot,) in self._connection.execute(
                    "select slot from answer where key = ? order by rowid", (key,)
                )
            ]
            if slots and not another:
                return
            if len(slots) >= ALTERNATIVES:
                self._connection.execute(
                    "delete from answer where key = ? and slot = ?", (key, slots[0])
                )
            slot = max(slots, default=-1) + 1
            self._connection.execute(
                "insert into answer values (?, ?, ?, ?, ?)", (key, slot, data, len(data), now)
            )
            self._connection.executemany(
                "insert or replace into family values (?, ?, ?)",
                [(name, measure, key) for name, measure in families],
            )
            self._prune()

    def replace(self, key: str, old: Record, new: Record) -> bool:
        """Put a record in the place of one that is still there; whether it was."""
        was, data = seal(old, key, self._secret), seal(new, key, self._secret)
        with self._lock, self._transaction():
            replaced = self._connection.execute(
                "update answer set record = ?, bytes = ? where key = ? and record = ?",
                (data, len(data), key, was),
            )
            self._prune()
            return replaced.rowcount > 0

    def below(self, family: str, measure: float) -> list[str]:
        """Keys of a family's answers that measure no more than this, the largest first."""
        with self._lock:
            rows = self._connection.execute(
                "select key from family where name = ? and measure <= ?"
                " order by measure desc limit ?",
                (family, measure, CANDIDATES),
            )
            return [key for (key,) in rows]

    def _prune(self) -> None:
        query = "select coalesce(sum(bytes), 0) from answer"
        (total,) = self._connection.execute(query).fetchone()
        if total <= self._max_bytes:
            return
        oldest = self._connection.execute("select rowid, bytes from answer order by used, rowid")
        gone = []
        for row, size in oldest:
            if total <= self._max_bytes * 0.9:
                break
            gone.append((row,))
            total -= size
        self._connection.executemany("delete from answer where rowid = ?", gone)
        self._connection.execute("delete from family where key not in (select key from answer)")

    def delete(self, key: str) -> None:
        """Forget a key."""
        with self._lock:
            self._connection.execute("delete from answer where key = ?", (key,))

    def check(self) -> None:
        """Raise where answers cannot be kept."""
        if not os.access(self._path, os.W_OK):
            raise StoreError(f"plan store {self._path} cannot be written")

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("begin immediate")
        try:
            yield
            self._connection.execute("commit")
        except BaseException:
            self._connection.execute("rollback")
            raise
