"""Bodies that mean harm: each ends with a problem, no process is lost, and memory is bounded."""

import asyncio
import gzip
import json
import re
from pathlib import Path

import pytest
import zstandard
from fastapi import Request

from benchmarks.local_cluster import children
from coop_plan.api.jobs.request_handler import ProblemError
from coop_plan.api.service import request_body
from coop_plan.api.service.auth import Caller
from coop_plan.api.service.request_body import BodyReader, Memory
from tests.api.server import serving

SIZE = 16 << 20
HEAD = b'{"budget": 1, "graph": {"schema": "coop-plan/graph/1", '


def graph(inside):
    return HEAD + inside + b"}}"


def many(item, rest=1000):
    """As many as fit."""
    return b",".join([item] * ((SIZE - rest) // (len(item) + 1)))


def of_tensors(items):
    return graph(b'"ops": [], "tensors": [' + items + b"]")


BAD = {
    "wrong types": (lambda: of_tensors(many(b"1")), 413),
    "wrong objects": (lambda: of_tensors(many(b'{"id":"' + b"x" * 300 + b'"}')), 422),
    "many ops": (lambda: graph(b'"ops": [' + many(b'{"cost_us": 1, "inputs": []}') + b"]"), 413),
    "a giant integer": (lambda: of_tensors(b'{"bytes": ' + b"9" * (SIZE - 999) + b"}"), 422),
    "deep lists": (lambda: b"[" * SIZE, 422),
    "deep objects": (lambda: graph(b'"ops": ' + b'{"":' * (SIZE // 4 - 100)), 422),
    "unknown fields": (lambda: graph(many(b'"another": "' + b"x" * 100 + b'"')), 422),
    "one long name": (lambda: graph(b'"ops": 0, "name": "' + b"x" * (SIZE - 999) + b'"'), 422),
    "nothing": (lambda: b" " * SIZE, 422),
    "too large": (lambda: b" " * (SIZE + 1), 413),
}
"""Functions that make a body, and the status of its answer."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    limits = ["--max-body", str(SIZE), "--max-ops", "20000", "--solver-memory", "1MiB"]
    with serving(folder, "--store", str(folder / "plans"), *limits, "--solvers", "1") as client:
        client.get(f"/plans/{'0' * 64}")  # its reader is up
        post(client, b"[]")  # and that of bodies
        yield client


def post(server, content, **headers):
    headers = {"Content-Type": "application/json"} | headers
    return server.post("/plan", content=content, headers=headers)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_body_is_a_problem_and_costs_no_process(server, name):
    make, status = BAD[name]
    before = set(children(server.process.pid))
    body = make()
    assert len(body) <= SIZE + 1
    answers = [
        post(server, body),
        post(server, gzip.compress(body, 1), **{"Content-Encoding": "gzip"}),
        post(server, zstandard.compress(body, 1), **{"Content-Encoding": "zstd"}),
    ]
    for answer in answers:
        assert answer.headers["content-type"] == "application/problem+json", answer.text[:200]
        assert answer.status_code == status, answer.text[:200]
        assert len(answer.content) < 1000
    assert server.get("/livez").status_code == 200
    assert set(children(server.process.pid)) == before


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_bomb_is_refused_while_it_is_unpacked(server, encoding):
    pack = {"gzip": lambda data: gzip.compress(data, 9), "zstd": zstandard.compress}[encoding]
    before = set(children(server.process.pid))
    answer = post(server, pack(b" " * (1 << 29)), **{"Content-Encoding": encoding})
    assert answer.status_code == 413
    assert set(children(server.process.pid)) == before


def test_a_solve_without_memory_is_a_problem_and_the_server_goes_on(server, document):
    """Its process has less than the planner's libraries need."""
    for _ in range(2):
        answer = post(
            server, json.dumps({"graph": document, "budget": 330, "alignment": 1}).encode()
        )
        assert (answer.status_code, answer.json()["type"][-13:]) == (413, "too-much-work")
    assert server.get("/readyz").status_code == 200


def test_memory_stays_bounded(server):
    """After all of the above: a few bodies in the server, what a reader may have in it."""
    peaks = []
    for process in (server.process.pid, *children(server.process.pid)):
        status = Path(f"/proc/{process}/status").read_text()
        peaks.append(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10)
    assert len(peaks) > 1
    assert peaks[0] < (200 << 20) + 8 * SIZE
    assert max(peaks) < 1 << 30


def request(*messages):
    """A request whose body comes in these parts, and then no more."""
    left = list(messages)

    async def receive():
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "headers": headers, "state": {"caller": Caller("a")}}
    return Request(scope, receive)


def read(held, asked):
    async def whole():
        async with held.read(asked) as body:
            return body.data

    return asyncio.run(asyncio.wait_for(whole(), 60))


def test_a_slow_body_and_a_client_that_leaves_are_given_up(monkeypatch):
    monkeypatch.setattr(request_body, "BODY_SECONDS", 0.05)
    monkeypatch.setattr(request_body, "SMALL_BYTES", 5)
    memory = Memory(4000)
    held = BodyReader(1000, memory)
    part = {"type": "http.request", "body": b"x" * 10, "more_body": True}
    for ending in ([], [{"type": "http.disconnect"}]):
        with pytest.raises(ProblemError) as refused:
            read(held, request(part, *ending))
        assert refused.value.name == "slow-body"
    assert memory.held == 0
    last = {"type": "http.request", "body": b"y", "more_body": False}
    assert read(held, request(part, last)) == b"x" * 10 + b"y"
    assert memory.held == 0


def test_large_bodies_keep_no_small_one_out(monkeypatch):
    """Nor do those of one caller keep out those of another."""
    monkeypatch.setattr(request_body, "SMALL_BYTES", 100)
    memory = Memory(4000)
    held = BodyReader(3000, memory)
    memory.take(1900, "a")

    def sized(size):
        return request({"type": "http.request", "body": b"x" * size, "more_body": False})

    assert read(held, sized(200)) == b"x" * 200
    with pytest.raises(ProblemError) as refused:
        read(held, sized(201))
    assert (refused.value.name, memory.held) == ("busy", 1900)
    memory.take(2000, "b")
    memory.take(100, "c")
    with pytest.raises(ProblemError):
        memory.take(1, "d")
    assert read(held, sized(100)) == b"x" * 100
    for size, caller in ((1900, "a"), (2000, "b"), (100, "c")):
        memory.free(size, caller)
    assert memory.held == 0
