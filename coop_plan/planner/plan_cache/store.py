"""Interface of plan stores, and the SQLite implementation."""

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

from coop_plan.planner.plan_cache.record import SIGNATURE_BYTES, Record, read_signed, sign
from coop_plan.schemas import InvalidInputError

ALTERNATIVES = 4
"""Limit of records per key, for graphs with different costs."""

WRITE_MS = 1500
"""Limit on the wait for another writer of an SQLite file."""

CANDIDATES = 4
"""Limit of keys that `keys_at_most` returns."""

Families = Sequence[tuple[str, int | float]]
"""Families of a record and its measure in each. Requests that differ in the budget only are a
family, and the budget is the measure."""


@functools.cache
def planner_version() -> str:
    """Digest of the planner's sources, which invalidates plans of other versions."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for package in ("planner", "schemas"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


class PlanStore(Protocol):
    """Store of records by key, safe for use from several threads and processes.

    Records are signed with a secret, without which they cannot be forged. `dropped` counts damaged
    records found. Each method raises `StoreError` or sqlite3's errors if the store fails.
    """

    dropped: int
    secret: bytes
    waits: bool
    """True if `signatures` waits for another process; else it takes microseconds."""

    def get(self, key: str) -> list[Record]:
        """The records of a key, oldest first; damaged ones are deleted."""

    def signatures(self, key: str) -> list[bytes]:
        """The unverified signatures of `get`'s records: if they are equal, the records are too."""

    def put(
        self, key: str, record: Record, *, another: bool = False, families: Families = ()
    ) -> None:
        """Store a record if the key has none.

        With `another` it is added to existing ones, and the oldest is deleted above the limit.
        """

    def replace(self, key: str, old: Record, new: Record) -> bool:
        """Replace a record; returns False if the old one is not stored any more."""

    def keys_at_most(self, family: str, measure: float) -> list[str]:
        """Keys of a family with a measure of at most this one, the largest first."""

    def delete(self, key: str) -> None:
        """Delete the records of a key."""

    def check(self) -> None:
        """Raise `StoreError` if records cannot be stored."""

    def close(self) -> None:
        """Close files and connections."""


def holds(store: PlanStore, key: str, record: Record) -> bool:
    """True if a store has this record of a key."""
    return sign(record, key, store.secret)[:SIGNATURE_BYTES] in store.signatures(key)


class StoreError(OSError):
    """A plan store cannot be opened, or an operation on it failed."""


class ForeignTablesError(sqlite3.DatabaseError):
    """A database has tables of our names that are not ours."""


def create_tables(connection: sqlite3.Connection, statements: Sequence[str]) -> None:
    """Execute `create` statements in a new database, and check the tables of an older one.

    Raises:
        ForeignTablesError: a table of the same name has another definition.
    """
    parts = [statement.split(" ", 2) for statement in statements]
    names = [definition.split(" ", 1)[0] for _, _, definition in parts]
    query = "select name, sql from sqlite_master where sql is not null"
    found = dict(connection.execute(query).fetchall())
    if found.keys().isdisjoint(names):
        created = (f"create {kind} if not exists {definition};" for _, kind, definition in parts)
        connection.executescript(f"begin immediate; {' '.join(created)} commit")
        found = dict(connection.execute(query).fetchall())
    for name, statement in zip(names, statements, strict=True):
        if found.get(name, "").lower() != statement:
            raise ForeignTablesError(f"its table {name} is not of a cache of this version")


def without_password(address: str) -> str:
    """The address as it may be printed: without the user and the password of a Redis."""
    scheme, separator, rest = address.partition("://")
    if not separator:
        return address
    place, slash, path = rest.partition("/")
    return f"{scheme}://{place.rpartition('@')[2]}{slash}{path.partition('?')[0]}"


