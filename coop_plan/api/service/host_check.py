"""Host check: requests for other hosts or from other origins are refused before all else."""

import functools
import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coop_plan.api.service.headers import SECURITY_HEADERS
from coop_plan.api.service.problems import response

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """True if the address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class HostCheck:
    """Middleware against DNS rebinding and cross-site requests; adds security headers.

    It refuses a `Host` that is not in `hosts` ("*" allows any), and an `Origin` that is not the
    host itself.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with `forbidden`."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        headers = Headers(scope=scope)
        refusal = self._refusal(headers)
        if refusal:
            answer = response("forbidden", refusal, {"Connection": "close"})
            await answer(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    def _refusal(self, headers: Headers) -> str:
        host = _hostname(f"//{headers.get('host', '')}")
        if host not in self._hosts and "*" not in self._hosts:
            return "the server does not serve this Host: allow it by --allow-host"
        origin = headers.get("origin")
        if origin is not None and _hostname(origin) != host:
            return "the request's Origin is another host"
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy may have read the other length: request smuggling (RFC 9112, 6.3).
            return "the request has both Transfer-Encoding and Content-Length"
        return ""


@functools.lru_cache
def _hostname(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None
