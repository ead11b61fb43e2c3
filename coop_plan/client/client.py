"""A client of the service: `coop_plan.Client`, and `coop_plan.AsyncClient` for asyncio."""

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar
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

from coop_plan.client import protocol
from coop_plan.client.protocol import Exchange, Exchanges, JobState, ServerAwayError
from coop_plan.planner.options import PlanOptions
from coop_plan.schemas import Graph, InvalidInputError, Plan
from coop_plan.schemas.fingerprint import digest_of

TOKEN_VARIABLE = "COOP_PLAN_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable of the token; other users could read it on a command line."""

RETRY_STATUSES = frozenset({429, 502, 503})
"""Statuses of answers that are retried: of a busy server, and of a proxy during its restart."""

PATIENCE_SECONDS = 30.0

T = TypeVar("T")
H = TypeVar("H", httpx.Client, httpx.AsyncClient)


class RetryableError(ServerAwayError):
    """An answer that is retried, after its `Retry-After` (s)."""

    def __init__(self, answer: httpx.Response) -> None:
        self.seconds = protocol.retry_after(answer)
        super().__init__(str(protocol.problem_of(answer)))


class _BaseClient(Generic[H]):
    """Shared by both clients: HTTP requests from exchanges, and the policy of retries."""

    _new_http: Callable[..., H]

    def __init__(
        self,
        server: str,
        *,
        token: str | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
        transport: httpx.BaseTransport | httpx.AsyncBaseTransport | None = None,
    ) -> None:
        try:
            parts = urlsplit(server)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise InvalidInputError(
                f"'{server[:100]}' is not the URL of a server: write http://HOST:PORT"
            )
        self.server = server.rstrip("/")
        self._token = token or os.environ.get(TOKEN_VARIABLE)
        self._retry: dict[str, Any] = {
            "stop": stop_before_delay(patience_seconds),
            "wait": _pause,
            "retry": retry_if_exception_type((httpx.TransportError, RetryableError)),
            "reraise": True,
        }
        self._http: H = self._new_http(transport=transport)

    def _headers(self) -> dict[str, str]:
        """Headers of all requests of one call, which are one trace."""
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

    def _unreachable(self, error: httpx.HTTPError) -> ServerAwayError:
        reason = str(error) or type(error).__name__
        return ServerAwayError(f"{self.server} cannot be reached: {reason}")


class Client(_BaseClient[httpx.Client]):
    """Client of a planning service; to be closed, or used as a context manager.

    Requests that fail because the server is unreachable or busy are retried, with random pauses,
    for up to `patience_seconds`. Without `token` the token is that of `COOP_PLAN_TOKEN`.

    Every method raises `ServerAwayError` if the retries fail, `ServerProblemError` if the server
    refuses the request, and `ServerError` for an answer that is not a service's.
    """

    _new_http = httpx.Client

    def plan(self, graph: Graph, budget: PlanOptions | str | int, **fields: Any) -> Plan:
        """The plan of `coop_plan.plan`, made or stored by the server and verified here.

        `fields` are those of `PlanOptions`.

        Raises:
            InvalidInputError, InfeasibleBudgetError, TimeLimitError: as `coop_plan.plan` does.
        """
        return self._run(protocol.plan_exchanges(graph, PlanOptions.given(budget, fields)))

    def check_alive(self, seconds: float) -> None:
        """Raise `ServerAwayError` unless the server answers within `seconds`, without a retry."""
        try:
            answer = self._http.get(f"{self.server}/livez", timeout=seconds)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if answer.is_server_error:
            raise ServerAwayError(f"{self.server} answers {answer.status_code}")

    def put_graph(self, graph: Graph) -> str:
        """Store a graph on the server; returns its digest."""
        document = graph.to_json().encode()
        return self._run(protocol.put_exchanges(document, digest_of(document)))

    def kept(self, key: str) -> Plan:
        """The stored plan of a key, with the ids of the graph that it was made for."""
        return self._run(protocol.stored_plan_exchanges(key))

    def job(self, job_id: str) -> JobState:
        """State of a job."""
        return self._run(protocol.job_exchanges(job_id, "GET"))

    def cancel(self, job_id: str) -> JobState:
        """Cancel a job for all its clients."""
        return self._run(protocol.job_exchanges(job_id, "DELETE"))

    def _run(self, exchanges: Exchanges[T]) -> T:
        headers = self._headers()
        answer: httpx.Response | None = None
        while True:
            try:
                exchange = next(exchanges) if answer is None else exchanges.send(answer)
            except StopIteration as end:
                made: T = end.value
                return made
            time.sleep(exchange.pause)
            try:
                answer = Retrying(**self._retry)(self._send, exchange, headers)
            except httpx.HTTPError as error:
                raise self._unreachable(error) from error

    def _send(self, exchange: Exchange, headers: dict[str, str]) -> httpx.Response:
        return _checked(exchange, self._http.request(**self._request(exchange, headers)))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(_BaseClient[httpx.AsyncClient]):
    """`Client` for asyncio: the same methods as coroutines, and the same errors."""

    _new_http = httpx.AsyncClient

    async def plan(self, graph: Graph, budget: PlanOptions | str | int, **fields: Any) -> Plan:
        """See `Client.plan`."""
        return await self._run(protocol.plan_exchanges(graph, PlanOptions.given(budget, fields)))

    async def put_graph(self, graph: Graph) -> str:
        """See `Client.put_graph`."""
        document = graph.to_json().encode()
        return await self._run(protocol.put_exchanges(document, digest_of(document)))

    async def kept(self, key: str) -> Plan:
        """See `Client.kept`."""
        return await self._run(protocol.stored_plan_exchanges(key))

    async def job(self, job_id: str) -> JobState:
        """See `Client.job`."""
        return await self._run(protocol.job_exchanges(job_id, "GET"))

    async def cancel(self, job_id: str) -> JobState:
        """See `Client.cancel`."""
        return await self._run(protocol.job_exchanges(job_id, "DELETE"))

    async def _run(self, exchanges: Exchanges[T]) -> T:
        headers = self._headers()
        answer: httpx.Response | None = None
        while True:
            try:
                exchange = next(exchanges) if answer is None else exchanges.send(answer)
            except StopIteration as end:
                made: T = end.value
                return made
            await asyncio.sleep(exchange.pause)
            try:
                answer = await AsyncRetrying(**self._retry)(self._send, exchange, headers)
            except httpx.HTTPError as error:
                raise self._unreachable(error) from error

    async def _send(self, exchange: Exchange, headers: dict[str, str]) -> httpx.Response:
        return _checked(exchange, await self._http.request(**self._request(exchange, headers)))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _checked(exchange: Exchange, answer: httpx.Response) -> httpx.Response:
    """The answer, if its status is one of the exchange's; else its error is raised."""
    if answer.status_code in exchange.statuses:
        return answer
    if answer.status_code in RETRY_STATUSES:
        raise RetryableError(answer)
    raise protocol.problem_of(answer)


_jitter = wait_random_exponential(multiplier=0.2, max=5.0)


def _pause(state: RetryCallState) -> float:
    """Seconds until the next retry: `Retry-After` and a random time."""
    error = state.outcome.exception() if state.outcome is not None else None
    after = error.seconds if isinstance(error, RetryableError) else 0.0
    return after + _jitter(state)
