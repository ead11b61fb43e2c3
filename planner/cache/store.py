"""Where plans are kept: one small interface, SQLite behind it."""

import base64
import functools
import hashlib
import json
import os
import sqlite3
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from coop_plan.planner.cache.carry_over import carry_over
from coop_plan.planner.verifier import find_faults
from coop_plan.schemas import Graph, InvalidInputError, Plan, parse_graph, parse_plan
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
    """
    A plan and the graph it was made for: its ids in order, a digest of its costs, and itself.

    `packed` is the graph's document, compressed: it is only read where no other graph is at hand.
    """

    plan: Plan
    ops: list[int]
    tensors: list[int]
    costs: str
    packed: str

    @classmethod
    def of(cls, plan: Plan, graph: Graph) -> "StoredPlan":
        """What to keep of a plan for `graph`."""
        packed = base64.b64encode(zlib.compress(graph.to_json().encode())).decode()
        ops = [op.id for op in graph.ops]
        return cls(plan, ops, tensor_order(graph), _exact_costs(graph), packed)

    def for_graph(self, graph: Graph) -> Plan | None:
        """The plan in the ids and costs of a graph, or None where it does not hold for it."""
        try:
            same = self.costs == _exact_costs(graph)
            carried = carry_over(self.plan, self.ops, self.tensors, graph, same_costs=same)
        except (KeyError, ValueError):  # it names what the graph has not
            return None
        return None if find_faults(graph, carried, limit=1) else carried

    def as_made(self) -> Plan | None:
        """The plan for the graph it was made for, or None where it does not hold."""
        try:
            graph = parse_graph(zlib.decompress(base64.b64decode(self.packed)))
        except (ValueError, zlib.error):
            return None
        return self.for_graph(graph)

    def to_json(self) -> str:
        """The record as text."""
        rest = {name: getattr(self, name) for name in ("ops", "tensors", "costs", "packed")}
        return f'{json.dumps(rest)[:-1]}, "plan": {self.plan.to_json()}}}'

    @classmethod
    def from_json(cls, text: str) -> "StoredPlan":
        """The record of a text; raises `InvalidInputError` when it is damaged."""
        try:
            record = json.loads(text)
            ids = list(record["ops"]), list(record["tensors"])
            return cls(parse_plan(record["plan"]), *ids, record["costs"], record["packed"])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInputError(f"damaged record: {error}") from None


def _exact_costs(graph: Graph) -> str:
    """Digest of all costs to the last digit: a proof holds for these alone."""
    device = graph.device
    costs: list[object] = [device.d2h_bytes_per_s, device.h2d_bytes_per_s, device.copy_latency_us]
    costs += [[op.cost_us, *(variant.cost_us for variant in op.variants)] for op in graph.ops]
    return hashlib.sha256(json.dumps(costs).encode()).hexdigest()


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
