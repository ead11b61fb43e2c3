"""Graphs by content: sent once, asked for by their digest; entity tags."""

import gzip
import json
import sqlite3
import zlib

import pytest

from coop_plan.api.cli.server_options import open_store_and_secret
from coop_plan.api.jobs.request_handler import Limits, ProblemError, RequestHandler
from coop_plan.api.service.graph_store import (
    MAX_LISTED,
    MAX_PARSED_BYTES,
    GraphCache,
    GraphSummary,
    SqliteGraphStore,
    digest_of,
)
from coop_plan.api.service.open_graph_store import open_graph_store
from coop_plan.planner.plan_cache.store import SqliteStore, StoreError
from coop_plan.schemas import InvalidInputError, parse_plan
from tests.api.server import serving
from tests.redis_server import needs_redis, redis_server

PROBLEM = "urn:coop-plan:problem:"
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "plans.sqlite3"


@pytest.fixture
def graphs(path):
    graphs = SqliteGraphStore(path)
    yield graphs
    graphs.close()


@pytest.fixture
def store(path):
    store = SqliteStore(path)
    yield store
    store.close()


@pytest.fixture
def handler(store, graphs):
    return RequestHandler(store, Limits(), graphs)


def test_a_document_is_kept_once_and_a_damaged_one_is_dropped(graphs, path):
    assert graphs.get(digest_of(b"it")) is None
    assert [graphs.put(digest_of(b"it"), b"it") for _ in range(2)] == [True, False]
    assert graphs.get(digest_of(b"it")) == b"it"
    for damage in (b"", zlib.compress(b"another")):
        with sqlite3.connect(path) as connection:
            connection.execute("update graph set packed = ?", (damage,))
        connection.close()
        assert graphs.get(digest_of(b"it")) is None
        assert graphs.put(digest_of(b"it"), b"it")


def test_the_store_of_graphs_stays_within_its_size(tmp_path):
    graphs = SqliteGraphStore(tmp_path / "small", max_bytes=200)
    documents = [bytes([number]) * 64 for number in range(40)]
    for document in documents:
        graphs.put(digest_of(document), document)
    kept = [graphs.get(digest_of(document)) is not None for document in documents]
    graphs.close()
    assert kept[-1]
    assert 0 < sum(kept) < 40


def test_what_is_kept_is_listed_and_what_is_dropped_is_not(handler, graphs, path, document):
    names = ["first", "<b>second</b>", "x" * 300]
    texts = [json.dumps(document | {"name": name}).encode() for name in names]
    for text in texts:
        handler.put_graph(text, "", digest_of(text))
    listed = json.loads(handler.graphs()[1])
    assert {card["digest"]: card["name"] for card in listed} == {
        digest_of(text): name[:200] for text, name in zip(texts, names, strict=True)
    }
    assert {card["ops"] for card in listed} == {len(document["ops"])}
    assert {card["bytes"] for card in listed} == {len(text) for text in texts}
    with sqlite3.connect(path) as connection:
        connection.execute("update graph set packed = x''")
    connection.close()
    assert graphs.get(digest_of(texts[0])) is None
    assert len(graphs.listed()) == 2


@needs_redis
def test_redis_lists_what_it_keeps(tmp_path):
    with redis_server(tmp_path) as server:
        graphs = open_graph_store(server.address, 0)
        summaries = [
            GraphSummary(digest_of(bytes([i])), f"graph {i}", i, 1) for i in range(MAX_LISTED + 2)
        ]
        for number, card in enumerate(summaries):
            assert graphs.put(card.digest, bytes([number]), card)
        assert graphs.listed() == summaries[: -MAX_LISTED - 1 : -1]
        graphs._redis.delete(f"coop-plan:graph:{summaries[-1].digest}")
        assert graphs.listed() == summaries[-2 : -MAX_LISTED - 1 : -1]
        graphs.close()