class SqliteStore:
    """Plan store in one SQLite file, shared by threads and processes.

    With `wal` readers and a writer do not wait for each other; without it, the file is readable in
    a read-only folder. Above `max_bytes` of records the least recently used are deleted. A lock of
    another process is waited for `lock_seconds`.

    Raises:
        StoreError: the file cannot be opened or is not a plan store.
    """

    waits = False

    def __init__(
        self,
        path: Path,
        *,
        wal: bool = True,
        secret: bytes = b"",
        max_bytes: int = 1 << 30,
        lock_seconds: float = 10.0,
    ) -> None:
        self._lock = threading.Lock()
        self._path, self.secret, self._max_bytes = path, secret, max_bytes
        self.dropped = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                path, timeout=lock_seconds, check_same_thread=False, isolation_level=None
            )
            try:
                self._create(wal)
                self._wait_ms = min(WRITE_MS, round(1000 * lock_seconds))
                self._connection.execute(f"pragma busy_timeout={self._wait_ms}")
            except sqlite3.Error:
                self._connection.close()
                raise
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"plan store {path} cannot be opened: {error}") from error

    def _create(self, wal: bool) -> None:
        if wal:
            self._connection.execute("pragma journal_mode=wal")
        found = "select 1 from sqlite_master where name = 'plan'"  # of versions before 0.2
        if self._connection.execute(found).fetchone() is not None:
            self._connection.execute("drop table plan")
        tables = (
            (
                "create table answer (key text not null, slot integer not null,"
                " record blob not null, bytes integer not null, used integer not null,"
                " primary key (key, slot))"
            ),
            "create index by_use on answer (used, bytes)",
            (
                "create table family (name text not null, measure not null, key text not null,"
                " primary key (name, key)) without rowid"
            ),
        )
        create_tables(self._connection, tables)

    def get(self, key: str) -> list[Record]:
        """The records of a key, oldest first; damaged ones are deleted."""
        found: list[Record] = []
        for slot, data in self._select("record", key):
            try:
                found.append(read_signed(data, key, self.secret))
            except InvalidInputError:
                self.dropped += 1
                with self._lock, contextlib.suppress(sqlite3.Error):
                    self._connection.execute(
                        "delete from answer where key = ? and slot = ? and record = ?",
                        (key, slot, data),
                    )
        return found

    def signatures(self, key: str) -> list[bytes]:
        """The signatures of a key's records; see `PlanStore.signatures`."""
        return [
            signature for _, signature in self._select(f"substr(record, 1, {SIGNATURE_BYTES})", key)
        ]

    def _select(self, column: str, key: str) -> list[tuple[int, bytes]]:
        """Slot and `column` of each record of a key; updates the time of last use once an hour."""
        now = int(time.time())
        query = f"select slot, {column}, used from answer where key = ? order by slot"  # noqa: S608
        with self._lock:
            rows = self._connection.execute(query, (key,)).fetchall()
            if any(used < now - 3600 for _, _, used in rows):
                self._connection.execute("pragma busy_timeout=0")
                with contextlib.suppress(sqlite3.Error):  # a read-only store, or another writer
                    self._connection.execute("update answer set used = ? where key = ?", (now, key))
                self._connection.execute(f"pragma busy_timeout={self._wait_ms}")
        return [(slot, data) for slot, data, _ in rows]

    def put(
        self, key: str, record: Record, *, another: bool = False, families: Families = ()
    ) -> None:
        """Store the first record of a key, or another one; see `PlanStore.put`."""
        data = sign(record, key, self.secret)
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
        """Replace a record; returns False if the old one is not stored any more."""
        before, data = sign(old, key, self.secret), sign(new, key, self.secret)
        with self._lock, self._transaction():
            replaced = self._connection.execute(
                "update answer set record = ?, bytes = ? where key = ? and record = ?",
                (data, len(data), key, before),
            )
            self._prune()
            return replaced.rowcount > 0

    def keys_at_most(self, family: str, measure: float) -> list[str]:
        """Keys of a family with a measure of at most this one, the largest first."""
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
        evicted = []
        for row, size in oldest:
            if total <= self._max_bytes * 0.9:
                break
            evicted.append((row,))
            total -= size
        self._connection.executemany("delete from answer where rowid = ?", evicted)
        self._connection.execute("delete from family where key not in (select key from answer)")

    def delete(self, key: str) -> None:
        """Delete the records of a key."""
        with self._lock:
            self._connection.execute("delete from answer where key = ?", (key,))

    def check(self) -> None:
        """Raise `StoreError` if the file is not writable."""
        if not os.access(self._path, os.W_OK):
            raise StoreError(f"plan store {self._path} is not writable")

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
            if self._connection.in_transaction:  # SQLite itself rolls back on a full disk
                self._connection.execute("rollback")
            raise
