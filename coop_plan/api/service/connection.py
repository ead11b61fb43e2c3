"""Connections of the server: one that does not get to a request is closed."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0
"""How long the head of a request may take to arrive, from the connection or its first byte on."""


class Connection(H11Protocol):
    """
    uvicorn's, which waits for the rest of a head for ever.

    It reads by h11, whose buffer for a head is bounded.
    """

    _head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a head."""
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Take in a part of a request."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect()
        else:
            self._unset()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go."""
        self._unset()
        super().connection_lost(exc)

    def _expect(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _unset(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None
