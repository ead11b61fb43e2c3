"""Authentication: `Authorization: Bearer`, the scopes of a token and its limits in this server."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec
from limits import RateLimitItemPerSecond
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from coop_plan.api.jobs.jobs import Job
from coop_plan.api.jobs.request_handler import Limits
from coop_plan.api.service.problems import ProblemError, response
from coop_plan.api.service.routes_pages import DOCS_PATHS
from coop_plan.api.service.tokens import Token, TokenFile, TokenLimits

PUBLIC_PATHS = frozenset({"/", "/livez", "/readyz", "/healthz", "/openapi.json"}) | DOCS_PATHS
"""Paths that need no token: probes and static documents."""

SCHEME: dict[str, Any] = {"type": "http", "scheme": "bearer"}
"""OpenAPI security scheme."""


def scopes_for(method: str, path: str) -> frozenset[str]:
    """Scopes of which a token needs one for a request; `plan` for unknown requests."""
    if path == "/metrics":
        return frozenset({"admin"})
    if method in ("GET", "HEAD"):
        return frozenset({"read", "plan"})
    if method == "DELETE":
        return frozenset({"plan", "admin"})
    return frozenset({"plan"})


@dataclass(eq=False)
class Caller:
    """The client of a request: the holder of a token, or anonymous if the server needs none."""

    name: str = ""
    limits: TokenLimits = field(default_factory=TokenLimits)
    scopes: Collection[str] = ("plan", "read", "admin")
    jobs: set[Job] = field(default_factory=set)

    def within(self, server: Limits) -> Limits:
        """The server's limits on a body, or the token's where these are lower."""
        mine = self.limits
        return msgspec.structs.replace(
            server,
            body_bytes=min(server.body_bytes, mine.bytes or server.body_bytes),
            ops=min(server.ops, mine.ops or server.ops),
        )

    def check_time_limit(self, seconds: float | None) -> float | None:
        """The time limit of a solve: the requested one, or else the token's.

        Raises:
            ProblemError: the requested one is above the token's.
        """
        limit = self.limits.seconds
        if limit is not None and seconds is not None and seconds > limit:
            message = f"the token's time limit is {limit:g} s"
            raise ProblemError("invalid-input", message, pointer="/time_limit")
        return limit if seconds is None else seconds

    def count_job(self, job: Job) -> None:
        """Count a job until it is finished.

        Raises:
            ProblemError: the token has as many unfinished jobs as its limit allows.
        """
        self.jobs = {other for other in self.jobs if not other.finished}
        limit = self.limits.running_jobs
        if limit is not None and len(self.jobs - {job}) >= limit:
            message = f"the token has {limit} unfinished jobs, its limit"
            raise ProblemError("too-many-requests", message, retry_after=2)
        self.jobs.add(job)


ANONYMOUS = Caller()


class Authentication:
    """Middleware that checks tokens and their scopes, if the server has tokens."""

    def __init__(self, app: ASGIApp, tokens: TokenFile | None) -> None:
        self._app, self._tokens = app, tokens
        self._callers: dict[str, Caller] = {}
        self._rates = MovingWindowRateLimiter(MemoryStorage())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with `request.state.caller`, or answer it with a problem."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            scope.setdefault("state", {})["caller"] = self._caller(scope)
        except ProblemError as problem:
            headers = {"WWW-Authenticate": "Bearer"} if problem.name == "unauthorized" else {}
            answer = response(problem.name, problem.detail, headers, **problem.members)
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        if self._tokens is None or scope["path"] in PUBLIC_PATHS:
            return ANONYMOUS
        kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        token = self._tokens.find(given.strip()) if kind.lower() == "bearer" else None
        if token is None:
            raise ProblemError("unauthorized", "send a token: Authorization: Bearer ...")
        self._check_rate(token)
        needed = scopes_for(scope["method"], scope["path"])
        if not needed & set(token.scopes):
            scopes = " or ".join(sorted(needed))
            raise ProblemError("forbidden", f"the request needs a token of scope {scopes}")
        caller = self._callers.setdefault(token.name, Caller(token.name))
        caller.scopes, caller.limits = token.scopes, token.limits
        return caller

    def _check_rate(self, token: Token) -> None:
        limit = token.limits.requests_per_second
        if limit is not None and not self._rates.hit(RateLimitItemPerSecond(limit), token.name):
            message = f"the token's limit is {limit} requests a second"
            raise ProblemError("too-many-requests", message, retry_after=1)
