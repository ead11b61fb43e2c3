"""`POST /plan` and `GET /plans/{key}`."""

from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request
from fastapi.responses import Response

from coop_plan.api.jobs.jobs import RETRY_SECONDS, Job, JobDocument
from coop_plan.api.jobs.request_handler import ProblemError
from coop_plan.api.jobs.worker_process import plan_path
from coop_plan.api.service.auth import PLANNER, READER, Caller
from coop_plan.api.service.headers import (
    TAG,
    Known,
    Prefer,
    described_headers,
    document_response,
    preferences,
)
from coop_plan.api.service.plan_service import running_service
from coop_plan.api.service.problems import COMMON, described
from coop_plan.api.service.request_body import Document
from coop_plan.api.service.sample_graph import sample_graph

EXAMPLE = {"graph": sample_graph(2), "budget": "90%"}

router = APIRouter(tags=["plans"], responses=described(*COMMON))

PLAN: dict[str, Any] = {"application/json": {"schema": {"$ref": "#/components/schemas/Plan"}}}
REQUEST: dict[str, Any] = {
    "application/json": {
        "schema": {"$ref": "#/components/schemas/PlanRequest"},
        "example": EXAMPLE,
    }
}


PLAN_HEADERS = described_headers(
    Location="Path of the plan for these costs",
    Coop_Plan_Cache="`hit`, `miss`, or `provisional`: a plan for a smaller budget",
    Link="Job that makes the plan in place of a provisional one",
)
STARTED: dict[str, Any] = {
    "description": "The plan, or a better one, is being made; `Location` is its job",
    "model": JobDocument,
    "headers": described_headers(Location="Path of the job", Retry_After="Seconds"),
}


@router.post(
    "/plan",
    summary="Plan a graph within a budget",
    responses={
        200: {"description": "A plan", "content": PLAN, "headers": PLAN_HEADERS},
        202: STARTED,
        **described(
            "invalid-input",
            "budget-infeasible",
            "cancelled",
            "unknown-graph",
            "time-limit",
            "body-too-large",
            "too-many-ops",
            "too-much-work",
            "unsupported-media-type",
            "slow-body",
        ),
    },
    openapi_extra={"requestBody": {"required": True, "content": REQUEST}},
    dependencies=[PLANNER],
)
async def post_plan(request: Request, prefer: Prefer = "") -> Response:
    """The stored plan, or the one that a solve makes."""
    service = await running_service(request)  # as a dependency it costs 20 µs of every hit
    wait, provisional = preferences(prefer)
    async with service.bodies.read(request) as body:
        reply, data, job = await service.answer(request, body, wait, provisional=provisional)
    headers = {
        "Location": f"/plans/{plan_path(reply.key, reply.costs)}",
        "Coop-Plan-Cache": "hit",
    }
    if job is not None:
        if not data:
            return accepted(job)
        headers["Coop-Plan-Cache"] = "miss" if reply.final else "provisional"
        if not reply.final:
            headers["Link"] = f'</jobs/{job.id}>; rel="monitor"'
    return Document(data, headers=headers)


@router.get(
    "/plans/{key}",
    summary="Get a stored plan, with the ids of the graph that it was made for",
    responses={
        200: {"description": "A plan", "content": PLAN, "headers": TAG},
        202: STARTED,
        204: {"description": "There is no better plan, and none can be found"},
        304: {"description": "The client has the plan (`If-None-Match`)"},
        **described("not-found", "too-much-work", "invalid-input"),
    },
)
async def get_plan(
    request: Request,
    caller: Annotated[Caller, READER],
    key: Annotated[
        str,
        Path(
            pattern="^[0-9a-f]{64}(-[0-9a-f]{16})?$",
            description="The plan's key, and the digest of the costs that it was made with",
        ),
    ],
    better_than: Annotated[
        float | None,
        Query(
            alias="better-than",
            allow_inf_nan=False,
            description="Get a plan only if its overhead (a share) is below this; else search one",
        ),
    ] = None,
    sec_fetch_site: Annotated[str, Header(description="Sent by browsers")] = "none",
    known: Known = [],  # noqa: B006
) -> Response:
    """The stored plan of a key, or the search for a better one."""
    service = await running_service(request)
    key, _, costs = key.partition("-")
    if better_than is None:
        _, data = await service.stored_plan(key, costs)
        return document_response(known, data)
    # A search costs time: it is not for readers, nor for what another site's page embeds.
    if "plan" not in caller.scopes or sec_fetch_site not in ("none", "same-origin"):
        raise ProblemError("forbidden", "better-than needs a token of scope plan")
    data, job = await service.better_plan(caller, key, costs, better_than)
    if job is not None:
        return accepted(job)
    return document_response(known, data) if data else Response(status_code=204)


def accepted(job: Job) -> Response:
    """202 with the job's document and its URL."""
    headers = {"Location": f"/jobs/{job.id}", "Retry-After": str(RETRY_SECONDS)}
    text = job.document().model_dump_json(exclude_unset=True)
    return Response(text, status_code=202, media_type="application/json", headers=headers)
