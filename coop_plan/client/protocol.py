"""What a client of the service sends and how it takes the answers, whoever carries it.

A question is asked by the digest of its graph, which is sent only to a server that does not have
it. Each call is a generator of exchanges: it is sent the answer of the one before.
"""

import gzip
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import msgspec

from coop_plan.api.service.graph_store import digest_of
from coop_plan.planner.core.errors import InfeasibleBudgetError, TimeLimitError
from coop_plan.planner.options import OPTION_NAMES, PlanOptions
from coop_plan.planner.plan_cache.record import StoredPlan
from coop_plan.schemas import Graph, InvalidInputError, Plan, parse_plan

WAIT_SECONDS = 60
"""How long one request waits for its plan; then the same is asked again."""

CONNECT_SECONDS = 5.0

SENDS = 2
"""How often a graph is sent to a server that does not keep it."""

PREFIX = "urn:coop-plan:problem:"

T = TypeVar("T")


class ServerError(Exception):
    """The server did not answer with what was asked for."""


class ServerAwayError(ServerError):
    """The server cannot be reached, or had too much to do all the time."""


class ServerProblemError(ServerError):
    """
    The server refused.

    Attributes:
        name: of the problem, as docs/service.md lists them.
        status: HTTP's.
        members: of the problem document.
    """

    def __init__(self, name: str, status: int, detail: str, members: Mapping[str, Any]) -> None:
        self.name, self.status, self.members = name, status, members
        super().__init__(f"{name} ({status}): {detail}")


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """What the server says of a job; it may say more."""

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
    """One request; `statuses` are those of the answers that are no problem."""

    method: str
    path: str
    statuses: frozenset[int]
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 30.0


Calls = Generator[Exchange, httpx.Response, T]

JSON = {"Content-Type": "application/json"}
PACKED = JSON | {"Content-Encoding": "gzip"}


def plan_calls(graph: Graph, options: PlanOptions) -> Calls[Plan]:
    """The exchanges of a question; its plan, verified here."""
    document = graph.to_json().encode()
    digest = digest_of(document)
    body = question(digest, options)
    # Rather ask again than train with a plan for a smaller budget.
    prefer = JSON | {"Prefer": f"wait={WAIT_SECONDS}, respond-async"}
    ask = Exchange(
        "POST", "/plan", frozenset({200, 202, 404}), body, prefer, WAIT_SECONDS + CONNECT_SECONDS
    )
    sends = 0
    while (answer := (yield ask)).status_code != 200:
        if answer.status_code == 404:
            problem = problem_of(answer)
            unknown = isinstance(problem, ServerProblemError) and problem.name == "unknown-graph"
            if not unknown or sends == SENDS:
                raise problem
            yield from put_calls(document, digest)
            sends += 1
    made = parse_plan(answer.content, source="the server's plan")
    asked = options.apply_link(graph)
    if StoredPlan.of(made, asked).for_question(asked, options) is None:
        raise ServerError("the server's plan does not hold for what was asked")
    return made


def put_calls(document: bytes, digest: str) -> Calls[str]:
    """Send a graph; its digest."""
    content = gzip.compress(document, 1)
    yield Exchange("PUT", f"/graphs/{digest}", frozenset({201, 204}), content, PACKED, 120.0)
    return digest


def kept_calls(key: str) -> Calls[Plan]:
    """A kept plan."""
    answer = yield Exchange("GET", f"/plans/{key}", frozenset({200}))
    return parse_plan(answer.content, source=f"plan {key}")


def job_calls(job_id: str, method: str) -> Calls[JobState]:
    """How a job is getting on, or its end."""
    answer = yield Exchange(method, f"/jobs/{job_id}", frozenset({200}))
    return msgspec.json.decode(answer.content, type=JobState)


def question(digest: str, options: PlanOptions) -> bytes:
    """The body of `POST /plan` for a graph that was sent."""
    given = msgspec.to_builtins(options)
    asked = {name: given[name] for name in OPTION_NAMES if given[name] is not None}
    return msgspec.json.encode({"graph": digest, **asked})


def problem_of(answer: httpx.Response) -> Exception:
    """The error of an answer that is a problem."""
    try:
        document: dict[str, Any] = answer.json()
        name = str(document["type"]).removeprefix(PREFIX)
        detail = str(document["detail"])
    except (ValueError, KeyError, TypeError):
        return ServerError(f"status {answer.status_code}, and no answer of a coop-plan service")
    members = {k: v for k, v in document.items() if k not in ("type", "title", "detail")}
    try:
        if name == "budget-infeasible":
            return InfeasibleBudgetError(
                "the server",
                members["budget_bytes"],
                members["min_feasible_bytes"],
                members["blocking_op"],
                members["blocking_op_name"],
                members["working_set_bytes"],
                held=members.get("held", ""),
                budget_lower_bound_bytes=members.get("budget_lower_bound_bytes"),
            )
    except KeyError:
        pass
    if name == "invalid-input":
        return InvalidInputError(detail, str(members.get("pointer", "")), "the server")
    if name == "time-limit":
        return TimeLimitError(detail)
    return ServerProblemError(name, answer.status_code, detail, members)
