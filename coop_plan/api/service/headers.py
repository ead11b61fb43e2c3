"""Headers of requests and answers, described in OpenAPI."""

import hashlib
import re
from typing import Annotated, Any

from fastapi import Header
from fastapi.responses import Response
from pydantic import BeforeValidator

from coop_plan.api.service.request_body import Document

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
"""Headers of every answer that does not set them itself."""

WAIT_SECONDS = 10.0
"""Time that a request waits for its plan, without `Prefer: wait=N`."""

MAX_WAIT_SECONDS = 120.0


def described_headers(**headers: str) -> dict[str, Any]:
    """Headers of an answer in OpenAPI, from their names with _ for - and their descriptions."""
    return {
        name.replace("_", "-"): {"schema": {"type": "string"}, "description": text}
        for name, text in headers.items()
    }


TAG = described_headers(ETag="Digest of the document")

Prefer = Annotated[
    str,
    Header(
        description="`wait=N`: seconds to wait for the plan (10, at most 120). `respond-async`: no"
        " provisional plan"
    ),
]


def preferences(prefer: str) -> tuple[float, bool]:
    """Seconds to wait, and whether a provisional plan is welcome, from `Prefer` (RFC 7240)."""
    text = prefer.lower()
    found = re.search(r"(?:^|[,;]\s*)wait=(\d{1,9})\b", text)
    wait = WAIT_SECONDS if found is None else min(float(found[1]), MAX_WAIT_SECONDS)
    return wait, re.search(r"(?:^|[,;]\s*)respond-async\b", text) is None


LastEventId = Annotated[
    int,
    BeforeValidator(lambda text: text if re.fullmatch("[0-9]{1,17}", str(text)) else -1),
    Header(description="Number of the last event that the client has"),
]

Known = Annotated[
    list[str],
    Header(alias="If-None-Match", description="ETag of the client's copy (RFC 9110, 13.1.2)"),
]


def document_response(known: list[str], data: bytes, tag: str = "") -> Response:
    """The JSON document, or 304 if the client has it; its `ETag` is `tag` or else its SHA-256."""
    etag = f'"{tag or hashlib.sha256(data).hexdigest()}"'
    headers = {"ETag": etag, "Cache-Control": "private, no-cache"}
    tags = [part.strip().removeprefix("W/") for part in ",".join(known).split(",")]
    if etag in tags or tags == ["*"]:
        return Response(status_code=304, headers=headers)
    return Document(data, headers=headers)
