"""Client protocol: requests to the service and their answers, without I/O.

A request names its graph by its digest; the graph is sent only to a server that does not have it.
Each call is a generator of exchanges, which receives the answer of each exchange.
"""

import gzip
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import httpx
import msgspec

from coop_plan.planner.core.errors import INFEASIBLE_FIELDS, InfeasibleBudgetError, TimeLimitError
from coop_plan.planner.options import OPTION_NAMES, PlanOptions
from coop_plan.planner.plan_cache.record import StoredPlan
from coop_plan.schemas import Graph, InvalidInputError, Plan, parse_plan
from coop_plan.schemas.fingerprint import digest_of

WAIT_SECONDS = 60
"""Time that one request waits for its plan; then it is sent again."""

CONNECT_SECONDS = 5.0

PUTS, SENDS = 2, 8
"""Limits on sending a graph to a server that loses it: by PUT, and in all.

After the first, the graph is in the request. Its store may lose it again before it is planned.
"""

SEND_SECONDS = 65.0
"""Time in which a request with its graph is sent and read."""

NOT_STORED = 507
"""Status of a graph that the server cannot store: it is then sent with the request."""

PREFIX = "urn:coop-plan:problem:"

T = TypeVar("T")


class ServerError(Exception):
    """The server's answer is not the requested one."""


class ServerAwayError(ServerError):
    """The server cannot be reached, or was busy at each retry."""


class ServerProblemError(ServerError):
    """The server refused the request.

    Attributes:
        name: type of the problem, as listed in docs/service.md.
        status: HTTP status.
        members: other members of the problem document.
    """

    def __init__(self, name: str, status: int, detail: str, members: Mapping[str, Any]) -> None:
        self.name, self.status, self.members = name, status, members
        super().__init__(f"{name} ({status}): {detail}")


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a job; the server's document may have more fields."""

    id: str
    state: str
    elapsed_seconds: float
    message: str = ""
    fraction: float | None = None
    overhead: float | None = None
    bound: float | None = None
    gap: float | None = None
    plan: str | None = None


@dataclass(frozen=True)
class Exchange:
    """One HTTP request, `pause` seconds after the answer before it.

    Answers with other statuses than `statuses` are problems.
    """

    method: str
    path: str
    statuses: frozenset[int]
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 30.0
    pause: float = 0.0


Exchanges = Generator[Exchange, httpx.Response, T]

JSON = {"Content-Type": "application/json"}
PACKED = JSON | {"Content-Encoding": "gzip"}


def plan_exchanges(graph: Graph, options: PlanOptions) -> Exchanges[Plan]:
    """Request a plan; returns it, verified."""
    document = graph.to_json().encode()
    digest = digest_of(document)
    body = plan_request_body(digest, options)
    # respond-async: no provisional plan for a smaller budget; the request is sent again instead.
    prefer = JSON | {"Prefer": f"wait={WAIT_SECONDS}, respond-async"}
    ask = Exchange(
        "POST", "/plan", frozenset({200, 202, 404}), body, prefer, WAIT_SECONDS + CONNECT_SECONDS
    )
    sends = 0
    pause = 0.0
    while (answer := (yield replace(ask, pause=pause))).status_code != 200:
        pause = min(retry_after(answer), WAIT_SECONDS)
        if answer.status_code == 404:
            problem = problem_of(answer)
            unknown = isinstance(problem, ServerProblemError) and problem.name == "unknown-graph"
            if not unknown or sends == SENDS:
                raise problem
            sends += 1
            if "Content-Encoding" in ask.headers:  # the request has its graph
                continue
            if sends <= PUTS:
                put = _put(document, digest)
                stored = yield replace(put, statuses=put.statuses | {NOT_STORED})
                if stored.status_code != NOT_STORED:
                    continue
            body = gzip.compress(plan_request_body(graph, options), 1)
            seconds = WAIT_SECONDS + SEND_SECONDS
            ask = replace(ask, content=body, headers=prefer | PACKED, seconds=seconds)
    made = parse_plan(answer.content, source="the server's plan")
    linked = options.apply_link(graph)
    if StoredPlan.of(made, linked).for_request(linked, options) is None:
        raise ServerError("the server's plan is not valid for the request")
    return made


def put_exchanges(document: bytes, digest: str) -> Exchanges[str]:
    """Store a graph; returns its digest."""
    yield _put(document, digest)
    return digest


def _put(document: bytes, digest: str) -> Exchange:
    content = gzip.compress(document, 1)
    return Exchange("PUT", f"/graphs/{digest}", frozenset({201, 204}), content, PACKED, 120.0)


def stored_plan_exchanges(key: str) -> Exchanges[Plan]:
    """Get the stored plan of a key."""
    answer = yield Exchange("GET", f"/plans/{key}", frozenset({200}))
    return parse_plan(answer.content, source=f"plan {key}")


def job_exchanges(job_id: str, method: str) -> Exchanges[JobState]:
    """Get the state of a job, or cancel it (`DELETE`)."""
    answer = yield Exchange(method, f"/jobs/{job_id}", frozenset({200}))
    return msgspec.json.decode(answer.content, type=JobState)


def plan_request_body(graph: Graph | str, options: PlanOptions) -> bytes:
    """Body of `POST /plan` for a graph, or for one that is named by its digest."""
    values = msgspec.to_builtins(options)
    fields = {name: values[name] for name in OPTION_NAMES if values[name] is not None}
    return msgspec.json.encode({"graph": graph, **fields})


def retry_after(answer: httpx.Response) -> float:
    """Seconds of an answer's `Retry-After`; 0 without one."""
    after = answer.headers.get("retry-after", "")
    return float(after) if re.fullmatch("[0-9]{1,5}", after) else 0.0


def problem_of(answer: httpx.Response) -> Exception:
    """The exception for an answer that is a problem."""
    try:
        document: dict[str, Any] = answer.json()
        name = str(document["type"]).removeprefix(PREFIX)
        detail = str(document["detail"])
    except (ValueError, KeyError, TypeError):
        return ServerError(f"status {answer.status_code}, not an answer of a coop-plan service")
    members = {k: v for k, v in document.items() if k not in ("type", "title", "detail")}
    try:
        if name == "budget-infeasible":
            given = {name: members[name] for name in INFEASIBLE_FIELDS if name in members}
            return InfeasibleBudgetError("the server", **given)
    except TypeError:  # a member that every server sends is missing
        pass
    if name == "invalid-input":
        return InvalidInputError(detail, str(members.get("pointer", "")), "the server")
    if name == "time-limit":
        return TimeLimitError(detail)
    return ServerProblemError(name, answer.status_code, detail, members)
