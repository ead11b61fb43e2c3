"""Graphs by content: a document is sent once, and from then on named by its digest.

The digest is that of the document's bytes and no fingerprint of its structure: an answer has the
ids and the costs of the document that was asked about.
"""

import contextlib
import hashlib
import sqlite3
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from coop_plan.schemas import Graph, fingerprint, parse_graph
from coop_plan.schemas.fingerprint import digest_of

Digest = Annotated[
    str,
    Meta(
        pattern="^sha256:[0-9a-f]{64}$",
        description="Digest of a graph's document, sent before: `PUT /graphs/{digest}`",
    ),
]

REMEMBERED_BYTES = 32 << 20
"""Of documents whose parsed graphs a reader keeps at hand; they take some ten times as much."""


LISTED = 100
"""Graphs that are told of at once."""


class GraphCard(msgspec.Struct, frozen=True):
    """What is told of a graph that is kept: 200 letters of its name, ops, bytes of the document."""

    digest: str
    name: str
    ops: int
    bytes: int


class GraphStore(Protocol):
    """Keeps documents by their digest; safe to call from several threads and processes."""

    def get(self, digest: str) -> bytes | None:
        """The document of a digest; one that is damaged is none."""

    def put(self, digest: str, document: bytes, card: GraphCard | None = None) -> bool:
        """Keep a document; whether it was not there yet. Only one with a card is listed."""

    def listed(self) -> list[GraphCard]:
        """The cards of graphs that are kept, the last ones used first, `LISTED` at most."""

    def close(self) -> None:
        """Let go of files and connections."""


class SqliteGraphs:
    """
    Documents in the SQLite file of the plans, packed.

    Above `max_bytes` of them those go that were not used for the longest time.
    """

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
        with contextlib.suppress(sqlite3.OperationalError):  # a full disk; what is there is read
            self._connection.execute(
                "create table if not exists graph_card (digest text primary key, name text not"
                " null, ops integer not null, bytes integer not null) without rowid"
            )

    def get(self, digest: str) -> bytes | None:
        """The document of a digest; see `GraphStore.get`."""
        now = int(time.time())
        with self._lock:
            row = self._connection.execute(
                "select packed from graph where digest = ?", (digest,)
            ).fetchone()
            if row is None:
                return None
            with contextlib.suppress(sqlite3.Error):  # as where nothing can be written
                self._connection.execute(
                    "update graph set used = ? where digest = ?", (now, digest)
                )
        with contextlib.suppress(zlib.error):
            document = zlib.decompress(row[0])
            if digest_of(document) == digest:
                return document
        with self._lock, self._connection:
            self._drop(digest)
        return None

    def put(self, digest: str, document: bytes, card: GraphCard | None = None) -> bool:
        """Keep a document; see `GraphStore.put`."""
        packed = zlib.compress(document, 1)
        with self._lock, self._connection:
            self._connection.execute("begin immediate")
            done = self._connection.execute(
                "insert or ignore into graph values (?, ?, ?, ?)",
                (digest, packed, len(packed), int(time.time())),
            )
            if card is not None:
                self._connection.execute(
                    "insert or replace into graph_card values (?, ?, ?, ?)",
                    (digest, card.name, card.ops, card.bytes),
                )
            self._prune(digest)
        return done.rowcount == 1

    def listed(self) -> list[GraphCard]:
        """What is kept; see `GraphStore.listed`."""
        with self._lock:
            rows = self._connection.execute(
                "select digest, name, ops, graph_card.bytes from graph_card join graph"
                " using (digest) order by used desc, digest limit ?",
                (LISTED,),
            ).fetchall()
        return [GraphCard(*row) for row in rows]

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


class KeptGraph(msgspec.Struct, frozen=True, gc=False):
    """A parsed graph with its document and its fingerprint."""

    graph: Graph
    fingerprint: str
    document: bytes


class Graphs:
    """The graphs of a store, the last ones parsed and at hand. For one thread."""

    def __init__(self, store: GraphStore) -> None:
        self._store = store
        self._at_hand: OrderedDict[str, KeptGraph] = OrderedDict()
        self._bytes = 0

    def get(self, digest: str) -> KeptGraph | None:
        """The graph of a digest."""
        kept = self._at_hand.get(digest)
        if kept is not None:
            self._at_hand.move_to_end(digest)
            return kept
        document = self._store.get(digest)
        return None if document is None else self._remember(digest, document)

    def document(self, digest: str) -> bytes | None:
        """The document of a digest."""
        kept = self._at_hand.get(digest)
        return self._store.get(digest) if kept is None else kept.document

    def put(self, digest: str, document: bytes, check: Callable[[Graph], None]) -> bool:
        """
        Keep a document that `check` lets pass; whether it was not there yet.

        Raises:
            InvalidInputError: it is no graph; what `check` raises.
        """
        kept = self._at_hand.get(digest)
        graph = parse_graph(document) if kept is None else kept.graph
        check(graph)
        card = GraphCard(digest, graph.name[:200], len(graph.ops), len(document))
        return self._store.put(digest, document, card)

    def listed(self) -> list[GraphCard]:
        """See `GraphStore.listed`."""
        return self._store.listed()

    def _remember(self, digest: str, document: bytes) -> KeptGraph:
        graph = parse_graph(document)
        kept = KeptGraph(graph, fingerprint(graph), document)
        self._at_hand[digest] = kept
        self._bytes += len(document)
        while self._bytes > REMEMBERED_BYTES and len(self._at_hand) > 1:
            self._bytes -= len(self._at_hand.popitem(last=False)[1].document)
        return kept
