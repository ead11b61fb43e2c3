"""Graph store, content-addressed: a document is sent once, and then named by its digest.

The digest is of the document's bytes, not of the graph's structure: an answer has the document's
ids and costs.
"""

import contextlib
import sqlite3
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from coop_plan.planner.plan_cache.store import WRITE_MS
from coop_plan.schemas import Graph, fingerprint, parse_graph
from coop_plan.schemas.fingerprint import digest_of

Digest = Annotated[
    str,
    Meta(
        pattern="^sha256:[0-9a-f]{64}$",
        description="Digest of a graph's document, sent before: `PUT /graphs/{digest}`",
    ),
]

MAX_PARSED_BYTES = 32 << 20
"""Size of the documents whose parsed graphs a process caches; these take seven times as much."""

MAX_DOCUMENT_BYTES = 256 << 20
"""Limit on a stored document: what others write into a shared Redis costs no more."""

MAX_LISTED = 100
"""Limit on the graphs in a list."""


@dataclass(frozen=True)
class GraphSummary:
    """A stored graph in a list: 200 characters of its name, its ops and its document's bytes."""

    digest: str
    name: str
    ops: int
    bytes: int


class GraphStore(Protocol):
    """Store of documents by their digest; safe to call from several threads and processes."""

    def get(self, digest: str) -> bytes | None:
        """The document of a digest, if it is stored and intact."""

    def put(self, digest: str, document: bytes, summary: GraphSummary | None = None) -> bool:
        """Store a document; True if it was not stored yet. Only one with a summary is listed."""

    def mark_used(self, digest: str) -> bool:
        """True if a document is stored, which is then the last used."""

    def listed(self) -> list[GraphSummary]:
        """Summaries of stored graphs, the last used first, `MAX_LISTED` at most."""

    def close(self) -> None:
        """Close files and connections."""


def unpacked(packed: bytes, digest: str) -> bytes | None:
    """The document that was compressed; None if it is damaged."""
    with contextlib.suppress(zlib.error):
        document = zlib.decompressobj().decompress(packed, MAX_DOCUMENT_BYTES)
        if digest_of(document) == digest:
            return document
    return None


class SqliteGraphStore:
    """Compressed documents in the SQLite file of the plans; LRU above `max_bytes`."""

    def __init__(self, path: Path, *, max_bytes: int = 1 << 30) -> None:
        self._lock = threading.Lock()
        self._max_bytes = max_bytes
        self._connection = sqlite3.connect(
            path, timeout=10, check_same_thread=False, isolation_level=None
        )
        self._connection.execute("pragma journal_mode=wal")
        self._connection.execute(
            "create table if not exists graph (digest text primary key, packed blob not null,"
            " bytes integer not null, used integer not null) without rowid"
        )
        self._connection.execute(f"pragma busy_timeout={WRITE_MS}")
        with contextlib.suppress(sqlite3.OperationalError):  # on a full disk the store is read-only
            self._connection.execute(
                "create table if not exists graph_card (digest text primary key, name text not"
                " null, ops integer not null, bytes integer not null) without rowid"
            )

    def get(self, digest: str) -> bytes | None:
        """The document of a digest; see `GraphStore.get`."""
        query = "select packed from graph where digest = ?"
        with self._lock:
            row = self._connection.execute(query, (digest,)).fetchone()
        if row is None:
            return None
        with contextlib.suppress(sqlite3.Error):  # a read-only store
            self.mark_used(digest)
        if (document := unpacked(row[0], digest)) is not None:
            return document
        with self._lock, self._connection:
            self._drop(digest)
        return None

    def put(self, digest: str, document: bytes, summary: GraphSummary | None = None) -> bool:
        """Store a document; see `GraphStore.put`."""
        packed = zlib.compress(document, 1)
        with self._lock, self._connection:
            self._connection.execute("begin immediate")
            done = self._connection.execute(
                "insert or ignore into graph values (?, ?, ?, ?)",
                (digest, packed, len(packed), int(time.time())),
            )
            if summary is not None:
                self._connection.execute(
                    "insert or replace into graph_card values (?, ?, ?, ?)",
                    (digest, summary.name, summary.ops, summary.bytes),
                )
            self._prune(digest)
        return done.rowcount == 1

    def mark_used(self, digest: str) -> bool:
        """True if a document is stored; see `GraphStore.mark_used`."""
        query = "update graph set used = ? where digest = ?"
        with self._lock:
            return self._connection.execute(query, (int(time.time()), digest)).rowcount == 1

    def listed(self) -> list[GraphSummary]:
        """Summaries of stored graphs; see `GraphStore.listed`."""
        with self._lock:
            rows = self._connection.execute(
                "select digest, name, ops, graph_card.bytes from graph_card join graph"
                " using (digest) order by used desc, digest limit ?",
                (MAX_LISTED,),
            ).fetchall()
        return [GraphSummary(*row) for row in rows]

    def _drop(self, digest: str) -> None:
        for table in ("graph", "graph_card"):
            query = f"delete from {table} where digest = ?"  # noqa: S608  # the names above
            self._connection.execute(query, (digest,))

    def _prune(self, newest: str) -> None:
        query = "select coalesce(sum(bytes), 0) from graph"
        (total,) = self._connection.execute(query).fetchone()
        if total <= self._max_bytes:
            return
        rows = self._connection.execute(
            "select digest, bytes from graph where digest != ? order by used", (newest,)
        ).fetchall()
        for digest, size in rows:
            self._drop(digest)
            total -= size
            if total <= self._max_bytes * 0.9:
                return

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


class ParsedGraph(msgspec.Struct, frozen=True, gc=False):
    """A parsed graph with its document and its fingerprint."""

    graph: Graph
    fingerprint: str
    document: bytes


class GraphCache:
    """The graphs of a store, with an LRU cache of parsed ones. For one thread."""

    def __init__(self, store: GraphStore) -> None:
        self.store = store
        self._parsed: OrderedDict[str, ParsedGraph] = OrderedDict()
        self._bytes = 0

    def get(self, digest: str, check: Callable[[int], None]) -> ParsedGraph | None:
        """The graph of a digest; `check` gets the size of a document that is to be parsed."""
        parsed = self._parsed.get(digest)
        if parsed is not None:
            self._parsed.move_to_end(digest)
            return parsed
        document = self.store.get(digest)
        if document is None:
            return None
        check(len(document))
        graph = parse_graph(document)
        return self._remember(digest, ParsedGraph(graph, fingerprint(graph), document))

    def ensure(self, digest: str, parsed: ParsedGraph) -> None:
        """Store a document that was parsed, if it is not stored (any more); it is not listed."""
        if not self.store.mark_used(digest):
            self.store.put(digest, parsed.document)
        if digest not in self._parsed:
            self._remember(digest, parsed)

    def put(self, digest: str, document: bytes, check: Callable[[Graph], None]) -> bool:
        """Store a document whose graph passes `check`; True if it was not stored yet.

        Raises:
            InvalidInputError: the document is no graph. Errors of `check` pass.
        """
        parsed = self._parsed.get(digest)
        graph = parse_graph(document) if parsed is None else parsed.graph
        check(graph)
        summary = GraphSummary(digest, graph.name[:200], len(graph.ops), len(document))
        return self.store.put(digest, document, summary)

    def _remember(self, digest: str, parsed: ParsedGraph) -> ParsedGraph:
        self._parsed[digest] = parsed
        self._bytes += len(parsed.document)
        while self._bytes > MAX_PARSED_BYTES:
            self._bytes -= len(self._parsed.popitem(last=False)[1].document)
        return parsed
