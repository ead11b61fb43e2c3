"""The REST service as an ASGI application: its routes, middleware, errors and description."""

import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.security import SecurityScopes
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from coop_plan.api.jobs.request_handler import PlanRequest, ProblemError
from coop_plan.api.service import (
    problems,
    routes_graphs,
    routes_health,
    routes_jobs,
    routes_pages,
    routes_plans,
)
from coop_plan.api.service.auth import AUTHENTICATE, Callers
from coop_plan.api.service.headers import SECURITY_HEADERS
from coop_plan.api.service.host_check import HostCheck
from coop_plan.api.service.metrics import Metrics
from coop_plan.api.service.plan_service import PlanService, ServiceSettings
from coop_plan.api.service.request_body import MAX_ANSWERS, Memory
from coop_plan.api.service.telemetry import Telemetry
from coop_plan.schemas import Graph, Plan


def create_app(settings: ServiceSettings) -> FastAPI:
    """The service as an ASGI application; its processes run during its lifespan."""
    metrics = Metrics()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = PlanService(settings, metrics)
        try:
            yield
        finally:
            await app.state.service.close()

    # The version is the interface's: clients do not learn the server's release.
    app = FastAPI(
        title="coop-plan",
        version="1",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.callers = Callers(settings.tokens)
    app.state.answers = Memory(MAX_ANSWERS * settings.limits.body_bytes)
    app.add_middleware(HeadAsGet)
    app.add_middleware(HostCheck, hosts=settings.hosts)
    app.add_middleware(Telemetry, metrics=metrics)  # the last added is the outermost
    for routes in (routes_plans, routes_jobs, routes_graphs, routes_health, routes_pages):
        app.router.routes.extend(routes.router.routes)  # `include_router` costs 45 µs a request
    answer_errors(app)
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


def answer_errors(app: FastAPI) -> None:
    """Answer all errors of the app with problems."""

    @app.exception_handler(ProblemError)
    async def problem(_: Request, error: ProblemError) -> Response:
        return problems.response(error.name, error.detail, **error.members)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place, *names = map(str, first["loc"])
        name = "not-found" if place == "path" else "invalid-input"
        pointer: dict[str, Any] = {}
        if place != "path":
            pointer = {"pointer": "/" + "/".join(names)}
        return problems.response(name, f"{' '.join(names)}: {first['msg']}", **pointer)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        headers = error.headers
        if error.status_code == 404:
            scopes = ["read", "plan"] if request.method == "GET" else ["plan"]
            try:  # callers without a token do not learn which paths there are
                await AUTHENTICATE(request, SecurityScopes(scopes))
            except ProblemError as refused:
                return await problem(request, refused)
            return problems.response("not-found", str(error.detail))
        if error.status_code == 405:  # Starlette's `Allow` has the methods of one route only
            path = getattr(request.scope.get("route"), "path", "")
            if methods := app.openapi()["paths"].get(path):
                headers = {"Allow": ", ".join(sorted(methods)).upper()}
            return problems.response("method-not-allowed", str(error.detail), headers)
        return problems.response("invalid-input", str(error.detail), pointer="")

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        return problems.response("internal-error", f"{type(error).__name__} in the server")


def _document(generate: Any) -> dict[str, Any]:
    """The OpenAPI description, with msgspec's schemas and the headers of every answer."""
    document: dict[str, Any] = generate()
    _, schemas = msgspec.json.schema_components(
        [PlanRequest, Plan, Graph], ref_template="#/components/schemas/{name}"
    )
    known = document["components"]["schemas"]
    known.update(schemas, Problem=problems.Problem.model_json_schema())
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which is not used
        known.pop(name, None)
    common = {name: {"schema": {"type": "string"}} for name in (*SECURITY_HEADERS, "traceparent")}
    for operations in document["paths"].values():
        for operation in operations.values():
            answers = operation["responses"]
            if "HTTPValidationError" in str(answers.get("422")):
                del answers["422"]
            for answer in answers.values():
                answer["headers"] = common | answer.get("headers", {})
    return document
