"""The REST service as an ASGI application: `POST /plan`, plans, jobs, metrics and probes."""

import contextlib
import functools
import math
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from coop_plan.api.jobs.jobs import RETRY_SECONDS, Job
from coop_plan.api.jobs.request_handler import PlanRequest, Reply
from coop_plan.api.jobs.worker_process import WorkerRequest, plan_path
from coop_plan.api.service import problems, routes_graphs, routes_pages
from coop_plan.api.service.auth import PUBLIC_PATHS, SCHEME, Authentication, Caller
from coop_plan.api.service.etag import etag_response
from coop_plan.api.service.host_check import HostCheck
from coop_plan.api.service.metrics import MEDIA_TYPE, Metrics
from coop_plan.api.service.plan_service import PlanService, ServiceSettings
from coop_plan.api.service.problems import ProblemError
from coop_plan.api.service.request_body import MAX_BODIES, BodyReader, Memory
from coop_plan.api.service.telemetry import Telemetry
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
"""Time that a request waits for its plan, without `Prefer: wait=N`."""

MAX_WAIT_SECONDS = 120.0

BETTER_THAN: dict[str, Any] = {
    "name": "better-than",
    "in": "query",
    "description": "Get a plan only if its overhead (a share) is below this; else search one",
    "schema": {"type": "number"},
}

KEY = re.compile("([0-9a-f]{64})(?:-([0-9a-f]{16}))?")


def create_app(settings: ServiceSettings) -> FastAPI:
    """The service as an ASGI application; its processes run during its lifespan."""
    plan_service: PlanService | None = None
    metrics = Metrics()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        nonlocal plan_service
        plan_service = PlanService(settings, metrics, memory)
        try:
            yield
        finally:
            await plan_service.close()

    def service() -> PlanService:
        if plan_service is None:
            raise ProblemError("busy", "the server is starting", retry_after=1)
        return plan_service

    # The version is the interface's: clients do not learn the server's release.
    app = FastAPI(
        title="coop-plan",
        version="1",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    problems.install(app)
    app.add_middleware(HeadAsGet)
    app.add_middleware(Authentication, tokens=settings.tokens)
    app.add_middleware(HostCheck, hosts=settings.hosts)
    app.add_middleware(Telemetry, metrics=metrics)  # the last added is the outermost
    memory = Memory(MAX_BODIES * settings.limits.body_bytes)
    bodies = BodyReader(settings.limits.body_bytes, memory)
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
            202: {"description": "The plan is being made; `Location` is its job"},
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
        async with bodies.read(request) as body:
            reply, data, job = await service().answer(request, body, wait, provisional=provisional)
        path = plan_path(reply.key, reply.costs)
        headers = {"Location": f"/plans/{path}", "Coop-Plan-Cache": "hit"}
        if job is not None:
            if not (data or job.finished):
                return accepted(job)
            headers["Coop-Plan-Cache"] = "miss" if job.finished else "provisional"
            if not job.finished:
                headers["Link"] = f'</jobs/{job.id}>; rel="monitor"'
        return Response(data, media_type="application/json", headers=headers)

    @app.get(
        "/plans/{key}",
        summary="Get a stored plan, with the ids of the graph that it was made for",
        responses={
            200: plan_content,
            202: {"description": "A better plan is being searched; `Location` is the job"},
            204: {"description": "There is no better plan, and none can be found"},
            304: {"description": "The client has the plan (`If-None-Match`)"},
            **described("not-found", "too-much-work", "invalid-input", "busy", "forbidden"),
        },
        openapi_extra={"parameters": [BETTER_THAN]},
    )
    async def get_plan(key: str, request: Request) -> Response:
        parts = KEY.fullmatch(key)
        if parts is None:
            message = (
                "the key of a plan is 64 hexadecimal digits, and may end in - and 16 of its costs"
            )
            raise ProblemError("not-found", message)
        key, costs = parts[1], parts[2] or ""
        better_than = request.query_params.get("better-than")
        if better_than is None:
            _, data = await service().stored_plan(key, costs)
            return etag_response(request, data)
        overhead = _overhead(better_than)
        caller: Caller = request.state.caller
        # A search costs time: it is not for readers, nor for what another site's page embeds.
        site = request.headers.get("sec-fetch-site", "none")
        if "plan" not in caller.scopes or site not in ("none", "same-origin"):
            raise ProblemError("forbidden", "better-than needs a token of scope plan")
        data, job = await service().better_plan(caller, key, costs, overhead)
        if job is not None:
            return accepted(job)
        return etag_response(request, data) if data else Response(status_code=204)

    job_content = described("not-found", "forbidden")

    @app.get("/jobs/{job_id}", summary="Get the state of a job", responses=job_content)
    async def get_job(job_id: str) -> Response:
        job = await service().jobs.get(job_id)
        return JSONResponse(job.document())

    @app.delete("/jobs/{job_id}", summary="Cancel a job for all its clients", responses=job_content)
    async def delete_job(job_id: str) -> Response:
        jobs = service().jobs
        job = await jobs.get(job_id)
        await jobs.cancel(job)
        return JSONResponse(job.document())

    @app.get(
        "/jobs/{job_id}/events",
        summary="Follow a job",
        response_class=StreamingResponse,
        responses={
            200: {"description": "Server-sent events", "content": {"text/event-stream": {}}},
            **job_content,
        },
    )
    async def get_events(job_id: str, request: Request) -> Response:
        jobs = service().jobs
        last = request.headers.get("last-event-id", "")
        number = int(last) if re.fullmatch("[0-9]{1,17}", last) else -1
        if request.scope.get("head"):
            return Response(media_type="text/event-stream")
        events = jobs.events(await jobs.get(job_id), number)
        return StreamingResponse(events, media_type="text/event-stream")

    @app.get(
        "/metrics",
        summary="Get metrics for Prometheus",
        response_class=Response,
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
            **described("forbidden"),
        },
    )
    async def get_metrics() -> Response:
        return Response(metrics.text(), media_type=MEDIA_TYPE)

    @app.get("/healthz", include_in_schema=False)
    @app.get("/livez", summary="Liveness probe", responses=described("forbidden"))
    async def livez() -> dict[str, str]:
        return {"status": "ok"}

    @app.get(
        "/readyz",
        summary="Readiness probe: the store and the broker can be reached",
        responses=described("busy", "forbidden"),
    )
    async def readyz() -> dict[str, str]:
        await service().check()
        return {"status": "ok"}

    async def call_reader(task: WorkerRequest, body: bytes = b"") -> tuple[Reply, bytes]:
        return await service().call_reader(task, body)

    routes_graphs.install(app, bodies, call_reader, settings.limits)
    routes_pages.install(app)
    app.openapi = functools.cache(functools.partial(_document, app.openapi))  # type: ignore[method-assign]
    return app


