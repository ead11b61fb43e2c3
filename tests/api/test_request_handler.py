"""Request handler: stored answers are checked against the request; new ones are stored."""

import gzip
import json
import sqlite3

import msgspec
import numpy as np
import pytest
import zstandard

from coop_plan.api.jobs import request_handler as module
from coop_plan.api.jobs.request_handler import Figures, Limits, ProblemError, RequestHandler
from coop_plan.api.service import graph_store
from coop_plan.api.service.graph_store import SqliteGraphStore
from coop_plan.planner import find_faults
from coop_plan.planner.method import Progress
from coop_plan.planner.plan_cache.record import as_record, read_signed, sign
from coop_plan.planner.plan_cache.store import SqliteStore
from coop_plan.schemas import InvalidInputError, parse_graph, parse_plan

SECRET = b"of the service"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "plans.sqlite3"


@pytest.fixture
def store(path):
    store = SqliteStore(path, secret=SECRET)
    yield store
    store.close()


@pytest.fixture
def handler(store, path):
    return RequestHandler(store, Limits(), SqliteGraphStore(path))


@pytest.fixture
def question(document):
    return {"graph": document, "budget": 330, "alignment": 1}


def ask(handler, question, record=b""):
    reply, data = handler.find(json.dumps(question).encode(), "", record)
    return reply, parse_plan(data) if reply.found else None


def solve(handler, question):
    reply, record = handler.solve(json.dumps(question).encode(), "", lambda *_: None)
    assert reply.found or reply.problem
    return record


def scaled(document, factors):
    """The graph with other costs."""
    ops = [
        op | {"cost_us": op["cost_us"] * f} for op, f in zip(document["ops"], factors, strict=True)
    ]
    return document | {"ops": ops}


def test_a_plan_is_made_kept_and_found(handler, question, chain):
    reply, none = ask(handler, question)
    assert (reply.found, none, reply.problem) == (False, None, "")
    assert reply.costs
    assert reply.cost_class
    record = solve(handler, question)
    for given in (b"", record):
        found, plan = ask(handler, question, given)
        assert found.found
        assert find_faults(chain, plan) == []
    stored, data = handler.stored_plan(reply.key)
    assert stored.found
    assert parse_plan(data) == plan
    assert handler.stored_plan("0" * 64)[0].problem == "not-found"


def test_an_infeasible_budget_is_kept_too(handler, question, monkeypatch):
    solve(handler, question | {"budget": 200})
    monkeypatch.setattr("coop_plan.planner.plan", None)
    for tensor in question["graph"]["tensors"]:
        tensor["id"] += 100
    for op in question["graph"]["ops"]:
        op["id"] += 7
        op["inputs"], op["outputs"] = ([t + 100 for t in op[n]] for n in ("inputs", "outputs"))
    reply, _ = ask(handler, question | {"budget": 200})
    assert reply.problem == "budget-infeasible"
    assert reply.members["blocking_op"] in [op["id"] for op in question["graph"]["ops"]]


OTHERS = [{"budget": 400}, {"alignment": 2}, {"outputs": "arena"}, {"method": "coop"}]


@pytest.mark.parametrize("change", OTHERS)
def test_a_plan_for_another_question_is_no_answer(handler, store, question, change):
    """Even where it lies under this question's key, and is valid."""
    record = as_record(solve(handler, question))
    other = question | change
    key = ask(handler, other)[0].key
    store.put(key, record)
    reply, plan = ask(handler, other)
    assert (reply.found, plan) == (False, None)
    assert handler.dropped == 1


def test_what_was_not_sealed_for_its_key_is_dropped(handler, store, path, question):
    """A plan moved to another key, a proof written in, a flipped byte."""
    solve(handler, question)
    key = ask(handler, question)[0].key
    with sqlite3.connect(path) as file:
        ((good,),) = file.execute("select record from answer")
        record = read_signed(good, key, SECRET)
        proved = record.model_copy(
            {"plan": record.plan.model_copy({"status": "optimal", "lower_bound_us": 9.0})}
        )
        bad = [
            sign(record, "0" * 64, SECRET),
            sign(proved, key, b"guessed"),
            good[:-1] + bytes([good[-1] ^ 1]),
        ]
        for data in bad:
            file.execute("update answer set record = ?", (data,))
            file.commit()
            assert not ask(handler, question)[0].found
            assert file.execute("select count(*) from answer").fetchone() == (0,)
            file.execute("insert into answer values (?, 0, ?, 1, 1)", (key, good))
            file.commit()
            assert ask(handler, question)[0].found
    assert store.dropped == len(bad)


def test_the_first_answer_stays_and_is_everybodys(handler, store, question):
    """Two servers that solve at once hand out one plan."""
    first = solve(handler, question)
    again = solve(handler, question)
    assert as_record(again) == as_record(first)
    assert len(store.get(ask(handler, question)[0].key)) == 1


