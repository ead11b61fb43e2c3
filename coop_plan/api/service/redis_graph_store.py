"""Graph store in Redis."""

import contextlib
import time
import zlib
from typing import Any

import msgspec

from coop_plan.api.service.graph_store import MAX_LISTED, GraphSummary, unpacked
from coop_plan.planner.plan_cache.redis_store import PREFIX, Calls, connect


class RedisGraphStore:
    """Compressed documents in a Redis, which evicts them by its own policy."""

    def __init__(self, address: str) -> None:
        self._redis = connect(address)
        self._calls = Calls(self._redis, "graph store")

    def get(self, digest: str) -> bytes | None:
        """The document of a digest; see `GraphStore.get`."""
        with self._calls(f"{PREFIX}graph:{digest}"):
            packed: Any = self._redis.get(f"{PREFIX}graph:{digest}")
            document = None if packed is None else unpacked(packed, digest)
            if document is None:  # `mark_used` must not find a damaged one
                self._redis.delete(f"{PREFIX}graph:{digest}")
        return document

    def put(self, digest: str, document: bytes, summary: GraphSummary | None = None) -> bool:
        """Store a document; see `GraphStore.put`."""
        new = self.get(digest) is None
        listed = f"{PREFIX}graph-cards"
        with self._calls(listed):
            if new:
                self._redis.set(f"{PREFIX}graph:{digest}", zlib.compress(document, 1))
            if summary is not None:
                self._redis.set(f"{PREFIX}graph-card:{digest}", msgspec.json.encode(summary))
                self._redis.zadd(listed, {digest: time.time()})
                self._redis.zremrangebyrank(listed, 0, -MAX_LISTED - 1)
        return new

    def mark_used(self, digest: str) -> bool:
        """True if a document is stored; see `GraphStore.mark_used`."""
        with self._calls():
            return bool(self._redis.touch(f"{PREFIX}graph:{digest}"))

    def listed(self) -> list[GraphSummary]:
        """Summaries of stored graphs, the last sent first; see `GraphStore.listed`."""
        listed = f"{PREFIX}graph-cards"
        with self._calls(listed):
            names: Any = self._redis.zrevrange(listed, 0, MAX_LISTED - 1)
            digests = [name.decode(errors="replace") for name in names]
            stored = [self._redis.exists(f"{PREFIX}graph:{digest}") for digest in digests]
            cards = [f"{PREFIX}graph-card:{digest}" for digest in digests]
            texts: Any = self._redis.mget(cards) if cards else []
        found = []
        for text, is_stored in zip(texts, stored, strict=True):
            with contextlib.suppress(ValueError, msgspec.MsgspecError):
                if text is not None and is_stored:
                    found.append(msgspec.json.decode(text, type=GraphSummary))
        return found

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()
