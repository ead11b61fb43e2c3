"""Headers of requests and answers, as pydantic models that describe themselves in OpenAPI."""

import hashlib
import re
from typing import Annotated, Any, Literal

from fastapi import Header
from fastapi.responses import Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

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


class AnswerHeaders(BaseModel):
    """Headers of an answer; a field's name with dashes is the header's."""

    model_config = ConfigDict(alias_generator=lambda n: n.title().replace("_", "-"))

    @classmethod
    def described(cls) -> dict[str, Any]:
        """The headers in OpenAPI."""
        found = cls.model_json_schema()
        return {
            name: {
                "schema": schema,
                "description": schema.pop("description", ""),
                "required": name in found.get("required", ()),
            }
            for name, schema in found["properties"].items()
        }


class PlanHeaders(AnswerHeaders):
    """Headers of a plan."""

    location: str = Field(description="Path of the plan for these costs")
    coop_plan_cache: Literal["hit", "miss", "provisional"] = Field(
        description="Stored before, made now, or one for a smaller budget while the plan is made"
    )
    link: str = Field("", description='Job of a provisional plan: `</jobs/{id}>; rel="monitor"`')


class JobHeaders(AnswerHeaders):
    """Headers of a job that was started."""

    location: str = Field(description="Path of the job")
    retry_after: str = Field(description="Seconds until a good time to ask again")


class DocumentHeaders(AnswerHeaders):
    """Headers of a document."""

    etag: str = Field(alias="ETag", description="Digest of the document")
    cache_control: str = "private, no-cache"


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
    headers = DocumentHeaders(ETag=etag).model_dump(by_alias=True)
    tags = [part.strip().removeprefix("W/") for part in ",".join(known).split(",")]
    if etag in tags or tags == ["*"]:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type="application/json", headers=headers)
