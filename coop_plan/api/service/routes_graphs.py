"""`PUT /graphs/{digest}`, `GET /graphs/{digest}` and `GET /graphs`."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response
from pydantic import Field

from coop_plan.api.jobs.worker_process import WorkerRequest
from coop_plan.api.service.auth import PLANNER, READER, Caller
from coop_plan.api.service.graph_store import MAX_LISTED, GraphSummary
from coop_plan.api.service.headers import TAG, Known, document_response
from coop_plan.api.service.plan_service import Service
from coop_plan.api.service.problems import COMMON, described

router = APIRouter(prefix="/graphs", tags=["graphs"], responses=described(*COMMON))

Digest = Annotated[
    str,
    Path(pattern="^sha256:[0-9a-f]{64}$", description="SHA-256 of the uncompressed document"),
]

GRAPH: dict[str, Any] = {"application/json": {"schema": {"$ref": "#/components/schemas/Graph"}}}


@router.put(
    "/{digest}",
    summary="Store a graph, to be named by the SHA-256 of its document",
    status_code=201,
    responses={
        201: {"description": "The graph is stored", "headers": TAG},
        204: {"description": "The graph was stored already", "headers": TAG},
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
        ),
    },
    openapi_extra={"requestBody": {"required": True, "content": GRAPH}},
)
async def put_graph(
    request: Request, caller: Annotated[Caller, PLANNER], service: Service, digest: Digest
) -> Response:
    """Store a graph."""
    async with service.bodies.read(request) as body:
        limits = caller.within(service.limits)
        task = WorkerRequest("put-graph", body.encoding, key=digest, limits=limits)
        reply, _ = await service.call_reader(task, body.data)
    headers = {"ETag": f'"{digest}"'}
    if reply.found:
        return Response(status_code=204, headers=headers)
    return Response(status_code=201, headers=headers | {"Location": f"/graphs/{digest}"})


@router.get(
    "/{digest}",
    summary="Get a stored graph",
    dependencies=[READER],
    responses={
        200: {
            "description": "The document as it was sent",
            "content": GRAPH,
            "headers": TAG,
        },
        304: {"description": "The client has the document (`If-None-Match`)"},
        **described("not-found", "too-much-work"),
    },
)
async def get_graph(service: Service, digest: Digest, known: Known = []) -> Response:  # noqa: B006
    """The document of a digest."""
    _, data = await service.call_reader(WorkerRequest("graph", key=digest))
    return document_response(known, data, digest)


@router.get(
    "",
    summary=f"List stored graphs, the last used first, {MAX_LISTED} at most",
    dependencies=[READER],
    response_model=Annotated[list[GraphSummary], Field(max_length=MAX_LISTED)],
    response_description="The digest, name, ops and bytes of each",
)
async def get_graphs(service: Service) -> Response:
    """Summaries of stored graphs."""
    _, data = await service.call_reader(WorkerRequest("graphs"))
    return Response(data, media_type="application/json")
