"""The store of graphs beside a store of plans."""

import contextlib
import sqlite3
import zlib
from pathlib import Path
from typing import Any

from coop_plan.api.graphs import GraphStore, SqliteGraphs, digest_of
from coop_plan.planner.cache.opening import in_redis
from coop_plan.planner.cache.store import StoreError


def open_graphs(address: str, max_bytes: int) -> GraphStore:
    """
    The graphs at the address of a plan store.

    Raises:
        StoreError: they cannot be opened.
    """
    if in_redis(address):
        return RedisGraphs(address)
    try:
        return SqliteGraphs(Path(address), max_bytes=max_bytes)
    except sqlite3.Error as error:
        raise StoreError(f"plan store {address} cannot be opened: {error}") from error


class RedisGraphs:
    """Documents in a Redis, packed; which of them go when it is full is its own affair."""

    def __init__(self, address: str) -> None:
        from coop_plan.planner.cache.redis_store import connect

        self._redis = connect(address)

    def get(self, digest: str) -> bytes | None:
        """The document of a digest; see `GraphStore.get`."""
        from coop_plan.planner.cache.redis_store import PREFIX, failing

        with failing():
            packed: Any = self._redis.get(f"{PREFIX}graph:{digest}")
        if packed is not None:
            with contextlib.suppress(zlib.error):
                document = zlib.decompress(packed)
                if digest_of(document) == digest:
                    return document
        return None

    def put(self, digest: str, document: bytes) -> bool:
        """Keep a document; see `GraphStore.put`."""
        from coop_plan.planner.cache.redis_store import PREFIX, failing

        if self.get(digest) is not None:
            return False
        with failing():
            self._redis.set(f"{PREFIX}graph:{digest}", zlib.compress(document, 1))
        return True

    def close(self) -> None:
        """Let go of the connections."""
        self._redis.close()
