"""The store of graphs beside a store of plans."""

import contextlib
import sqlite3
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec

from coop_plan.api.service.graph_store import LISTED, GraphCard, GraphStore, SqliteGraphs
from coop_plan.planner.plan_cache.open_store import in_redis
from coop_plan.planner.plan_cache.store import StoreError
from coop_plan.schemas.fingerprint import digest_of


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

    def put(self, digest: str, document: bytes, card: GraphCard | None = None) -> bool:
        """Keep a document; see `GraphStore.put`."""
        from coop_plan.planner.plan_cache.redis_store import PREFIX, store_errors

        new = self.get(digest) is None
        with store_errors():
            if new:
                self._redis.set(f"{PREFIX}graph:{digest}", zlib.compress(document, 1))
            if card is not None:
                self._redis.set(f"{PREFIX}graph-card:{digest}", msgspec.json.encode(card))
                cards = f"{PREFIX}graph-cards"
                self._redis.zadd(cards, {digest: time.time()})
                self._redis.zremrangebyrank(cards, 0, -LISTED - 1)
        return new

    def listed(self) -> list[GraphCard]:
        """What is kept, the last ones sent first; see `GraphStore.listed`."""
        from coop_plan.planner.plan_cache.redis_store import PREFIX, store_errors

        with store_errors():
            names: Any = self._redis.zrevrange(f"{PREFIX}graph-cards", 0, LISTED - 1)
            digests = [name.decode() for name in names]
            there = [self._redis.exists(f"{PREFIX}graph:{digest}") for digest in digests]
            texts = [self._redis.get(f"{PREFIX}graph-card:{digest}") for digest in digests]
        found = []
        for text, kept in zip(texts, there, strict=True):
            with contextlib.suppress(msgspec.MsgspecError):
                if text is not None and kept:
                    found.append(msgspec.json.decode(text, type=GraphCard))
        return found

    def close(self) -> None:
        """Let go of the connections."""
        self._redis.close()
