"""Errors as `application/problem+json` (RFC 9457), each with a stable type."""

from collections.abc import Mapping
from typing import Any

from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

PREFIX = "urn:coop-plan:problem:"
MEDIA_TYPE = "application/problem+json"

PROBLEMS = {
    "invalid-input": (422, "The request is invalid; `pointer` is the place"),
    "budget-infeasible": (409, "The method cannot meet the budget; see `budget_lower_bound_bytes`"),
    "time-limit": (504, "No plan was found within the time limit"),
    "body-too-large": (413, "The body is larger than the limit"),
    "too-many-ops": (413, "The graph has more ops than the limit"),
    "unknown-graph": (404, "The graph is not stored: send it by PUT /graphs/{digest}"),
    "wrong-digest": (422, "The document has another digest than its URL; see `digest`"),
    "not-found": (404, "There is nothing at this URL"),
    "method-not-allowed": (405, "The URL does not allow this method"),
    "unsupported-media-type": (415, "The body has a media type or encoding that is not supported"),
    "unauthorized": (401, "The request needs a token: `Authorization: Bearer`"),
    "forbidden": (403, "The request's host or origin is refused, or its token lacks the scope"),
    "too-many-requests": (429, "The token's limit is reached; see `Retry-After`"),
    "slow-body": (408, "The body did not arrive in time"),
    "too-much-work": (413, "The request needs more memory or time than the server's limit"),
    "not-stored": (507, "The graph cannot be stored now: send it with the request"),
    "cancelled": (409, "The solve was cancelled"),
    "busy": (503, "The server is overloaded or cannot work now; see `Retry-After`"),
    "internal-error": (500, "The server failed"),
}
"""Problem type → (status, title)."""

COMMON = ("unauthorized", "forbidden", "too-many-requests", "busy")
"""Problems of all routes that need a token."""

HEADERS = {401: "WWW-Authenticate", 429: "Retry-After", 503: "Retry-After"}
"""Header of a problem's response by its status."""


class Problem(BaseModel):
    """A problem (RFC 9457); some types have members of their own."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(json_schema_extra={"enum": [PREFIX + name for name in PROBLEMS]})
    title: str
    status: int
    detail: str
    pointer: str = Field("", description="JSON pointer of the fault, or the name of a parameter")
    retry_after: int = Field(0, description="Seconds until a good time to ask again")
    digest: str = Field("", description="Digest of the document, or of the graph to be sent")
    max_body_bytes: int = 0
    max_ops: int = 0
    budget_bytes: int = 0
    min_feasible_bytes: int | None = Field(None, description="The method's smallest budget")
    met_bytes: int | None = Field(None, description="A budget that is met")
    budget_lower_bound_bytes: int | None = Field(None, description="Proved: no schedule needs less")
    blocking_op: int | None = None
    blocking_op_name: str = ""
    working_set_bytes: int = Field(0, description="Of the blocking op")


def described(*names: str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses of the problems, by status."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    found: dict[int | str, dict[str, Any]] = {}
    for name in names:
        status, title = PROBLEMS[name]
        known = found.setdefault(status, {"description": "", "content": content})
        known["description"] += f"{'; ' if known['description'] else ''}{title} (`{name}`)"
        if header := HEADERS.get(status):
            known["headers"] = {header: {"schema": {"type": "string"}}}
    return found


def response(
    name: str, detail: str, headers: Mapping[str, str] | None = None, **members: Any
) -> Response:
    """The problem as a response; `retry_after` (s) is also its `Retry-After`."""
    status, title = PROBLEMS[name]
    sent = dict(headers or {})
    if "retry_after" in members:
        sent["Retry-After"] = str(members["retry_after"])
    if name == "unauthorized":
        sent["WWW-Authenticate"] = "Bearer"
    own = {"type": PREFIX + name, "title": title, "status": status, "detail": detail}
    document = Problem.model_construct(**members | own).model_dump_json(exclude_unset=True)
    return Response(document, status_code=status, media_type=MEDIA_TYPE, headers=sent)
