"""`PUT /graphs/{digest}`, `GET /graphs/{digest}` and `GET /graphs`."""

import re
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import Response

from coop_plan.api.jobs.request_handler import Limits, Reply
from coop_plan.api.jobs.worker_process import WorkerRequest
from coop_plan.api.service.auth import Caller
from coop_plan.api.service.etag import etag_response
from coop_plan.api.service.graph_store import MAX_LISTED
from coop_plan.api.service.problems import ProblemError, described
from coop_plan.api.service.request_body import BodyReader

DIGEST = re.compile("sha256:[0-9a-f]{64}")

SUMMARIES: dict[str, Any] = {
    "type": "array",
    "maxItems": MAX_LISTED,
    "items": {
        "type": "object",
        "properties": {
            "digest": {"type": "string", "pattern": f"^{DIGEST.pattern}$"},
            "name": {"type": "string"},
            "ops": {"type": "integer"},
            "bytes": {"type": "integer", "description": "Size of the document"},
        },
        "required": ["digest", "name", "ops", "bytes"],
    },
}


class CallReader(Protocol):
    """Sends a request to a reader process."""

    async def __call__(self, task: WorkerRequest, body: bytes = b"") -> tuple[Reply, bytes]:
        """The reader's answer; raises `ProblemError` if it is a problem."""


def install(
    app: FastAPI, bodies: BodyReader, call_reader: CallReader, server_limits: Limits
) -> None:
    """Add the routes."""
    graph: dict[str, Any] = {"application/json": {"schema": {"$ref": "#/components/schemas/Graph"}}}

    @app.put(
        "/graphs/{digest}",
        summary="Store a graph, to be named by the SHA-256 of its document",
        status_code=201,
        responses={
            201: {"description": "The graph is stored"},
            204: {"description": "The graph was stored already"},
            **described(
                "invalid-input",
                "wrong-digest",
                "body-too-large",
                "too-many-ops",
                "too-much-work",
                "unsupported-media-type",
                "not-found",
                "slow-body",
                "not-stored",
                "forbidden",
                "busy",
            ),
        },
        openapi_extra={"requestBody": {"required": True, "content": graph}},
    )
    async def put_graph(digest: str, request: Request) -> Response:
        _check(digest)
        caller: Caller = request.state.caller
        async with bodies.read(request) as body:
            limits = caller.within(server_limits)
            task = WorkerRequest("put-graph", body.encoding, key=digest, limits=limits)
            reply, _ = await call_reader(task, body.data)
        if reply.found:
            return Response(status_code=204, headers={"ETag": f'"{digest}"'})
        headers = {"Location": f"/graphs/{digest}", "ETag": f'"{digest}"'}
        return Response(status_code=201, headers=headers)

    @app.get(
        "/graphs/{digest}",
        summary="Get a stored graph",
        responses={
            200: {"description": "The document as it was sent", "content": graph},
            304: {"description": "The client has the document (`If-None-Match`)"},
            **described("not-found", "too-much-work", "forbidden"),
        },
    )
    async def get_graph(digest: str, request: Request) -> Response:
        _check(digest)
        _, data = await call_reader(WorkerRequest("graph", key=digest))
        return etag_response(request, data, digest)

    @app.get(
        "/graphs",
        summary=f"List stored graphs, the last used first, {MAX_LISTED} at most",
        responses={
            200: {
                "description": "The digest, name, ops and bytes of each",
                "content": {"application/json": {"schema": SUMMARIES}},
            },
            **described("forbidden", "busy"),
        },
    )
    async def get_graphs() -> Response:
        _, data = await call_reader(WorkerRequest("graphs"))
        return Response(data, media_type="application/json")


def _check(digest: str) -> None:
    if DIGEST.fullmatch(digest) is None:
        raise ProblemError("not-found", "the name of a graph is sha256: and 64 hexadecimal digits")
