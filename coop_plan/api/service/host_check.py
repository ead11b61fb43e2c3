"""What a request must be before anything is done for it: for this host, from no stranger."""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coop_plan.api.service.problems import response

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Doorkeeper:
    """
    Refuses other `Host`s (a name that an attacker points at this address) and other `Origin`s (a
    page in somebody's browser), and adds the headers that keep browsers out of answers.

    With "*" among the hosts any will do, and no origin.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may enter."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("X-Content-Type-Options", "nosniff")
                headers.setdefault("Cache-Control", "no-store")
                policy = "default-src 'none'; frame-ancestors 'none'"
                headers.setdefault("Content-Security-Policy", policy)
                headers.setdefault("Cross-Origin-Resource-Policy", "same-origin")
                headers.setdefault("Referrer-Policy", "no-referrer")
            await send(message)

        headers = Headers(scope=scope)
        refused = self._refuses(headers)
        if refused:
            close = {"Connection": "close"}
            await response("forbidden", refused, close)(scope, receive, guarded)
            return
        await self._app(scope, receive, guarded)

    def _refuses(self, headers: Headers) -> str:
        host = _name(f"//{headers.get('host', '')}")
        if host not in self._hosts and "*" not in self._hosts:
            return "this host is not served (--allow-host)"
        origin = headers.get("origin")
        if origin is not None and _name(origin) != host:
            return "requests from other origins are not taken"
        if "transfer-encoding" in headers and "content-length" in headers:
            # Whoever stands between may have taken the other one for its length (RFC 9112, 6.3).
            return "a request has one length"
        return ""


def _name(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None