def test_noise_in_costs_finds_the_plan_and_wrong_costs_poison_nobody(handler, question, document):
    """The first request's false costs do not decide the plan of later requests."""
    false = question | {"graph": scaled(document, [100, 1, 1, 1, 1, 1, 1, 1, 1])}
    solve(handler, false)
    reply, _ = ask(handler, question)
    assert not reply.found
    solve(handler, question)
    noisy = question | {"graph": scaled(document, [1.01, 0.99, 1, 1.02, 1, 0.98, 1, 1.01, 1])}
    found, plan = ask(handler, noisy)
    assert found.found
    honest = ask(handler, question)[1]
    assert plan.steps == honest.steps
    assert find_faults(parse_graph(noisy["graph"]), plan) == []
    assert ask(handler, false)[0].found


def test_alternatives_are_bounded(handler, store, question, document):
    solve(handler, question)
    for number in range(9):
        factors = [1.0] * 9
        factors[number] = 1000.0
        solve(handler, question | {"graph": scaled(document, factors)})
    assert len(store.get(ask(handler, question)[0].key)) == 4


def test_a_store_that_fails_costs_no_plan(handler, store, question, chain):
    """A full disk or a damaged file: the plan that was made reaches whoever waits for it."""
    store.close()
    record = solve(handler, question)
    reply, plan = ask(handler, question, record)
    assert reply.found
    assert find_faults(chain, plan) == []
    assert handler.dropped


def test_the_store_stays_within_its_size(tmp_path, question):
    store = SqliteStore(tmp_path / "small", max_bytes=20_000)
    handler = RequestHandler(store, Limits(), SqliteGraphStore(tmp_path / "small"))
    keys = []
    for budget in range(330, 350):
        solve(handler, question | {"budget": budget})
        keys.append(ask(handler, question | {"budget": budget})[0].key)
    kept = [bool(store.get(key)) for key in keys]
    store.close()
    assert 0 < sum(kept) < 20
    assert kept == sorted(kept)  # the oldest went


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_packed_bodies(handler, question, encoding):
    pack = {"gzip": gzip.compress, "zstd": zstandard.ZstdCompressor().compress}[encoding]
    body = json.dumps(question).encode()
    assert handler.parse(pack(body), encoding) == handler.parse(body)
    with pytest.raises(ProblemError) as bomb:
        module.decompress(pack(b" " * 10_000_000), encoding, 1_000_000)
    assert bomb.value.name == "body-too-large"
    for broken in (b"", b"no", pack(body)[:-9]):
        with pytest.raises((ProblemError, InvalidInputError)):
            handler.parse(broken, encoding)


def test_limits(store, path, question):
    graphs = SqliteGraphStore(path)
    small = RequestHandler(store, Limits(ops=8, seconds=10.0), graphs)
    with pytest.raises(ProblemError):
        ask(small, question)
    small = RequestHandler(store, Limits(ops=9, seconds=10.0), graphs)
    assert not ask(small, question | {"time_limit": 10})[0].found
    with pytest.raises(InvalidInputError, match="time limit on this server is 10 s"):
        ask(small, question | {"time_limit": 11})


def test_what_is_far_too_much_is_refused_before_it_is_parsed(store, path):
    """Counted, so that a million ops cost no more than their bytes: these are no JSON at all."""
    small = RequestHandler(store, Limits(ops=10), SqliteGraphStore(path))
    for body, name in ((b'"cost_us"' * 41, "too-many-ops"), (b"," * 401, "too-much-work")):
        with pytest.raises(ProblemError) as refused:
            small.find(body, "", b"")
        assert refused.value.name == name
        with pytest.raises(ProblemError):
            small.put_graph(gzip.compress(body), "gzip", "sha256:")
        with pytest.raises(InvalidInputError):
            small.find(body[:-9], "", b"")


def test_figures_of_numpy_reach_the_server():
    """Kernels that run as Python (NUMBA_DISABLE_JIT=1) give NumPy's numbers, which JSON has not."""
    text = Progress("", np.float64(0.5), np.float32(0.25), None, np.int64(1))
    sent = msgspec.json.encode(Figures.of(text))
    assert msgspec.json.decode(sent, type=Figures) == Figures(0.5, 0.25, None, 1.0)


def test_a_cold_request_is_parsed_once_in_a_process(handler, path, question, monkeypatch):
    """Its graph stays parsed until the plan that a solver made is its answer."""
    solver = RequestHandler(SqliteStore(path, secret=SECRET), Limits(), SqliteGraphStore(path))
    reply, asked = handler.find(json.dumps(question).encode(), "", b"")
    assert not reply.found
    _, record = solver.solve(asked, "", lambda *_: None)
    monkeypatch.setattr(graph_store, "parse_graph", None)
    reply, data = handler.find(asked, "", record)
    assert reply.found
    assert parse_plan(data).peak_bytes <= 330
