"""The REST service: `POST /plan`, plans and jobs by their addresses, `/livez`, `/readyz`."""

import asyncio
import contextlib
import functools
import logging
import math
import os
import re
from collections.abc import AsyncIterator, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from coop_plan.api import graph_addresses, problems
from coop_plan.api.access import OPEN, SCHEME, Access, Caller
from coop_plan.api.answers import Limits, PlanRequest, Reply
from coop_plan.api.bodies import Bodies
from coop_plan.api.doorkeeper import LOOPBACK, Doorkeeper
from coop_plan.api.entity_tags import tagged
from coop_plan.api.jobs import RETRY_SECONDS, Bench, Job, Jobs
from coop_plan.api.metrics import MEDIA_TYPE, Metrics
from coop_plan.api.observed import Observed
from coop_plan.api.problems import ProblemError
from coop_plan.api.solvers import LocalBench
from coop_plan.api.tokens import Tokens
from coop_plan.api.worker import Settings, Task
from coop_plan.api.workers import Pool, WorkerLostError
from coop_plan.planner.cache.opening import open_store
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

LOOK_SECONDS = 60.0
"""How long reading a request and looking for its answer may take."""

SEARCH_SECONDS = 60.0
"""How long a better plan than a kept one is looked for."""

BETTER_THAN: dict[str, Any] = {
    "name": "better-than",
    "in": "query",
    "description": "Only a plan of less overhead than this (a share); else one is looked for",
    "schema": {"type": "number"},
}

KEY = re.compile("[0-9a-f]{64}")

log = logging.getLogger("coop_plan.service")


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """
    What a service is started with.

    `solvers` plans are made at once, each in a process of `solver_memory` bytes, `queue` more may
    wait; `readers` processes of `reader_memory` bytes read requests and look for answers. Records
    at the address `store` are sealed with `secret`. With a `broker`, the address of a Redis, plans
    are made by the workers of a cluster, where `queue` may wait. Without `tokens` anybody may ask.
    """

    store: str
    secret: bytes
    broker: str = ""
    limits: Limits = Limits()
    solvers: int = os.cpu_count() or 1
    readers: int = max(1, (os.cpu_count() or 1) // 2)
    queue: int = 64
    solver_memory: int = 8 << 30
    reader_memory: int = 2 << 30
    store_bytes: int = 1 << 30
    hosts: Collection[str] = LOOPBACK
    tokens: Tokens | None = None

    def worker(self, memory: int) -> Settings:
        """The settings of a worker process of so many bytes."""
        return Settings(self.store, self.secret, self.limits, memory, self.store_bytes)


class Desk:
    """Where requests are answered: from the store, or by one solve however many ask at once."""

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self._metrics = metrics
        self._readers = Pool(service.worker(service.reader_memory), service.readers)
        self._threads = ThreadPoolExecutor(service.readers, thread_name_prefix="reader")
        self._store = open_store(service.store, b"")
        self.bench: Bench
        if service.broker:
            from coop_plan.api.cluster.bench import ClusterBench

            self.bench = ClusterBench(
                service.broker, service.secret, queue=service.queue, seconds=service.limits.seconds
            )
        else:
            solvers = Pool(service.worker(service.solver_memory), service.solvers)
            self.bench = LocalBench(solvers, solvers=service.solvers, queue=service.queue)
        self.jobs = Jobs(
            self.bench,
            secret=service.secret,
            seconds=service.limits.seconds,
            solved=metrics.solved,
        )
        metrics.follow(self.jobs.states)

    async def look(self, task: Task, body: bytes = b"", record: bytes = b"") -> tuple[Reply, bytes]:
        """What a reader answers; raises `ProblemError` where that is a problem."""
        call = functools.partial(self._readers.call, task, body, record, seconds=LOOK_SECONDS)
        try:
            reply, data = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except WorkerLostError:
            message = "the request needs more memory or time to read than this server gives it"
            raise ProblemError("too-much-work", message) from None
        if reply.dropped:
            self._metrics.dropped(reply.dropped)
            log.warning("%d records of the plan store were damaged or no answer", reply.dropped)
        _raise(reply)
        return reply, data

    async def answer(
        self, request: Request, body: bytes, encoding: str, wait: float, *, provisional: bool
    ) -> tuple[Reply, bytes, Job | None]:
        """
        The reply with its plan; or a job, which is over where it was waited for.

        A job that is not over goes on. Beside it there may be a plan for a smaller budget.
        """
        caller: Caller = request.state.caller
        reply, data = await self.look(Task("ask", encoding), body)
        caller.check(reply)
        if reply.found:
            return reply, data, None
        reply.seconds = caller.check_seconds(reply.seconds)
        question, packed = body, encoding
        if reply.named:
            (_, question), packed = await self.look(Task("whole", encoding), body), ""
        job = self.jobs.join(reply, question, packed)
        try:
            caller.wait_for(job)
        except ProblemError:
            self.jobs.leave(job)
            raise
        gone = asyncio.create_task(_gone(request))
        back = False
        try:
            async with asyncio.timeout(wait):
                while not job.over:
                    changed = asyncio.create_task(job.changed.wait())
                    both = {changed, gone}
                    try:
                        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        changed.cancel()
                    if gone.done():
                        raise ProblemError("cancelled", "the client left")
        except TimeoutError:
            await self.jobs.want(job)
            if not job.over:
                less = Task("for-less", encoding)
                reply, data = (reply, b"") if not provisional else await self.look(less, body)
                return reply, data, job
        except asyncio.CancelledError:  # this server ends, the job need not
            back = True
            raise ProblemError("busy", "the server ends: ask again", retry_after=1) from None
        finally:
            gone.cancel()
            self.jobs.leave(job, back=back)
        if job.problem is not None:
            _raise(job.problem)
        reply, data = await self.look(Task("ask", encoding, with_record=True), body, job.record)
        if not reply.found:
            raise ProblemError("busy", "the plan was made and is not there", retry_after=1)
        return reply, data, job

    async def better(self, caller: Caller, key: str, overhead: float) -> tuple[bytes, Job | None]:
        """The kept plan if it has less overhead; else a job that looks for one, if any."""
        reply, data = await self.look(Task("stored", key=key))
        if reply.figures.overhead is not None and reply.figures.overhead < overhead:
            return data, None
        if reply.settled:
            return b"", None
        seconds = min(SEARCH_SECONDS, caller.limits.seconds or SEARCH_SECONDS)
        job = self.jobs.search(key, seconds)
        try:
            caller.wait_for(job)
            await self.jobs.want(job)
        finally:
            self.jobs.leave(job)
        if job.problem is not None:
            _raise(job.problem)
        return b"", job

    async def check(self) -> None:
        """Raise `ProblemError` where plans cannot be kept or made."""
        await asyncio.to_thread(self._check_store)
        await self.bench.check()

    def _check_store(self) -> None:
        try:
            self._store.check()
        except OSError:
            message = "the plan store cannot be written"
            raise ProblemError("busy", message, retry_after=5) from None

    async def close(self) -> None:
        """End all processes."""
        await self.jobs.close()
        self._readers.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._store.close()


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
    app = FastAPI(title="coop-plan", version="1", docs_url=None, redoc_url=None, lifespan=lifespan)
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
            _, data = await at_work().look(Task("stored", key=key))
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

    graph_addresses.install(app, bodies, look)
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


def _raise(reply: Reply) -> None:
    if reply.problem:
        raise ProblemError(reply.problem, reply.detail, **reply.members)


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


async def _gone(request: Request) -> None:
    """Return when the client has left; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
