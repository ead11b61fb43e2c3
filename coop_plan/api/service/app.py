"""The REST service: `POST /plan`, plans and jobs by their addresses, `/livez`, `/readyz`."""

import contextlib
import functools
import math
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from coop_plan.api.service import routes_docs

from coop_plan.api.service import routes_graphs

from coop_plan.api.service import routes_pages

from coop_plan.api.service import problems
from coop_plan.api.service.auth import OPEN, SCHEME, Access
from coop_plan.api.jobs.request_handler import PlanRequest, Reply
from coop_plan.api.service.request_body import Bodies
from coop_plan.api.service.plan_service import Desk, Service
from coop_plan.api.service.host_check import Doorkeeper
from coop_plan.api.service.etag import tagged
from coop_plan.api.jobs.jobs import RETRY_SECONDS, Job
from coop_plan.api.service.metrics import MEDIA_TYPE, Metrics
from coop_plan.api.service.telemetry import Observed
from coop_plan.api.service.problems import ProblemError
from coop_plan.api.jobs.worker_process import Task
from coop_plan.schemas import Graph, Plan

EXAMPLE: dict[str, Any] = {
    "graph": {
        "schema": "coop-plan/graph/1",
        "name": "three layers and their gradients",
        "tensors": [
            {"id": 0, "bytes": 4096, "kind": "input"},
            *({"id": i, "bytes": 1 << 20, "kind": "activation"} for i in range(1, 6)),
            {"id": 6, "bytes": 4096, "kind": "output"},
        ],
        "ops": [
            {"id": 0, "name": "aten.mm", "inputs": [0], "outputs": [1], "cost_us": 90},
            {"id": 1, "name": "aten.relu", "inputs": [1], "outputs": [2], "cost_us": 10},
            {"id": 2, "name": "aten.mm", "inputs": [2], "outputs": [3], "cost_us": 90},
            {"id": 3, "name": "aten.mm", "inputs": [3, 2], "outputs": [4], "cost_us": 90},
            {"id": 4, "name": "aten.mm", "inputs": [4, 1], "outputs": [5], "cost_us": 90},
            {"id": 5, "name": "aten.sum", "inputs": [5, 0], "outputs": [6], "cost_us": 10},
        ],
    },
    "budget": "90%",
}

WAIT_SECONDS = 10.0
"""How long a request waits for its plan, unless it says `Prefer: wait=N`."""

MAX_WAIT_SECONDS = 120.0

BETTER_THAN: dict[str, Any] = {
    "name": "better-than",
    "in": "query",
    "description": "Only a plan of less overhead than this (a share); else one is looked for",
    "schema": {"type": "number"},
}

KEY = re.compile("[0-9a-f]{64}")


