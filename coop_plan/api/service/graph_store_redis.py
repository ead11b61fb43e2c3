"""Graph store in Redis, and the choice of a graph store by a plan store's address."""

import contextlib
import sqlite3
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec

from coop_plan.api.service.graph_store import (
    MAX_LISTED,
    GraphStore,
    GraphSummary,
    SqliteGraphStore,
)
from coop_plan.planner.plan_cache.open_store import in_redis
from coop_plan.planner.plan_cache.store import StoreError
from coop_plan.schemas.fingerprint import digest_of


def open_graph_store(address: str, max_bytes: int) -> GraphStore:
    """The graph store at the address of a plan store.

    Raises:
        StoreError: the store cannot be opened.
    """
    if in_redis(address):
        return RedisGraphStore(address)
    try:
        return SqliteGraphStore(Path(address), max_bytes=max_bytes)
    except sqlite3.Error as error:
        raise StoreError(f"plan store {address} cannot be opened: {error}") from error


class RedisGraphStore:
    """Compressed documents in a Redis, which evicts them by its own policy."""

    def __init__(self, address: str) -> None:
        from coop_plan.planner.plan_cache.redis_store import connect

        self._redis = connect(address)

    def get(self, digest: str) -> bytes | None:
        """The document of a digest; see `GraphStore.get`."""
        from coop_plan.planner.plan_cache.redis_store import PREFIX, store_errors

        with store_errors():
            packed: Any = self._redis.get(f"{PREFIX}graph:{digest}")
        if packed is not None:
            with contextlib.suppress(zlib.error):
                document = zlib.decompress(packed)
                if digest_of(document) == digest:
                    return document
        return None

    def put(self, digest: str, document: bytes, summary: GraphSummary | None = None) -> bool:
        """Store a document; see `GraphStore.put`."""
        from coop_plan.planner.plan_cache.redis_store import PREFIX, store_errors

        new = self.get(digest) is None
        with store_errors():
            if new:
                self._redis.set(f"{PREFIX}graph:{digest}", zlib.compress(document, 1))
            if summary is not None:
                self._redis.set(f"{PREFIX}graph-card:{digest}", msgspec.json.encode(summary))
                listed = f"{PREFIX}graph-cards"
                self._redis.zadd(listed, {digest: time.time()})
                self._redis.zremrangebyrank(listed, 0, -MAX_LISTED - 1)
        return new

    def listed(self) -> list[GraphSummary]:
        """Summaries of stored graphs, the last sent first; see `GraphStore.listed`."""
        from coop_plan.planner.plan_cache.redis_store import PREFIX, store_errors

        with store_errors():
            names: Any = self._redis.zrevrange(f"{PREFIX}graph-cards", 0, MAX_LISTED - 1)
            digests = [name.decode() for name in names]
            stored = [self._redis.exists(f"{PREFIX}graph:{digest}") for digest in digests]
            texts = [self._redis.get(f"{PREFIX}graph-card:{digest}") for digest in digests]
        found = []
        for text, is_stored in zip(texts, stored, strict=True):
            with contextlib.suppress(msgspec.MsgspecError):
                if text is not None and is_stored:
                    found.append(msgspec.json.decode(text, type=GraphSummary))
        return found

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()
