"""Response cache: verified answers in the server's memory, as they are sent."""

import hashlib
from collections import OrderedDict

from coop_plan.api.jobs.request_handler import Reply

MAX_BYTES = 32 << 20
"""Size of the cache, without its keys."""

MAX_REQUEST_BYTES = 1 << 20
"""Larger requests are not cached: their digests would block the event loop."""


class ResponseCache:
    """LRU cache of answers by the digest of their request.

    A hit is valid while the store holds the records it was made from: the caller compares its
    `seals` with the store's.
    """

    def __init__(self) -> None:
        self._answers: OrderedDict[bytes, tuple[Reply, bytes]] = OrderedDict()
        self._bytes = 0

    def get(self, key: bytes) -> tuple[Reply, bytes] | None:
        """The cached answer, if there is one."""
        answer = self._answers.get(key)
        if answer is not None:
            self._answers.move_to_end(key)
        return answer

    def put(self, key: bytes, reply: Reply, data: bytes) -> None:
        """Cache an answer from the store; the least recently used ones are dropped."""
        if not (key and reply.found and reply.seals):
            return
        old = self._answers.pop(key, None)
        self._bytes += len(data) - (0 if old is None else len(old[1]))
        self._answers[key] = reply, data
        while self._bytes > MAX_BYTES and len(self._answers) > 1:
            self._bytes -= len(self._answers.popitem(last=False)[1][1])


def cache_key(kind: str, request: bytes) -> bytes:
    """Key of a request in the cache; empty for one that is too large."""
    if len(request) > MAX_REQUEST_BYTES:
        return b""
    return hashlib.sha256(kind.encode() + b"\0" + request).digest()