def create_app(service: Service) -> FastAPI:
    """The service as an ASGI application; its processes live as long as its lifespan."""
    desk: Desk | None = None
    metrics = Metrics()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        nonlocal desk
        desk = Desk(service, metrics)
        try:
            yield
        finally:
            await desk.close()

    def at_work() -> Desk:
        if desk is None:
            raise ProblemError("busy", "the server is starting", retry_after=1)
        return desk

    # The version is the interface's: which release answers is nobody's business.
    app = FastAPI(
        title="coop-plan",
        version="1",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    problems.install(app)
    app.add_middleware(Access, tokens=service.tokens)
    app.add_middleware(Doorkeeper, hosts=service.hosts)
    app.add_middleware(Observed, metrics=metrics)  # the outermost
    bodies = Bodies(service.limits.body_bytes)
    described = problems.described
    plan_content: dict[str, Any] = {
        "description": "A plan",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Plan"}}},
    }

    @app.post(
        "/plan",
        summary="Plan a graph within a budget",
        responses={
            200: plan_content,
            202: {"description": "It is being made: `Location` is its job"},
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
                "forbidden",
                "busy",
            ),
        },
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": {
                        "schema": {"$ref": "#/components/schemas/PlanRequest"},
                        "example": EXAMPLE,
                    }
                },
            }
        },
    )
    async def post_plan(request: Request) -> Response:
        wait, provisional = _preferences(request)
        async with bodies.of(request) as (body, encoding):
            reply, data, job = await at_work().answer(
                request, body, encoding, wait, provisional=provisional
            )
        if job is not None and not job.over:
            if data:
                headers = {
                    "Location": f"/plans/{reply.key}",
                    "Coop-Plan-Cache": "provisional",
                    "Link": f'</jobs/{job.id}>; rel="monitor"',
                }
                return Response(data, media_type="application/json", headers=headers)
            return under_way(job)
        headers = {
            "Location": f"/plans/{reply.key}",
            "Coop-Plan-Cache": "hit" if job is None else "miss",
        }
        return Response(data, media_type="application/json", headers=headers)

    @app.get(
        "/plans/{key}",
        summary="A stored plan, in the ids of the graph it was made for",
        responses={
            200: plan_content,
            202: {"description": "A better one is looked for: `Location` is the job"},
            204: {"description": "There is no better one, and none is looked for"},
            304: {"description": "It is the one of `If-None-Match`"},
            **described("not-found", "too-much-work", "invalid-input", "busy", "forbidden"),
        },
        openapi_extra={"parameters": [BETTER_THAN]},
    )
    async def get_plan(key: str, request: Request) -> Response:
        if KEY.fullmatch(key) is None:
            raise ProblemError("not-found", "no plan of that key")
        asked = request.query_params.get("better-than")
        if asked is None:
            _, data = await at_work().stored(key)
            return tagged(request, data)
        data, job = await at_work().better(request.state.caller, key, _overhead(asked))
        if job is not None:
            return under_way(job)
        return tagged(request, data) if data else Response(status_code=204)

    job_content = described("not-found", "forbidden")

    @app.get("/jobs/{job_id}", summary="How a solve is getting on", responses=job_content)
    async def get_job(job_id: str) -> Response:
        job = await at_work().jobs.get(job_id)
        return JSONResponse(job.document())

    @app.delete("/jobs/{job_id}", summary="Cancel a solve", responses=job_content)
    async def delete_job(job_id: str) -> Response:
        jobs = at_work().jobs
        job = await jobs.get(job_id)
        await jobs.cancel(job)
        return JSONResponse(job.document())

    @app.get(
        "/jobs/{job_id}/events",
        summary="The same as it happens",
        response_class=StreamingResponse,
        responses={
            200: {"description": "Server-sent events", "content": {"text/event-stream": {}}},
            **job_content,
        },
    )
    async def get_events(job_id: str, request: Request) -> Response:
        jobs = at_work().jobs
        last = request.headers.get("last-event-id", "")
        number = int(last) if last.isdigit() and len(last) < 18 else -1
        events = jobs.follow(await jobs.get(job_id), number)
        return StreamingResponse(events, media_type="text/event-stream")

    @app.get(
        "/metrics",
        summary="For Prometheus",
        response_class=Response,
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
            **described("forbidden"),
        },
    )
    async def get_metrics() -> Response:
        return Response(metrics.text(), media_type=MEDIA_TYPE)

    @app.get("/livez", summary="Whether the service answers", responses=described("forbidden"))
    async def livez() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get(
        "/readyz",
        summary="Whether it can answer: its store and its broker can be reached",
        responses=described("busy", "forbidden"),
    )
    async def readyz() -> dict[str, str]:
        await at_work().check()
        return {"status": "ok"}

    async def look(task: Task, body: bytes = b"") -> tuple[Reply, bytes]:
        return await at_work().look(task, body)

    routes_graphs.install(app, bodies, look)
    routes_pages.install(app)
    routes_docs.install(app)
    app.openapi = functools.cache(functools.partial(_document, app.openapi))  # type: ignore[method-assign]
    return app


EVERYWHERE = ("unauthorized", "forbidden", "too-many-requests", "busy")
"""What any address but the open ones may answer."""


def _document(generate: Any) -> dict[str, Any]:
    """The OpenAPI description, with the schemas of the contract."""
    document: dict[str, Any] = generate()
    _, schemas = msgspec.json.schema_components(
        [PlanRequest, Plan, Graph], ref_template="#/components/schemas/{name}"
    )
    known = document.setdefault("components", {}).setdefault("schemas", {})
    known.update(schemas, Problem=problems.SCHEMA)
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which is never sent
        known.pop(name, None)
    document["components"]["securitySchemes"] = {"token": SCHEME}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            answers = operation["responses"]
            if "HTTPValidationError" in str(answers.get("422")):
                del answers["422"]
            if path not in OPEN:
                operation["security"] = [{}, {"token": []}]
                for status, answer in problems.described(*EVERYWHERE).items():
                    answers.setdefault(str(status), answer)
    return document


def under_way(job: Job) -> JSONResponse:
    """Where a job can be asked for."""
    headers = {"Location": f"/jobs/{job.id}", "Retry-After": str(RETRY_SECONDS)}
    return JSONResponse(job.document(), status_code=202, headers=headers)


def _preferences(request: Request) -> tuple[float, bool]:
    """
    Of `Prefer` (RFC 7240): the seconds of `wait=N`, and whether a provisional plan will do.

    With `respond-async` it will not: the client would rather come back for the plan itself.
    """
    prefer = request.headers.get("prefer", "").lower()
    found = re.search(r"(?:^|[,;]\s*)wait=(\d{1,9})\b", prefer)
    wait = WAIT_SECONDS if found is None else min(float(found[1]), MAX_WAIT_SECONDS)
    return wait, re.search(r"(?:^|[,;]\s*)respond-async\b", prefer) is None


def _overhead(text: str) -> float:
    """The share of `better-than`."""
    with contextlib.suppress(ValueError):
        overhead = float(text)
        if math.isfinite(overhead):
            return overhead
    message = "better-than is the overhead of a plan, such as 0.093"
    raise ProblemError("invalid-input", message, pointer="/better-than")
