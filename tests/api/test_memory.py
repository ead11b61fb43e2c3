"""Bytes that a server holds for requests: none for queued jobs, waiting clients and kept jobs."""

import asyncio
import gzip
import json
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from coop_plan.api.jobs.request_handler import Limits, ProblemError, RequestHandler
from coop_plan.api.jobs.worker_process import WorkerRequest
from coop_plan.api.service import request_body
from coop_plan.api.service.auth import Caller
from coop_plan.api.service.graph_store import SqliteGraphStore
from coop_plan.api.service.request_body import Body, Document, Memory
from coop_plan.api.service.tokens import TokenLimits
from coop_plan.planner.plan_cache.store import SqliteStore
from coop_plan.schemas import parse_plan
from coop_plan.schemas.fingerprint import digest_of
from tests.api.in_process import InProcessPool, ask, request, service


def question(document, seed):
    padded = document | {"name": "x" * (1 << 20)}
    return {"graph": padded, "budget": 330, "alignment": 1, "seed": seed}


def test_queued_jobs_and_waiting_clients_hold_no_graphs(tmp_path, monkeypatch, document):
    go = threading.Event()
    call = InProcessPool.call

    def held_up(self, task, body=b"", record=b"", **named):
        if task.do == "solve":
            assert len(body) < 2000
            go.wait(60)
        return call(self, task, body, record, **named)

    monkeypatch.setattr(InProcessPool, "call", held_up)

    async def scenario():
        memory = Memory(64 << 20)
        server = service(monkeypatch, tmp_path / "plans", memory=memory)
        bodies = []

        async def waiting(seed, wait):
            body = Body("", memory, "a")
            body.data = json.dumps(question(document, seed)).encode()
            body.take(len(body.data))
            bodies.append(body)
            return await server.answer(request(), body, wait, provisional=False)

        try:
            clients = [asyncio.create_task(waiting(seed, 60.0)) for seed in range(4)]
            while len(server.jobs._running) < 4:
                await asyncio.sleep(0.01)
            for seed in range(4, 12):
                _, data, job = await waiting(seed, 0.0)
                assert (data, job.finished) == (b"", False)
            assert not any(body.data for body in bodies)
            assert memory.held < 12 * 2000
            go.set()
            for reply, data, _ in await asyncio.gather(*clients):
                assert reply.found
                assert parse_plan(data).peak_bytes <= 330
            while server.jobs._running:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert memory.held == 0
            assert not any(job.record for job in server.jobs._all.values())
            again = await ask(server, question(document, 11))
            assert again[2] is None
        finally:
            go.set()
            await server.close()

    asyncio.run(asyncio.wait_for(scenario(), 200))


@pytest.mark.parametrize("fits", [True, False])
def test_records_of_finished_jobs_are_counted_until_they_are_read(
    tmp_path, monkeypatch, document, fits
):
    """Where they do not fit, clients read the plan from the store."""

    async def scenario():
        memory = Memory(64 << 20 if fits else 2000)
        server = service(monkeypatch, tmp_path / "plans", memory=memory)
        counted, free = [], memory.free

        def freed(size, caller=""):
            counted.append(size)
            free(size, caller)

        try:
            monkeypatch.setattr(memory, "free", freed)
            small = {"graph": document, "budget": 330, "alignment": 1}
            answers = await asyncio.gather(*(ask(server, small) for _ in range(3)))
            assert len({data for _, data, _ in answers}) == 1
            assert parse_plan(answers[0][1]).peak_bytes <= 330
            (job,) = {job for _, _, job in answers}
            assert (max(counted) > 1000) == fits
            assert (job.record, job.counted, memory.held) == (b"", 0, 0)
        finally:
            await server.close()

    asyncio.run(asyncio.wait_for(scenario(), 100))


