"""Connections whose request does not arrive in time."""

import asyncio

import uvicorn
from uvicorn.server import ServerState

from coop_plan.api.service import connection
from coop_plan.api.service.connection import HeadTimeoutProtocol
from coop_plan.api.service.host_check import HostCheck

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"there"})


def talk(*parts):
    """Answer of a server to a client that sends these parts and waits until the end."""

    async def exchange():
        config = uvicorn.Config(HostCheck(app, ["localhost"]), log_config=None, lifespan="off")
        config.load()
        loop, state = asyncio.get_running_loop(), ServerState()
        server = await loop.create_server(
            lambda: HeadTimeoutProtocol(config, state, {}), host="127.0.0.1", port=0
        )
        async with server, asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            answer = b""
            for part in parts:
                writer.write(part)
                answer += await reader.read(1 << 16) if part.endswith(b"\r\n\r\n") else b""
            answer += await reader.read()
            writer.close()
        return answer

    return asyncio.run(exchange())


def test_a_connection_without_a_whole_head_is_closed(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.1)
    assert talk() == b""
    assert talk(GET) == b""
    for parts in ([GET + b"\r\n", GET], [GET, b"\r\n", GET]):
        assert talk(*parts).count(b"200 OK") == 1


def test_a_body_of_two_lengths_is_refused_and_nothing_behind_it_read():
    lengths = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    answer = talk(b"POST / HTTP/1.1\r\nHost: localhost\r\n" + lengths + GET + b"\r\n")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"403" in answer
    assert b"connection: close" in answer.lower()
