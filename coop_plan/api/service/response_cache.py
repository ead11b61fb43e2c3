"""Verified answers that a server keeps at hand, as they are sent."""

import hashlib
from collections import OrderedDict

from coop_plan.api.jobs.request_handler import Reply

KEPT_BYTES = 32 << 20
"""Of answers that are kept at hand."""

QUESTION_BYTES = 1 << 20
"""Larger questions are not looked for: their digests take the event loop too long."""


class AtHand:
    """
    Answers by the digest of what was asked, as long as the store holds the records they were made
    of: whoever takes one compares its seals with the store's.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, tuple[Reply, bytes]] = OrderedDict()
        self._bytes = 0

    def get(self, name: bytes) -> tuple[Reply, bytes] | None:
        """What was answered, if it is kept."""
        kept = self._kept.get(name)
        if kept is not None:
            self._kept.move_to_end(name)
        return kept

    def keep(self, name: bytes, reply: Reply, data: bytes) -> None:
        """Keep an answer that was found in the store; those go that were not used for longest."""
        if not (name and reply.found and reply.seals):
            return
        old = self._kept.pop(name, None)
        self._bytes += len(data) - (0 if old is None else len(old[1]))
        self._kept[name] = reply, data
        while self._bytes > KEPT_BYTES and len(self._kept) > 1:
            self._bytes -= len(self._kept.popitem(last=False)[1][1])


def name_of(kind: str, question: bytes) -> bytes:
    """What an answer is kept by; nothing for a question that is too long."""
    if len(question) > QUESTION_BYTES:
        return b""
    return hashlib.sha256(kind.encode() + b"\0" + question).digest()
