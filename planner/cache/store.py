"""Where plans are kept: one small interface, SQLite behind it."""

import functools
import hashlib
import json
import os
import sqlite3
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from coop_plan.planner.cache.carry_over import carry_over
from coop_plan.schemas import Graph, InvalidInputError, Plan, parse_plan
from coop_plan.schemas.fingerprint import tensor_order


@functools.cache
def planner_version() -> str:
    """Digest of the sources that plans are made by."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for package in ("planner", "schemas"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class StoredPlan:
    """A plan and the ids of the graph it was made for, in order."""

    plan: Plan
    ops: list[int]
    tensors: list[int]

    @classmethod
    def of(cls, plan: Plan, graph: Graph) -> "StoredPlan":
        """What to keep of a plan for `graph`."""
        return cls(plan, [op.id for op in graph.ops], tensor_order(graph))

    def for_graph(self, graph: Graph) -> Plan:
        """The plan in the ids and costs of a graph of the same structure."""
        return carry_over(self.plan, self.ops, self.tensors, graph)

    def to_json(self) -> str:
        """The record as text."""
        ids = json.dumps({"ops": self.ops, "tensors": self.tensors})
        return f'{ids[:-1]}, "plan": {self.plan.to_json()}}}'

    @classmethod
    def from_json(cls, text: str) -> "StoredPlan":
        """The record of a text; raises `InvalidInputError` when it is damaged."""
        try:
            record = json.loads(text)
            return cls(parse_plan(record["plan"]), list(record["ops"]), list(record["tensors"]))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInputError(f"damaged record: {error}") from None


class PlanStore(Protocol):
    """Keeps plans by key; safe to call from several threads."""

    def get(self, key: str) -> StoredPlan | None:
        """The plan of a key, or None; a damaged record counts as none."""

    def put(self, key: str, stored: StoredPlan) -> None:
        """Keep a plan, replacing what was there."""


class StoreError(Exception):
    """A plan store cannot be opened."""


def default_path() -> Path:
    """`$XDG_CACHE_HOME` or `~/.cache`, /coop-plan/plans.sqlite3."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "coop-plan" / "plans.sqlite3"


class SqliteStore:
    """Plans in one SQLite file, shared by threads and processes.

    With `wal` readers and a writer do not wait for each other; without, the file can be read where
    nothing can be written.

    Raises:
        StoreError: the file cannot be opened or is no database of ours.
    """

    def __init__(self, path: Path, *, wal: bool = True) -> None:
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=10, check_same_thread=False)
            try:
                self._create(wal)
            except sqlite3.Error:
                self._connection.close()
                raise
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"plan store {path} cannot be opened: {error}") from error

    def _create(self, wal: bool) -> None:
        with self._connection:
            if wal:
                self._connection.execute("pragma journal_mode=wal")
            self._connection.execute(
                "create table if not exists plan (key text primary key, record text not null,"
                " made text not null default current_timestamp) without rowid"
            )

    def get(self, key: str) -> StoredPlan | None:
        """The plan of a key, or None; a damaged record counts as none."""
        with self._lock:
            row = self._connection.execute(
                "select record from plan where key = ?", (key,)
            ).fetchone()
        if row is None:
            return None
        try:
            return StoredPlan.from_json(row[0])
        except InvalidInputError:
            return None

    def put(self, key: str, stored: StoredPlan) -> None:
        """Keep a plan, replacing what was there."""
        with self._lock, self._connection:
            self._connection.execute(
                "insert or replace into plan (key, record) values (?, ?)", (key, stored.to_json())
            )

    def delete(self, key: str) -> None:
        """Forget a plan."""
        with self._lock, self._connection:
            self._connection.execute("delete from plan where key = ?", (key,))

    def close(self) -> None:
        """Close the file."""
        self._connection.close()