@pytest.mark.parametrize(("share", "kept"), [(3, 2), (2, 1), (1, 0)])
def test_parsed_graphs_are_bounded(graphs, document, share, kept):
    """One that is larger than the cache is parsed at each request."""
    cache = GraphCache(graphs)
    name = "x" * (MAX_PARSED_BYTES // share)
    digests = []
    for number in range(4):
        data = json.dumps(document | {"name": f"{number}{name}"}).encode()
        digests.append(digest_of(data))
        assert cache.put(digests[-1], data, lambda _: None)
    for digest in digests:
        assert cache.get(digest, lambda _: None) is not None
    assert len(cache._parsed) == kept
    assert cache._bytes <= MAX_PARSED_BYTES
    assert cache.get(digests[0], lambda _: None) is not None  # read again


def test_an_answer_by_digest_is_the_answer_by_document(handler, store, document):
    data = json.dumps(document).encode()
    digest = digest_of(data)
    asked = json.dumps({"graph": digest, "budget": 330, "alignment": 1}).encode()
    with pytest.raises(ProblemError) as unknown:
        handler.find(asked, "", b"")
    assert unknown.value.name == "unknown-graph"
    assert not handler.put_graph(data, "", digest)[0].found
    assert handler.put_graph(gzip.compress(data), "gzip", digest)[0].found
    reply, for_solve = handler.find(asked, "", b"")
    assert not reply.found
    assert json.loads(for_solve)["graph"] == digest
    whole = json.dumps({"graph": document, "budget": 330, "alignment": 1}).encode()
    solved, _ = handler.solve(whole, "", lambda *_: None)
    assert solved.key == reply.key
    by_digest = [handler.find(asked, "", b"") for _ in range(2)]
    by_document = handler.find(whole, "", b"")
    assert by_digest[0][0].found
    assert by_digest[0] == by_digest[1]
    assert by_digest[0][1] == by_document[1]
    store.delete(reply.key)
    assert not handler.find(asked, "", b"")[0].found


def test_two_graphs_of_one_structure_keep_their_own_ids(handler, document):
    renamed = json.loads(json.dumps(document))
    for op in renamed["ops"]:
        op["id"] += 500
    steps = []
    for graph in (document, renamed):
        data = json.dumps(graph).encode()
        handler.put_graph(data, "", digest_of(data))
        asked = {"graph": digest_of(data), "budget": 330, "alignment": 1}
        reply, answer = handler.find(json.dumps(asked).encode(), "", b"")
        if not reply.found:
            handler.solve(answer, "", lambda *_: None)
            answer = handler.find(json.dumps(asked).encode(), "", b"")[1]
        steps.append([step.op for step in parse_plan(answer).steps if hasattr(step, "op")])
    assert [op + 500 for op in steps[0]] == steps[1]


def test_what_is_no_graph_is_not_kept(handler, graphs, document):
    document["ops"][2]["inputs"] = [77]
    data = json.dumps(document).encode()
    with pytest.raises(InvalidInputError) as wrong:
        handler.put_graph(data, "", digest_of(data))
    assert wrong.value.pointer == "/ops/2/inputs/0"
    assert graphs.get(digest_of(data)) is None


def test_who_opens_a_store_that_was_made_writes_nothing(tmp_path, monkeypatch):
    """Readers and solvers are started on a full disk, too."""
    path = tmp_path / "plans"
    address, _ = open_store_and_secret(str(path), None)
    before = path.read_bytes()
    connect = sqlite3.connect

    def full(*arguments, **named):
        connection = connect(*arguments, **named)
        connection.execute("pragma query_only = on")
        return connection

    monkeypatch.setattr(sqlite3, "connect", full)
    SqliteStore(path).close()
    open_graph_store(address, 1).close()
    assert path.read_bytes() == before
    with pytest.raises(StoreError, match="cannot be opened"):
        open_graph_store(str(tmp_path / "another"), 1)


def test_over_http(tmp_path, document):
    data = json.dumps(document).encode()
    digest = digest_of(data)
    address = f"/graphs/{digest}"
    question = {"graph": digest, "budget": 330, "alignment": 1}
    with serving(tmp_path, "--store", str(tmp_path / "plans")) as client:
        unknown = client.post("/plan", json=question)
        assert (unknown.status_code, unknown.json()["type"]) == (404, PROBLEM + "unknown-graph")
        assert client.get(address).status_code == 404
        assert client.get("/graphs/sha256:0").status_code == 404
        wrong = client.put(f"/graphs/{digest_of(b'other')}", content=data, headers=JSON)
        assert (wrong.status_code, wrong.json()["digest"]) == (422, digest)
        sent = [client.put(address, content=data, headers=JSON) for _ in range(2)]
        assert [response.status_code for response in sent] == [201, 204]
        assert sent[0].headers["location"] == address
        there = client.get(address)
        assert there.content == data
        assert [card["digest"] for card in client.get("/graphs").json()] == [digest]
        tag = there.headers["etag"]
        assert client.get(address, headers={"If-None-Match": f'"other", {tag}'}).status_code == 304
        assert client.get(address, headers={"If-None-Match": '"other"'}).status_code == 200
        plans = [client.post("/plan", json=question) for _ in range(3)]
        assert {plan.content for plan in plans} == {plans[0].content}, plans[0].text
        assert [p.headers["coop-plan-cache"] for p in plans] == ["miss", "hit", "hit"]
        kept = client.get(plans[0].headers["location"])
        assert kept.content == plans[0].content
        again = client.get(kept.url, headers={"If-None-Match": kept.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        store = SqliteStore(tmp_path / "plans")  # what is at hand is no answer without its record
        store.delete(kept.url.path.rpartition("/")[2].partition("-")[0])  # without the costs
        assert client.get(kept.url).status_code == 404
        assert client.post("/plan", json=question).headers["coop-plan-cache"] == "miss"
        assert "application/json" not in again.headers.get("content-type", "")