@pytest.mark.parametrize("encoding", ["", "gzip", "digest"])
def test_readers_parse_one_large_graph_at_once(tmp_path, monkeypatch, document, encoding):
    """Also if it is compressed, or named by a small request; small graphs need no room."""
    lock, most = threading.Lock(), Counter()
    parse = RequestHandler._check_ops

    def parsed(self, graph):
        name = graph.name[:5]
        with lock:
            most[f"{name} now"] += 1
            most[name] = max(most[name], most[f"{name} now"])
        time.sleep(0.1)
        parse(self, graph)
        with lock:
            most[f"{name} now"] -= 1

    def sent(graph, seed):
        options = {"budget": 330, "alignment": 1, "method": "keep-all", "seed": seed}
        return json.dumps(options | {"graph": graph}).encode()

    async def scenario():
        limits = Limits(body_bytes=3 << 20)
        server = service(monkeypatch, tmp_path / "plans", readers=4, limits=limits)
        try:
            large = document | {"name": f"large{'x' * (2 << 20)}"}
            graph, kind = large, encoding
            if encoding == "digest":
                data, kind = json.dumps(large).encode(), ""
                graph = digest_of(data)
                task = WorkerRequest("put-graph", key=graph)
                await server.call_reader(task, data)
            monkeypatch.setattr(RequestHandler, "_check_ops", parsed)
            bodies = [(sent(graph, seed), kind) for seed in range(3)]
            bodies = [(gzip.compress(b) if k else b, k) for b, k in bodies]
            bodies += [(sent(document | {"name": "small"}, seed), "") for seed in range(3)]
            asked = [server.call_reader(WorkerRequest("find", kind), b) for b, kind in bodies]
            await asyncio.gather(*asked)
        finally:
            await server.close()
        assert most["large"] == 1
        assert most["small"] > 1

    asyncio.run(asyncio.wait_for(scenario(), 100))


def test_large_answers_are_counted_until_clients_have_them(monkeypatch):
    """A client that does not read gets a part; small answers are sent all the same."""
    monkeypatch.setattr(request_body, "ANSWER_SECONDS", 0.5)
    memory = Memory(8 << 20)
    state = {"caller": Caller("a")}
    scope = {"app": SimpleNamespace(state=SimpleNamespace(answers=memory)), "state": state}
    data = b"".join(b"%07d " % number for number in range(3 << 17))
    reads, got = asyncio.Event(), []

    async def send(message):
        got.append(message)
        assert len(message.get("body", b"")) <= 64 << 10
        if len(got) == 5:
            await reads.wait()

    async def scenario():
        slow = asyncio.create_task(Document(data)(scope, None, send))
        await asyncio.sleep(0.1)
        assert memory.held == len(data)
        with pytest.raises(ProblemError, match="full"):
            await Document(data)(scope, None, send)
        small = []

        async def keep(message):
            small.append(message)

        await Document(data[: 1 << 20])(scope, None, keep)
        assert b"".join(m.get("body", b"") for m in small) == data[: 1 << 20]
        await slow
        assert (memory.held, len(got)) == (0, 5)
        got.clear()
        reads.set()
        await Document(data)(scope, None, send)
        assert memory.held == 0
        assert b"".join(message.get("body", b"") for message in got) == data
        assert [m["more_body"] for m in got[1:]] == [True] * (len(got) - 2) + [False]
        assert dict(got[0]["headers"])[b"content-length"] == b"%d" % len(data)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_graph_above_the_limits_of_its_caller_is_not_kept(tmp_path, chain):
    graphs = SqliteGraphStore(tmp_path / "plans")
    store = SqliteStore(tmp_path / "plans", secret=b"secret")
    handler = RequestHandler(store, Limits(), graphs)
    document = chain.to_json().encode()
    asked = json.dumps({"graph": json.loads(document), "budget": 330}).encode()
    for limits in (TokenLimits(bytes=len(document) - 1), TokenLimits(ops=8)):
        handler.limits = Caller("a", limits).within(Limits())
        with pytest.raises(ProblemError):
            handler.put_graph(document, "", digest_of(document))
        with pytest.raises(ProblemError):
            handler.find(asked, "", b"")
        assert not graphs.mark_used(digest_of(document))
