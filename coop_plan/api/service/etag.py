"""Answers that a client need not be sent again: `ETag` and `If-None-Match` (RFC 9110, 13.1.2)."""

import hashlib

from fastapi import Request
from fastapi.responses import Response


def tagged(request: Request, data: bytes, tag: str = "") -> Response:
    """The JSON document, or 304 where the client has it; `tag` names it, else its digest."""
    quoted = f'"{tag or hashlib.sha256(data).hexdigest()}"'
    headers = {"ETag": quoted, "Cache-Control": "private, no-cache"}
    if known(request, quoted):
        return Response(status_code=304, headers=headers)
    return Response(data, media_type="application/json", headers=headers)


def known(request: Request, quoted: str) -> bool:
    """Whether the client says that it has the document of this tag."""
    told = [part.strip().removeprefix("W/") for part in _told(request).split(",")]
    return quoted in told or told == ["*"]


def _told(request: Request) -> str:
    return ",".join(request.headers.getlist("if-none-match"))
