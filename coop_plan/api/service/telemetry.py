"""Telemetry of requests: a trace (W3C Trace Context), a log line and metrics for each."""

import contextlib
import logging
import re
import secrets
import time
from typing import Any

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coop_plan.api.service.metrics import Metrics

TRACEPARENT = re.compile("([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
"""Methods that are labels of metrics; a client's invented ones would add time series."""

tracing: Any = None
with contextlib.suppress(ModuleNotFoundError):  # the extra `otel`
    from opentelemetry import trace as tracing

log = logging.getLogger("coop_plan.requests")


def trace_of(traceparent: str) -> tuple[str, str]:
    """Trace id and flags of a `traceparent` header; of a new trace, if the header is invalid."""
    found = TRACEPARENT.fullmatch(traceparent.strip())
    if found is not None:
        version, trace, parent, flags, more = found.groups()
        usable = version != "ff" and int(trace, 16) and int(parent, 16)
        if usable and (more is None or version != "00"):
            return trace, flags
    return secrets.token_hex(16), "00"


def span_of(traceparent: str) -> tuple[str, str, str]:
    """Trace id, span id and flags: those of OpenTelemetry's current span, or else new ones."""
    if tracing is not None:
        span = tracing.get_current_span().get_span_context()
        if span.is_valid:
            return f"{span.trace_id:032x}", f"{span.span_id:016x}", f"{span.trace_flags:02x}"
    trace, flags = trace_of(traceparent)
    return trace, secrets.token_hex(8), flags


class Telemetry:
    """Middleware that logs and counts each request, and adds `traceparent` to its response."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and record its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        trace, span, flags = span_of(Headers(scope=scope).get("traceparent", ""))
        began = time.perf_counter()
        status, sent, cache = 500, 0, ""

        async def send_recorded(message: Message) -> None:
            nonlocal status, sent, cache
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["traceparent"] = f"00-{trace}-{span}-{flags}"
                cache = headers.get("coop-plan-cache", "")
            else:
                sent += len(message.get("body", b""))
            await send(message)

        with structlog.contextvars.bound_contextvars(trace_id=trace, span_id=span):
            try:
                await self._app(scope, receive, send_recorded)
            finally:
                seconds = time.perf_counter() - began
                method = scope["method"] if scope["method"] in METHODS else "other"
                route = getattr(scope.get("route"), "path", "unknown")
                caller = getattr(scope.get("state", {}).get("caller"), "name", "")
                self._metrics.observe_request(method, route, status, seconds, cache)
                fields = {
                    "method": method,
                    "route": route,
                    "status": status,
                    "seconds": round(seconds, 6),
                    "bytes": sent,
                    "caller": caller,
                    "client": (scope.get("client") or ("",))[0],
                    "cache": cache,
                }
                log.info("request", extra=fields)
