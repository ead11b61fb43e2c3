"""A plan store that is away costs a plan, never an answer."""

import asyncio
import contextlib
import json
import signal
import sqlite3
import time
from collections import Counter
from unittest import mock

import httpx
import pytest
import redis

import coop_plan
from coop_plan.api.jobs.process_pool import WorkerLostError
from coop_plan.api.jobs.request_handler import Limits, ProblemError, RequestHandler
from coop_plan.api.service.graph_store import SqliteGraphStore
from coop_plan.api.service.plan_service import PlanService
from coop_plan.planner import plan
from coop_plan.planner.plan_cache import redis_store
from coop_plan.planner.plan_cache.open_store import open_store
from coop_plan.planner.plan_cache.store import SqliteStore
from coop_plan.schemas.fingerprint import digest_of
from tests.api import in_process
from tests.api.in_process import InProcessPool, ask, service
from tests.redis_server import needs_redis, redis_server


@contextlib.contextmanager
def counted_tries(monkeypatch):
    """Commands sent to a Redis meanwhile, and the clock of its stores, which stands still."""
    clock = mock.Mock(**{"monotonic.return_value": 0.0})
    monkeypatch.setattr(redis_store, "time", clock)
    send = redis.Redis.execute_command
    with mock.patch.object(redis.Redis, "execute_command", autospec=True, side_effect=send) as sent:
        yield sent, clock


def tries(sent):
    """Most commands that one client sent: each try waits for a Redis that hangs."""
    return max(Counter(id(call.args[0]) for call in sent.call_args_list).values())


def stop(server):
    server.process.kill()


def hang(server):
    server.process.process.send_signal(signal.SIGSTOP)


def come_back(server, how):
    if how is hang:
        server.process.process.send_signal(signal.SIGCONT)
    else:
        server.process.start()
        server.process.wait()


@needs_redis
@pytest.mark.parametrize("how", [stop, hang])
def test_a_redis_that_is_away_costs_no_answer(tmp_path, monkeypatch, document, how):
    """A client waits for one try alone; hits from memory and solves go on.

    The plans are kept when it is back.
    """
    monkeypatch.setattr("coop_plan.api.service.unkept_plans.RETRY_SECONDS", 0.1)
    InProcessPool.solved.clear()

    async def ask(server, budget):
        return await in_process.ask(server, {"graph": document, "budget": budget, "alignment": 1})

    async def scenario(away, sent, clock):
        server: PlanService = service(monkeypatch, away.address)
        try:
            stored = await ask(server, 330)
            assert (await ask(server, 330))[1] == stored[1]
            how(away)
            sent.reset_mock()
            for _ in range(3):
                again = await ask(server, 330)
                assert (again[1], again[2]) == (stored[1], None)
            made = await ask(server, 340)
            assert made[0].found
            for _ in range(2):
                again = await ask(server, 340)
                assert (again[1], again[2]) == (made[1], None)
            assert len(InProcessPool.solved) == 2
            with pytest.raises(ProblemError):
                await server.check()
            assert tries(sent) == 1
            await asyncio.to_thread(come_back, away, how)
            clock.monotonic.return_value = redis_store.AWAY_SECONDS
            with contextlib.closing(open_store(away.address, b"secret")) as store:
                key = made[0].key
                while not await asyncio.to_thread(_records, store, key):
                    await asyncio.sleep(0.1)
            assert (await ask(server, 340))[1] == made[1]
            while True:
                with contextlib.suppress(ProblemError):
                    await server.check()
                    break
        finally:
            away.process.process.send_signal(signal.SIGCONT)
            await server.close()

    with redis_server(tmp_path) as server, counted_tries(monkeypatch) as (sent, clock):
        asyncio.run(asyncio.wait_for(scenario(server, sent, clock), 200))


def _records(store, key):
    with contextlib.suppress(OSError):
        return store.get(key)


@needs_redis
@pytest.mark.parametrize("how", [stop, hang])
def test_a_call_of_a_store_that_is_away_ends_soon(tmp_path, monkeypatch, how):
    """The first after its tries, the next without one, until the store is asked again."""
    with redis_server(tmp_path) as server, counted_tries(monkeypatch) as (sent, clock):
        store = redis_store.RedisStore(server.address, secret=b"")
        assert store.signatures("k") == []
        how(server)
        sent.reset_mock()
        for _ in range(3):
            with pytest.raises(OSError, match="plan store"):
                store.signatures("k")
        assert tries(sent) == 1
        assert (1 + redis_store.RETRIES) * redis_store.WAIT_SECONDS < 2  # of one try
        come_back(server, how)
        clock.monotonic.return_value = redis_store.AWAY_SECONDS
        until = time.monotonic() + 20
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                assert store.signatures("k") == []
                return
            time.sleep(0.1)
        raise AssertionError("the store is back, and is not asked")


