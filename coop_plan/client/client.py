"""A client of the service: `coop_plan.Client`, and `coop_plan.AsyncClient` for asyncio."""

import os
import secrets
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_before_delay,
    wait_random_exponential,
)

from coop_plan.api.service.graph_store import digest_of
from coop_plan.client import protocol
from coop_plan.client.protocol import Calls, Exchange, JobState, ServerAwayError
from coop_plan.planner.options import PlanOptions
from coop_plan.schemas import Graph, InvalidInputError, Plan

TOKEN_VARIABLE = "COOP_PLAN_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable of the token, which on a command line everybody would see."""

AGAIN = frozenset({429, 502, 503})
"""Statuses that another try may change: ours have `Retry-After`, a proxy's mean a restart."""

PATIENCE_SECONDS = 30.0

T = TypeVar("T")


class NotNowError(ServerAwayError):
    """An answer that another try may change, and the server's word when (s)."""

    def __init__(self, answer: httpx.Response) -> None:
        told = answer.headers.get("retry-after", "")
        self.seconds = float(told) if told.isdigit() and len(told) < 6 else 0.0
        super().__init__(str(protocol.problem_of(answer)))


class _Caller:
    """What both clients do: requests from exchanges, and when to try again."""

    def __init__(self, server: str, token: str | None, patience_seconds: float) -> None:
        try:
            parts = urlsplit(server)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise InvalidInputError(f"'{server[:100]}' is no server: write http://HOST:PORT")
        self.server = server.rstrip("/")
        self._token = token or os.environ.get(TOKEN_VARIABLE)
        self._retry: dict[str, Any] = {
            "stop": stop_before_delay(patience_seconds),
            "wait": _pause,
            "retry": retry_if_exception_type((httpx.TransportError, NotNowError)),
            "reraise": True,
        }

    def _headers(self) -> dict[str, str]:
        """Of all requests of one call, which are one trace."""
        headers = {"traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        return headers

    def _request(self, exchange: Exchange, headers: dict[str, str]) -> dict[str, Any]:
        timeout = httpx.Timeout(exchange.seconds, connect=protocol.CONNECT_SECONDS)
        return {
            "method": exchange.method,
            "url": f"{self.server}{exchange.path}",
            "content": exchange.content,
            "headers": {**headers, **exchange.headers},
            "timeout": timeout,
        }

    def _away(self, error: httpx.HTTPError) -> ServerAwayError:
        reason = str(error) or type(error).__name__
        return ServerAwayError(f"{self.server} cannot be reached: {reason}")


class Client(_Caller):
    """
    Asks a planning service; to be closed, or used as a context.

    Exchanges that fail because the server is away or busy are repeated, with random pauses, for
    `patience_seconds` at most. The token is `token` or that of `COOP_PLAN_TOKEN`.

    Every method raises `ServerAwayError` where that did not help, `ServerProblemError` where the
    server refuses, and `ServerError` for what is no answer.
    """

    def __init__(
        self,
        server: str,
        *,
        token: str | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(server, token, patience_seconds)
        self._http = httpx.Client(transport=transport)

    def plan(
        self, graph: Graph, budget: PlanOptions | str | int, **fields: Any
    ) -> Plan:
        """
        What `coop_plan.plan` answers, made by the server or kept there; verified here.

        Raises:
            InvalidInputError, InfeasibleBudgetError, TimeLimitError: as `coop_plan.plan` does.
        """
        return self._run(protocol.plan_calls(graph, PlanOptions.given(budget, fields)))

    def put_graph(self, graph: Graph) -> str:
        """Send a graph; its digest."""
        document = graph.to_json().encode()
        return self._run(protocol.put_calls(document, digest_of(document)))

    def kept(self, key: str) -> Plan:
        """The plan of a key, in the ids of the graph that it was made for."""
        return self._run(protocol.kept_calls(key))

    def job(self, job_id: str) -> JobState:
        """How a solve is getting on."""
        return self._run(protocol.job_calls(job_id, "GET"))

    def cancel(self, job_id: str) -> JobState:
        """Cancel a solve, for all who wait for it."""
        return self._run(protocol.job_calls(job_id, "DELETE"))

    def _run(self, call: Calls[T]) -> T:
        headers = self._headers()
        answer: httpx.Response | None = None
        while True:
            try:
                exchange = next(call) if answer is None else call.send(answer)
            except StopIteration as end:
                made: T = end.value
                return made
            try:
                answer = Retrying(**self._retry)(self._send, exchange, headers)
            except httpx.HTTPError as error:
                raise self._away(error) from error

    def _send(self, exchange: Exchange, headers: dict[str, str]) -> httpx.Response:
        return _taken(exchange, self._http.request(**self._request(exchange, headers)))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(_Caller):
    """`Client` for asyncio: the same methods, to be awaited, and the same errors."""

    def __init__(
        self,
        server: str,
        *,
        token: str | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(server, token, patience_seconds)
        self._http = httpx.AsyncClient(transport=transport)

    async def plan(
        self, graph: Graph, budget: PlanOptions | str | int, **fields: Any
    ) -> Plan:
        """See `Client.plan`."""
        return await self._run(protocol.plan_calls(graph, PlanOptions.given(budget, fields)))

    async def put_graph(self, graph: Graph) -> str:
        """See `Client.put_graph`."""
        document = graph.to_json().encode()
        return await self._run(protocol.put_calls(document, digest_of(document)))

    async def kept(self, key: str) -> Plan:
        """See `Client.kept`."""
        return await self._run(protocol.kept_calls(key))

    async def job(self, job_id: str) -> JobState:
        """See `Client.job`."""
        return await self._run(protocol.job_calls(job_id, "GET"))

    async def cancel(self, job_id: str) -> JobState:
        """See `Client.cancel`."""
        return await self._run(protocol.job_calls(job_id, "DELETE"))

    async def _run(self, call: Calls[T]) -> T:
        headers = self._headers()
        answer: httpx.Response | None = None
        while True:
            try:
                exchange = next(call) if answer is None else call.send(answer)
            except StopIteration as end:
                made: T = end.value
                return made
            try:
                answer = await AsyncRetrying(**self._retry)(self._send, exchange, headers)
            except httpx.HTTPError as error:
                raise self._away(error) from error

    async def _send(self, exchange: Exchange, headers: dict[str, str]) -> httpx.Response:
        return _taken(exchange, await self._http.request(**self._request(exchange, headers)))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _taken(exchange: Exchange, answer: httpx.Response) -> httpx.Response:
    """The answer, if it is one that the call takes."""
    if answer.status_code in exchange.statuses:
        return answer
    if answer.status_code in AGAIN:
        raise NotNowError(answer)
    raise protocol.problem_of(answer)


_jitter = wait_random_exponential(multiplier=0.2, max=5.0)


def _pause(state: RetryCallState) -> float:
    """Seconds until the next try: what the server said, and a random time more."""
    error = state.outcome.exception() if state.outcome is not None else None
    told = error.seconds if isinstance(error, NotNowError) else 0.0
    return told + _jitter(state)
