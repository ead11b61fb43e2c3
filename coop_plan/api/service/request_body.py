"""Bodies of requests and answers: type and encoding; limits on size, time and total memory."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from coop_plan.api.jobs.request_handler import ProblemError
from coop_plan.api.service.response_cache import MAX_REQUEST_BYTES

ENCODINGS = ("", "identity", "gzip", "zstd")

BODY_SECONDS = 30.0
"""Limit on the arrival of a body."""

MAX_BODIES = 4
"""Bodies of the largest size that are in memory at once, or as many bytes of smaller ones."""

MAX_ANSWERS = 2
"""Answers of that size, or as many bytes of those above `MAX_REQUEST_BYTES`."""

ANSWER_SECONDS = 60.0
"""Limit on the transfer of an answer."""

SMALL_BYTES = 64 << 10
"""Bytes of each body that are not counted: no other request keeps a small one out.

An answer is sent in parts of this size.
"""


class Memory:
    """Account of the bytes that a server holds for requests: bodies, and records of jobs.

    One caller may hold at most half of them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        """Bytes that are held now."""
        return self._held.total()

    def take(self, size: int, caller: str = "") -> None:
        """Count bytes of a caller; `free` ends that.

        Raises:
            ProblemError: the memory is full, or the caller's half is.
        """
        mine = self._held[caller] + size
        if self.held + size > self._max_bytes or mine > self._max_bytes // 2:
            message = "the server's memory for requests is full"
            raise ProblemError("busy", message, retry_after=5)
        self._held[caller] = mine

    def free(self, size: int, caller: str = "") -> None:
        """Count bytes no longer."""
        self._held[caller] -= size
        if not self._held[caller]:
            del self._held[caller]


class Document(Response):
    """JSON that is counted until the client has it, and sent in parts; what comes late is cut."""

    media_type = "application/json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; raises `ProblemError` if there is no memory for it."""
        memory: Memory = scope["app"].state.answers
        caller, size = scope["state"]["caller"].name, len(self.body)
        counted = size if size > MAX_REQUEST_BYTES else 0
        memory.take(counted, caller)
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    await send(start)
                    for end in range(SMALL_BYTES, size + SMALL_BYTES, SMALL_BYTES):
                        part = bytes(self.body[end - SMALL_BYTES : end])
                        more = {"more_body": end < size}
                        await send({"type": "http.response.body", "body": part, **more})
        finally:
            memory.free(counted, caller)


class Room:
    """Bytes of large documents that readers parse at once, in `places`. For one event loop.

    The graphs take seven times as much. Requests that wait are served in order.
    """

    def __init__(self, max_bytes: int, places: int) -> None:
        self._max_bytes = self._free = max_bytes
        self._places = asyncio.Semaphore(places)
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def take(self, size: int) -> AsyncIterator[None]:
        """Context with a place and room for `size` bytes, or with all the room there is."""
        size = min(size, self._max_bytes)
        async with self._places:
            async with self._turn:
                while size > self._free:
                    self._freed.clear()
                    await self._freed.wait()
                self._free -= size
            try:
                yield
            finally:
                self._free += size
                self._freed.set()


class Body:
    """A request's body and its Content-Encoding; its bytes count until it is released."""

    def __init__(self, encoding: str, memory: Memory, caller: str = "") -> None:
        self.data, self.encoding = b"", encoding
        self._memory, self._caller, self._taken = memory, caller, 0

    def take(self, size: int) -> None:
        """Count that `size` bytes have arrived."""
        more = max(0, size - SMALL_BYTES) - self._taken
        self._memory.take(more, self._caller)
        self._taken += more

    def release(self) -> None:
        """Drop the bytes."""
        self._memory.free(self._taken, self._caller)
        self.data, self._taken = b"", 0


class BodyReader:
    """Reads request bodies of up to `max_bytes`."""

    def __init__(self, max_bytes: int, memory: Memory) -> None:
        self._max_bytes, self._memory = max_bytes, memory

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[Body]:
        """Context with the body, which is released at its end.

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
        body = Body(encoding, self._memory, request.state.caller.name)
        try:
            body.data = await self._receive(request, body)
            yield body
        finally:
            body.release()

    async def _receive(self, request: Request, body: Body) -> bytes:
        declared = request.headers.get("content-length", "0")
        if declared.isascii() and declared.isdigit() and int(declared) > self._max_bytes:
            raise self._too_large()
        size = 0
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    size += len(part)
                    if size > self._max_bytes:
                        raise self._too_large()
                    body.take(size)
                    parts.append(part)
        except TimeoutError:
            message = f"the body took longer than {BODY_SECONDS:g} s"
            raise ProblemError("slow-body", message) from None
        except ClientDisconnect:
            message = "the client disconnected before the end of the body"
            raise ProblemError("slow-body", message) from None
        return b"".join(parts)

    def _too_large(self) -> ProblemError:
        limit = self._max_bytes
        message = f"the body is larger than {limit} bytes, this server's limit"
        return ProblemError("body-too-large", message, max_body_bytes=limit)
