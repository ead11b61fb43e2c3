"""Conditional responses: `ETag` and `If-None-Match` (RFC 9110, 13.1.2)."""

import hashlib

from fastapi import Request
from fastapi.responses import Response


def etag_response(request: Request, data: bytes, tag: str = "") -> Response:
    """The JSON document, or 304 if the client has it; its `ETag` is `tag` or else its SHA-256."""
    etag = f'"{tag or hashlib.sha256(data).hexdigest()}"'
    headers = {"ETag": etag, "Cache-Control": "private, no-cache"}
    known = ",".join(request.headers.getlist("if-none-match")).split(",")
    known = [part.strip().removeprefix("W/") for part in known]
    if etag in known or known == ["*"]:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type="application/json", headers=headers)
