"""Authentication: `Authorization: Bearer`, the scopes of a token and its limits in this server.

A route names its scopes by `Security`; a token needs one of them. Routes without are public.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec
from fastapi import Request, Security
from fastapi.security import HTTPBearer, SecurityScopes
from limits import RateLimitItemPerSecond
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from coop_plan.api.jobs.jobs import Job
from coop_plan.api.jobs.request_handler import Limits, ProblemError
from coop_plan.api.service.tokens import Token, TokenFile, TokenLimits


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


class Callers:
    """The callers of a server by their tokens; all are anonymous if it has none."""

    def __init__(self, tokens: TokenFile | None) -> None:
        self._tokens = tokens
        self._callers: dict[str, Caller] = {}
        self._rates = MovingWindowRateLimiter(MemoryStorage())

    def find(self, given: str, scopes: Collection[str]) -> Caller:
        """The caller with a token, which needs one of the scopes; raises `ProblemError`."""
        if self._tokens is None:
            return ANONYMOUS
        token = self._tokens.find(given)
        if token is None:
            raise ProblemError("unauthorized", "send a token: Authorization: Bearer ...")
        self._check_rate(token)
        if not set(scopes) & set(token.scopes):
            needed = " or ".join(sorted(scopes))
            raise ProblemError("forbidden", f"the request needs a token of scope {needed}")
        caller = self._callers.setdefault(token.name, Caller(token.name))
        caller.scopes, caller.limits = token.scopes, token.limits
        return caller

    def _check_rate(self, token: Token) -> None:
        limit = token.limits.requests_per_second
        if limit is not None and not self._rates.hit(RateLimitItemPerSecond(limit), token.name):
            message = f"the token's limit is {limit} requests a second"
            raise ProblemError("too-many-requests", message, retry_after=1)


class Authenticate(HTTPBearer):
    """Dependency: the caller of a request, also in `request.state`."""

    async def __call__(self, request: Request, needed: SecurityScopes) -> Caller:  # type: ignore[override]
        """The caller; raises `ProblemError` without a token of one of the scopes."""
        callers: Callers = request.app.state.callers
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        caller = callers.find(token.strip() if kind.lower() == "bearer" else "", needed.scopes)
        request.state.caller = caller
        return caller


AUTHENTICATE = Authenticate(scheme_name="token")
READER = Security(AUTHENTICATE, scopes=["read", "plan"])
PLANNER = Security(AUTHENTICATE, scopes=["plan"])
CANCELLER = Security(AUTHENTICATE, scopes=["plan", "admin"])
ADMIN = Security(AUTHENTICATE, scopes=["admin"])