def test_a_hit_does_not_wait_for_a_writer_of_the_store(tmp_path, monkeypatch, document):
    """The server reads the signatures between other requests, not in a thread."""
    path = tmp_path / "plans"
    monkeypatch.setattr("coop_plan.planner.plan_cache.store.WRITE_MS", 600_000)
    monkeypatch.setitem(SqliteStore.__init__.__kwdefaults__, "lock_seconds", 600.0)

    async def scenario():
        server = service(monkeypatch, path)
        question = {"graph": document, "budget": 330, "alignment": 1}
        try:
            stored = await ask(server, question)
            assert (await ask(server, question))[1] == stored[1]
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as writer:
                writer.execute("update answer set used = 0")  # the next hit notes its use
                writer.execute("begin immediate")
                for _ in range(3):
                    again = await ask(server, question)
                    assert (again[1], again[2]) == (stored[1], None)
                writer.execute("commit")
                await ask(server, question)
                assert writer.execute("select min(used) > 0 from answer").fetchone() == (1,)
        finally:
            await server.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


class FullStore(SqliteGraphStore):
    def put(self, *_):
        raise sqlite3.OperationalError("database or disk is full")


def test_a_graph_that_cannot_be_stored_is_sent_with_the_request(tmp_path, chain):
    """Our client gets its plan from a server whose disk is full, without retries."""
    store = SqliteStore(tmp_path / "plans", secret=b"secret")
    handler = RequestHandler(store, Limits(), FullStore(tmp_path / "plans"))
    asked = []

    def answer(sent: httpx.Request) -> httpx.Response:
        asked.append(sent.method)
        encoding = sent.headers.get("content-encoding", "")
        try:
            if sent.method == "PUT":
                handler.put_graph(sent.content, encoding, sent.url.path.rpartition("/")[2])
            reply, _ = handler.solve(sent.content, encoding, lambda _: None)
            return httpx.Response(200, content=handler.stored_plan(reply.key)[1])
        except ProblemError as refused:
            name = refused.name
            status = {"unknown-graph": 404, "not-stored": 507}[name]
            problem = {"type": f"urn:coop-plan:problem:{name}", "detail": ""}
            return httpx.Response(status, json=problem)

    with coop_plan.Client("http://x", transport=httpx.MockTransport(answer)) as client:
        made = client.plan(chain, 330, alignment=1)
        with pytest.raises(coop_plan.client.protocol.ServerProblemError):
            client.put_graph(chain)
    assert made.cost_us == plan(chain, 330, alignment=1).cost_us
    assert asked == ["POST", "PUT", "POST", "PUT"]


def test_a_graph_store_that_is_away_does_not_know_the_graph(tmp_path, chain):
    store = SqliteStore(tmp_path / "plans", secret=b"secret")
    graphs = SqliteGraphStore(tmp_path / "plans")
    handler = RequestHandler(store, Limits(), graphs)
    graphs.close()
    body = json.dumps({"graph": digest_of(chain.to_json().encode()), "budget": 330}).encode()
    with pytest.raises(ProblemError) as refused:
        handler.find(body, "", b"")
    assert refused.value.name == "unknown-graph"


@pytest.mark.parametrize("away", ["for a while", "for long"])
def test_a_solve_waits_for_a_graph_store_that_is_away(tmp_path, monkeypatch, chain, away):
    """Those who wait for it would else begin again at the end of the queue."""

    class RestartingStore(SqliteGraphStore):
        calls = 0

        def get(self, digest):
            self.calls += 1
            if self.calls < 4 or away == "for long":
                raise sqlite3.OperationalError("away")
            return super().get(digest)

    monkeypatch.setattr("coop_plan.api.jobs.request_handler.PAUSE_SECONDS", 0.01)
    if away == "for long":
        monkeypatch.setattr("coop_plan.api.jobs.request_handler.AWAY_SECONDS", 0.1)
    graphs = RestartingStore(tmp_path / "plans")
    handler = RequestHandler(SqliteStore(tmp_path / "plans", secret=b"secret"), Limits(), graphs)
    document = chain.to_json().encode()
    graphs.put(digest_of(document), document)
    body = json.dumps({"graph": digest_of(document), "budget": 330, "alignment": 1}).encode()
    if away == "for long":
        with pytest.raises(ProblemError, match="send it"):
            handler.solve(body, "", lambda _: None)
    else:
        assert handler.solve(body, "", lambda _: None)[0].found


@pytest.mark.parametrize("kills", [1, 2])
def test_a_reader_that_is_killed_once_costs_no_answer(tmp_path, monkeypatch, document, kills):
    call, lost = InProcessPool.call, []

    def killed(self, task, *arguments, **named):
        if task.do == "find" and len(lost) < kills:
            lost.append(task)
            raise WorkerLostError(late=False)
        return call(self, task, *arguments, **named)

    monkeypatch.setattr(InProcessPool, "call", killed)

    async def scenario():
        server = service(monkeypatch, tmp_path / "plans")
        try:
            return await ask(server, {"graph": document, "budget": 330, "alignment": 1})
        finally:
            await server.close()

    if kills == 1:
        assert asyncio.run(scenario())[0].found
    else:  # a request that costs two processes costs no more
        with pytest.raises(ProblemError, match="than a reader has"):
            asyncio.run(scenario())