class HeadAsGet:
    """Middleware that handles HEAD as GET; the server sends no body then. `head` tells a route."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET", "head": True}
        await self._app(scope, receive, send)


COMMON_PROBLEMS = ("unauthorized", "forbidden", "too-many-requests", "busy")
"""Problems of all paths but the public ones."""


def _document(generate: Any) -> dict[str, Any]:
    """The OpenAPI description, with the JSON Schemas of requests, plans and graphs."""
    document: dict[str, Any] = generate()
    _, schemas = msgspec.json.schema_components(
        [PlanRequest, Plan, Graph], ref_template="#/components/schemas/{name}"
    )
    known = document.setdefault("components", {}).setdefault("schemas", {})
    known.update(schemas, Problem=problems.SCHEMA)
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which is not used
        known.pop(name, None)
    document["components"]["securitySchemes"] = {"token": SCHEME}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            answers = operation["responses"]
            if "HTTPValidationError" in str(answers.get("422")):
                del answers["422"]
            if path not in PUBLIC_PATHS:
                operation["security"] = [{}, {"token": []}]
                for status, answer in problems.described(*COMMON_PROBLEMS).items():
                    answers.setdefault(str(status), answer)
    return document


def accepted(job: Job) -> JSONResponse:
    """202 with the job's document and its URL."""
    headers = {"Location": f"/jobs/{job.id}", "Retry-After": str(RETRY_SECONDS)}
    return JSONResponse(job.document(), status_code=202, headers=headers)


def _preferences(request: Request) -> tuple[float, bool]:
    """Seconds to wait, and whether a provisional plan is welcome, from `Prefer` (RFC 7240).

    `wait=N` gives the seconds. With `respond-async` the client does not want a provisional plan.
    """
    prefer = request.headers.get("prefer", "").lower()
    found = re.search(r"(?:^|[,;]\s*)wait=(\d{1,9})\b", prefer)
    wait = WAIT_SECONDS if found is None else min(float(found[1]), MAX_WAIT_SECONDS)
    return wait, re.search(r"(?:^|[,;]\s*)respond-async\b", prefer) is None


def _overhead(text: str) -> float:
    with contextlib.suppress(ValueError):
        overhead = float(text)
        if math.isfinite(overhead):
            return overhead
    message = "better-than must be an overhead, such as 0.093"
    raise ProblemError("invalid-input", message, pointer="/better-than")
