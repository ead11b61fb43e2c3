"""Request bodies: of the right type, not too large, not too slow, and not too many at once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import Request
from starlette.requests import ClientDisconnect

from coop_plan.api.service.problems import ProblemError

ENCODINGS = ("", "identity", "gzip", "zstd")

BODY_SECONDS = 30.0
"""How long a body may take to arrive."""

BODIES = 4
"""So many bodies of the largest size are held at once, or more that are smaller."""


class Bodies:
    """Reads the bodies of requests; counts the bytes of those that are held."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0

    @contextlib.asynccontextmanager
    async def of(self, request: Request) -> AsyncIterator[tuple[bytes, str]]:
        """
        The body and its encoding, as long as it is held.

        Raises:
            ProblemError: what is wrong with it, as soon as that is known.
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
            if declared.isdigit() and int(declared) > self._limit:
                raise self._too_large()
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    async for part in request.stream():
                        size += len(part)
                        self._held += len(part)
                        if size > self._limit:
                            raise self._too_large()
                        if self._held > BODIES * self._limit:
                            message = "too many bodies are held"
                            raise ProblemError("busy", message, retry_after=5)
                        parts.append(part)
            except TimeoutError:
                message = f"the body took longer than {BODY_SECONDS:g} s"
                raise ProblemError("slow-body", message) from None
            except ClientDisconnect:
                raise ProblemError("slow-body", "the client left") from None
            body = b"".join(parts)
            del parts
            yield body, encoding
        finally:
            self._held -= size

    def _too_large(self) -> ProblemError:
        limit = self._limit
        return ProblemError("body-too-large", f"at most {limit} bytes", max_body_bytes=limit)
