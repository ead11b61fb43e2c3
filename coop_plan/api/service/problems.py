"""Errors as `application/problem+json` (RFC 9457), each with a stable type."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

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


class ProblemError(Exception):
    """Ends a request with the problem of this name."""

    def __init__(self, name: str, detail: str, **members: Any) -> None:
        self.name, self.detail, self.members = name, detail, members
        super().__init__(detail)


SCHEMA: dict[str, Any] = {
    "title": "Problem",
    "description": "A problem (RFC 9457); some types have members of their own.",
    "type": "object",
    "properties": {
        "type": {"enum": [PREFIX + name for name in PROBLEMS]},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
    },
    "required": ["type", "title", "status", "detail"],
}
"""The JSON Schema of a problem."""


def described(*names: str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses of the problems, by status."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    found: dict[int | str, dict[str, Any]] = {}
    for name in names:
        status, title = PROBLEMS[name]
        known = found.setdefault(status, {"description": "", "content": content})
        known["description"] += f"{'; ' if known['description'] else ''}{title} (`{name}`)"
    return found


def response(
    name: str, detail: str, headers: Mapping[str, str] | None = None, **members: Any
) -> JSONResponse:
    """The problem as a response; `retry_after` (s) is also its `Retry-After`."""
    status, title = PROBLEMS[name]
    sent = dict(headers or {})
    if "retry_after" in members:
        sent["Retry-After"] = str(members["retry_after"])
    document = {"type": PREFIX + name, "title": title, "status": status, "detail": detail}
    return JSONResponse(
        {**members, **document}, status_code=status, media_type=MEDIA_TYPE, headers=sent
    )


def install(app: FastAPI) -> None:
    """Answer all errors of the app with problems."""

    @app.exception_handler(ProblemError)
    async def problem(_: Request, error: ProblemError) -> JSONResponse:
        return response(error.name, error.detail, **error.members)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        name = {404: "not-found", 405: "method-not-allowed"}.get(error.status_code)
        if name is None:
            return response("invalid-input", str(error.detail), pointer="")
        headers = error.headers
        if error.status_code == 405:  # Starlette's `Allow` has the methods of one route only
            routes = [r for r in app.routes if r.matches(request.scope)[0] is not Match.NONE]
            methods = {method for route in routes for method in getattr(route, "methods", ())}
            headers = {"Allow": ", ".join(sorted(methods))}
        return response(name, str(error.detail), headers)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return response("internal-error", f"{type(error).__name__} in the server")
