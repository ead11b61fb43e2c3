"""Request bodies: checks of type and encoding, limits on size, time and total memory."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import Request
from starlette.requests import ClientDisconnect

from coop_plan.api.service.problems import ProblemError

ENCODINGS = ("", "identity", "gzip", "zstd")

BODY_SECONDS = 30.0
"""Limit on the arrival of a body."""

MAX_BODIES = 4
"""Bodies of the largest size that are in memory at once, or as many bytes of smaller ones."""


class BodyReader:
    """Reads request bodies of up to `max_bytes`; counts the bytes of all that are in memory."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[tuple[bytes, str]]:
        """Context with the body and its Content-Encoding; the body counts until its end.

        Raises:
            ProblemError: the body has a wrong type, is too large or too slow, or memory is full.
        """
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":
            message = f"Content-Type must be application/json, not '{media[:50]}'"
            raise ProblemError("unsupported-media-type", message)
        encoding = request.headers.get("content-encoding", "").strip().lower()
        if encoding not in ENCODINGS:
            message = f"Content-Encoding must be gzip or zstd, not '{encoding[:50]}'"
            raise ProblemError("unsupported-media-type", message)
        size = 0
        try:
            parts: list[bytes] = []
            declared = request.headers.get("content-length", "0")
            if declared.isdigit() and int(declared) > self._max_bytes:
                raise self._too_large()
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    async for part in request.stream():
                        size += len(part)
                        self._held_bytes += len(part)
                        if size > self._max_bytes:
                            raise self._too_large()
                        if self._held_bytes > MAX_BODIES * self._max_bytes:
                            message = "the server's memory for request bodies is full"
                            raise ProblemError("busy", message, retry_after=5)
                        parts.append(part)
            except TimeoutError:
                message = f"the body took longer than {BODY_SECONDS:g} s"
                raise ProblemError("slow-body", message) from None
            except ClientDisconnect:
                message = "the client disconnected before the end of the body"
                raise ProblemError("slow-body", message) from None
            body = b"".join(parts)
            del parts
            yield body, encoding
        finally:
            self._held_bytes -= size

    def _too_large(self) -> ProblemError:
        limit = self._max_bytes
        message = f"the body is larger than {limit} bytes, this server's limit"
        return ProblemError("body-too-large", message, max_body_bytes=limit)
