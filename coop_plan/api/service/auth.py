"""Who may: `Authorization: Bearer`, the scopes of a token, and its limits in this server."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from limits import RateLimitItemPerSecond
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from coop_plan.api.service import routes_docs
from coop_plan.api.jobs.request_handler import Reply
from coop_plan.api.service.problems import ProblemError, response
from coop_plan.api.service.tokens import Token, TokenLimits, Tokens

OPEN = frozenset({"/", "/livez", "/readyz", "/healthz", "/openapi.json"}) | routes_docs.ADDRESSES
"""What probes ask for, and what is the same for everybody."""

SCHEME: dict[str, Any] = {"type": "http", "scheme": "bearer"}
"""For the OpenAPI description."""


def scopes_for(method: str, path: str) -> frozenset[str]:
    """The scopes of which one is needed; what nobody thought of is for those who plan."""
    if path == "/metrics":
        return frozenset({"admin"})
    if method in ("GET", "HEAD"):
        return frozenset({"read", "plan"})
    if method == "DELETE":
        return frozenset({"plan", "admin"})
    return frozenset({"plan"})


class Solve(Protocol):
    """A solve that somebody waits for."""

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""


@dataclass(eq=False)
class Caller:
    """Who asks: the holder of a token, or anybody where none is needed."""

    name: str = ""
    limits: TokenLimits = field(default_factory=TokenLimits)
    solves: set[Any] = field(default_factory=set)

    def check(self, reply: Reply) -> None:
        """
        Hold what was read against the caller's limits.

        Raises:
            ProblemError: it is more than that.
        """
        limits = self.limits
        if limits.bytes is not None and reply.read > limits.bytes:
            message = f"this token's bodies have {limits.bytes} bytes at most, unpacked"
            raise ProblemError("body-too-large", message, max_body_bytes=limits.bytes)
        if limits.ops is not None and reply.ops > limits.ops:
            message = f"{reply.ops} ops; this token's graphs have {limits.ops} at most"
            raise ProblemError("too-many-ops", message, max_ops=limits.ops)

    def check_seconds(self, asked: float | None) -> float | None:
        """
        The time limit of a solve: what is asked for, or the caller's own.

        Raises:
            ProblemError: it is more than the caller's.
        """
        most = self.limits.seconds
        if most is not None and asked is not None and asked > most:
            message = f"this token gives a request {most:g} s at most"
            raise ProblemError("invalid-input", message, pointer="/time_limit")
        return most if asked is None else asked

    def wait_for(self, solve: Solve) -> None:
        """
        Count a solve until it is over.

        Raises:
            ProblemError: too many others are being made for the caller.
        """
        self.solves = {other for other in self.solves if not other.over}
        most = self.limits.running_jobs
        if most is not None and len(self.solves - {solve}) >= most:
            message = f"{most} plans are being made for this token"
            raise ProblemError("too-many-requests", message, retry_after=2)
        self.solves.add(solve)


ANYBODY = Caller()


class Access:
    """Lets in who has a token for what is asked; without tokens, everybody."""

    def __init__(self, app: ASGIApp, tokens: Tokens | None) -> None:
        self._app, self._tokens = app, tokens
        self._callers: dict[str, Caller] = {}
        self._rates = MovingWindowRateLimiter(MemoryStorage())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may enter; `request.state.caller` is who asks."""
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
        if self._tokens is None or scope["path"] in OPEN:
            return ANYBODY
        kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        token = self._tokens.holder(given.strip()) if kind.lower() == "bearer" else None
        if token is None:
            raise ProblemError("unauthorized", "send a token: Authorization: Bearer ...")
        self._check_rate(token)
        needed = scopes_for(scope["method"], scope["path"])
        if not needed & set(token.scopes):
            words = " or ".join(sorted(needed))
            raise ProblemError("forbidden", f"this needs a token of scope {words}")
        return self._callers.setdefault(token.name, Caller(token.name, token.limits))

    def _check_rate(self, token: Token) -> None:
        most = token.limits.requests_per_second
        if most is None:
            return
        if not self._rates.hit(RateLimitItemPerSecond(most), token.name):
            message = f"this token has {most} requests a second"
            raise ProblemError("too-many-requests", message, retry_after=1)
