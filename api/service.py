"""The REST service: `POST /plan`, `GET /plans/{key}`, `GET /healthz`."""

import asyncio
from importlib import metadata
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from coop_plan.api import problems
from coop_plan.api.problems import ProblemError
from coop_plan.planner import plan
from coop_plan.planner.cache.store import PlanStore, StoredPlan, planner_version
from coop_plan.planner.options import PlanOptions
from coop_plan.schemas import (
    Graph,
    Plan,
    fingerprint,
)
from coop_plan.schemas._parse import parse

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


class PlanRequest(PlanOptions, frozen=True, kw_only=True):
    """What `POST /plan` takes; the names are those of the command line."""

    graph: Graph


class Planner:
    """Answers requests from the store, or by one solve however many ask at once."""

    def __init__(self, store: PlanStore, max_ops: int) -> None:
        self._store = store
        self._max_ops = max_ops
        self._running: dict[str, asyncio.Task[StoredPlan]] = {}

    def read(self, body: bytes) -> tuple[str, Graph, PlanRequest]:
        """The key, graph and options of a request body."""
        request = parse(PlanRequest, body)
        ops = len(request.graph.ops)
        if ops > self._max_ops:
            raise ProblemError(
                "too-many-ops",
                f"{ops} ops; this server takes {self._max_ops}",
                max_ops=self._max_ops,
            )
        links = request.on(request.graph).device.linked
        key = request.key(fingerprint(request.graph), planner_version(), links=links)
        return key, request.graph, request

    async def answer(self, body: bytes) -> tuple[str, Plan, bool]:
        """The key, the plan for the request's own graph, and whether it came from the store."""
        key, graph, request = await asyncio.to_thread(self.read, body)
        found = await asyncio.to_thread(self._cached, key, graph)
        if found is not None:
            return key, found, True
        task = self._running.get(key)
        if task is None:
            task = asyncio.create_task(asyncio.to_thread(self._solve, key, graph, request))
            self._running[key] = task
            task.add_done_callback(lambda _: self._running.pop(key, None))
        # A client that goes away must not take the others' solve with it.
        stored = await asyncio.shield(task)
        made = stored.for_graph(graph)
        if made is None:  # a graph whose structure differs has another key
            raise AssertionError("a plan does not hold for the graph it was made for")
        return key, made, False

    def stored(self, key: str) -> Plan | None:
        """The plan of a key, in the ids of the graph it was made for, if it still holds."""
        record = self._store.get(key)
        return None if record is None else record.as_made()

    def _cached(self, key: str, graph: Graph) -> Plan | None:
        """The stored plan in this graph's ids, if it holds."""
        record = self._store.get(key)
        return None if record is None else record.for_graph(graph)

    def _solve(self, key: str, graph: Graph, request: PlanRequest) -> StoredPlan:
        made = plan(graph, request)
        stored = StoredPlan.of(made, graph)
        self._store.put(key, stored)
        return stored


def create_app(
    store: PlanStore, *, max_body_bytes: int = 64 << 20, max_ops: int = 100_000
) -> FastAPI:
    """The service over a plan store, with limits on the body (bytes) and the graph (ops)."""
    version = metadata.version("coop-plan")
    app = FastAPI(title="coop-plan", version=version, redoc_url=None)
    problems.install(app)
    planner = Planner(store, max_ops)
    _, schemas = msgspec.json.schema_components(
        [PlanRequest, Plan], ref_template="#/components/schemas/{name}"
    )
    problem = {
        name: {"description": title, "content": {problems.MEDIA_TYPE: {}}}
        for name, (_, title) in problems.PROBLEMS.items()
    }

    plan_content = {
        "description": "A plan",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Plan"}}},
    }

    @app.post(
        "/plan",
        summary="Plan a graph within a budget",
        responses={
            200: plan_content,
            409: problem["budget-infeasible"],
            413: problem["body-too-large"],
            422: problem["invalid-input"],
            504: problem["time-limit"],
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
        key, made, hit = await planner.answer(await _body(request, max_body_bytes))
        headers = {
            "Location": f"/plans/{key}",
            "Coop-Plan-Cache": "hit" if hit else "miss",
        }
        return Response(made.to_json(), media_type="application/json", headers=headers)

    @app.get(
        "/plans/{key}",
        summary="A stored plan",
        responses={200: plan_content, 404: problem["not-found"]},
    )
    async def get_plan(key: str) -> Response:
        made = await asyncio.to_thread(planner.stored, key)
        if made is None:
            raise ProblemError("not-found", f"no plan {key}")
        return Response(made.to_json(), media_type="application/json")

    @app.get("/healthz", summary="Whether the service answers")
    async def healthz() -> dict[str, str]:
        return {"status": "ok", "version": version}

    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
    return app


async def _body(request: Request, limit: int) -> bytes:
    """The body, refused as soon as it is known to be larger than `limit` bytes."""
    parts: list[bytes] = []
    size = 0
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise ProblemError("body-too-large", f"at most {limit} bytes", max_body_bytes=limit)
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise ProblemError("body-too-large", f"at most {limit} bytes", max_body_bytes=limit)
        parts.append(part)
    return b"".join(parts)
