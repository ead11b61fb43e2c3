"""`PUT /graphs/{digest}`, `GET /graphs/{digest}` and `GET /graphs`."""

import re
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import Response

from coop_plan.api.service.auth import Caller
from coop_plan.api.jobs.request_handler import Reply
from coop_plan.api.service.request_body import Bodies
from coop_plan.api.service.etag import tagged
from coop_plan.api.service.graph_store import LISTED
from coop_plan.api.service.problems import ProblemError, described
from coop_plan.api.jobs.worker_process import Task

DIGEST = re.compile("sha256:[0-9a-f]{64}")

CARDS: dict[str, Any] = {
    "type": "array",
    "maxItems": LISTED,
    "items": {
        "type": "object",
        "properties": {
            "digest": {"type": "string", "pattern": f"^{DIGEST.pattern}$"},
            "name": {"type": "string"},
            "ops": {"type": "integer"},
            "bytes": {"type": "integer", "description": "of the document"},
        },
        "required": ["digest", "name", "ops", "bytes"],
    },
}


class Look(Protocol):
    """Gives a task to a reader; raises `ProblemError`."""

    async def __call__(self, task: Task, body: bytes = b"") -> tuple[Reply, bytes]:
        """What the reader answers."""


def install(app: FastAPI, bodies: Bodies, look: Look) -> None:
    """Add the addresses of graphs."""
    graph: dict[str, Any] = {"application/json": {"schema": {"$ref": "#/components/schemas/Graph"}}}

    @app.put(
        "/graphs/{digest}",
        summary="Send a graph, to name it by the SHA-256 of its document from then on",
        status_code=201,
        responses={
            201: {"description": "It is kept"},
            204: {"description": "It was there"},
            **described(
                "invalid-input",
                "wrong-digest",
                "body-too-large",
                "too-many-ops",
                "too-much-work",
                "unsupported-media-type",
                "not-found",
                "slow-body",
                "forbidden",
                "busy",
            ),
        },
        openapi_extra={"requestBody": {"required": True, "content": graph}},
    )
    async def put_graph(digest: str, request: Request) -> Response:
        _check(digest)
        async with bodies.of(request) as (body, encoding):
            reply, _ = await look(Task("put-graph", encoding, key=digest), body)
        caller: Caller = request.state.caller
        caller.check(reply)
        if reply.found:
            return Response(status_code=204, headers={"ETag": f'"{digest}"'})
        headers = {"Location": f"/graphs/{digest}", "ETag": f'"{digest}"'}
        return Response(status_code=201, headers=headers)

    @app.get(
        "/graphs/{digest}",
        summary="A graph that was sent",
        responses={
            200: {"description": "The document as it was sent", "content": graph},
            304: {"description": "It is the one of `If-None-Match`"},
            **described("not-found", "too-much-work", "forbidden"),
        },
    )
    async def get_graph(digest: str, request: Request) -> Response:
        _check(digest)
        _, data = await look(Task("graph", key=digest))
        return tagged(request, data, digest)

    @app.get(
        "/graphs",
        summary="Graphs that are kept, the last ones used first, 100 at most",
        responses={
            200: {
                "description": "The digest, name, ops and bytes of each",
                "content": {"application/json": {"schema": CARDS}},
            },
            **described("forbidden", "busy"),
        },
    )
    async def get_graphs() -> Response:
        _, data = await look(Task("graphs"))
        return Response(data, media_type="application/json")


def _check(digest: str) -> None:
    if DIGEST.fullmatch(digest) is None:
        raise ProblemError("not-found", "a graph is named by sha256: and 64 hexadecimal digits")
