"""The service: plans over HTTP, the cache, and a problem document for everything else."""

import asyncio
import json
import sqlite3
import threading

import httpx
import pytest

from coop_plan.api import service
from coop_plan.api.service import EXAMPLE, create_app
from coop_plan.planner import TimeLimitError, find_faults
from coop_plan.planner.cache.store import SqliteStore
from coop_plan.schemas import parse_graph, parse_plan

PROBLEM = "application/problem+json"


@pytest.fixture
def store(tmp_path):
    store = SqliteStore(tmp_path / "cache" / "plans.sqlite3")
    yield store
    store.close()


@pytest.fixture
def send(store):
    """Send requests to the app at once, in order of completion of none: a list of responses."""

    def call(*requests, **limits):
        async def talk():
            transport = httpx.ASGITransport(create_app(store, **limits), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                sent = (client.request(method, url, **rest) for method, url, rest in requests)
                return await asyncio.gather(*sent)

        return asyncio.run(talk())

    return call


@pytest.fixture
def ask(send):
    """POST /plan with one body."""

    def call(body, **limits):
        rest = {"content": body} if isinstance(body, bytes) else {"json": body}
        return send(("POST", "/plan", rest), **limits)[0]

    return call


@pytest.fixture
def body(document):
    return {"graph": document, "budget": 330, "alignment": 1}


def problem(response, status, name):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == PROBLEM
    document = response.json()
    assert document["type"] == f"urn:coop-plan:problem:{name}"
    assert document["status"] == status
    assert "\n" not in document["detail"]
    return document


def test_a_plan_is_made_once_then_served_and_kept(ask, send, body, chain):
    first, second = ask(body), ask(body)
    assert [r.status_code for r in (first, second)] == [200, 200]
    assert [r.headers["coop-plan-cache"] for r in (first, second)] == ["miss", "hit"]
    assert first.content == second.content
    plan = parse_plan(first.content)
    assert plan.peak_bytes <= 330
    assert not find_faults(chain, plan)
    (stored,) = send(("GET", first.headers["location"], {}))
    assert parse_plan(stored.content) == plan


def test_the_cache_is_hit_by_structure_and_answers_in_the_asked_ids_and_costs(ask, body, document):
    ask(body)
    for tensor in document["tensors"]:
        tensor["id"] += 1000
        tensor["name"] = "renamed"
    for number, op in enumerate(document["ops"]):
        op["id"] += 500
        op["cost_us"] = 2.0 + number
        for field in ("inputs", "outputs"):
            op[field] = [t + 1000 for t in op[field]]
    response = ask(body)
    assert response.headers["coop-plan-cache"] == "hit"
    plan = parse_plan(response.content)
    assert not find_faults(parse_graph(document), plan)
    assert plan.base_cost_us == sum(2.0 + n for n in range(9))
    assert plan.lower_bound_us is None


@pytest.mark.parametrize(
    "change",
    [
        {"budget": "90%"},
        {"method": "coop"},
        {"outputs": "arena"},
        {"alignment": 2},
        {"time_limit": 9.0},
        {"method": "coop", "switches": {"sliding-window": False}},
    ],
)
def test_another_question_is_another_plan(ask, body, change):
    ask(body)
    assert ask({**body, **change}).headers["coop-plan-cache"] == "miss"


def test_another_structure_is_another_plan(ask, body, document):
    ask(body)
    document["tensors"][3]["bytes"] += 1
    assert ask(body).headers["coop-plan-cache"] == "miss"


def test_identical_requests_at_once_cost_one_solve(send, body, monkeypatch):
    calls = []
    together = threading.Event()

    def counted(*arguments, **options):
        calls.append(1)
        together.wait(0.5)
        return plan(*arguments, **options)

    plan = service.plan
    monkeypatch.setattr(service, "plan", counted)
    responses = send(*(("POST", "/plan", {"json": body}) for _ in range(8)))
    assert {r.status_code for r in responses} == {200}
    assert len({r.content for r in responses}) == 1
    assert len(calls) == 1


@pytest.mark.parametrize("damage", ["not json", '{"ops": [], "tensors": []}', "wrong plan"])
def test_a_damaged_record_is_planned_again(ask, body, tmp_path, damage):
    good = ask(body)
    with sqlite3.connect(tmp_path / "cache" / "plans.sqlite3") as connection:
        if damage == "wrong plan":  # readable, but it would read what is gone
            (text,) = connection.execute("select record from plan").fetchone()
            record = json.loads(text)
            record["plan"]["steps"] = record["plan"]["steps"][1:]
            damage = json.dumps(record)
        connection.execute("update plan set record = ?", (damage,))
    connection.close()
    again = ask(body)
    assert again.headers["coop-plan-cache"] == "miss"
    assert parse_plan(again.content).steps == parse_plan(good.content).steps
    assert ask(body).headers["coop-plan-cache"] == "hit"


def test_an_infeasible_budget_is_a_conflict_that_says_what_would_do(ask, body):
    answer = problem(ask({**body, "budget": 200}), 409, "budget-infeasible")
    assert answer["budget_bytes"] == 200
    assert answer["blocking_op_name"]
    assert ask({**body, "budget": answer["min_feasible_bytes"]}).status_code == 200
    assert ask({**body, "budget": answer["min_feasible_bytes"] - 1}).status_code == 409


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"budget": 0}, "/budget"),
        ({"budget": "lots"}, "/budget"),
        ({"budget": None}, "/budget"),
        ({"method": "magic"}, "/method"),
        ({"outputs": "nowhere"}, "/outputs"),
        ({"alignment": 3}, "/alignment"),
        ({"time_limit": -1}, "/time_limit"),
        ({"switches": {"magic": False}}, "/switches/magic"),
        ({"extra": 1}, "/extra"),
        ({"graph": []}, "/graph"),
        ({"graph": {}}, "/graph/schema"),
    ],
)
def test_a_wrong_request_says_where(ask, body, change, pointer):
    assert problem(ask({**body, **change}), 422, "invalid-input")["pointer"] == pointer


@pytest.mark.parametrize(
    ("spoil", "pointer"),
    [
        (lambda g: g["ops"][2].update(inputs=[77]), "/graph/ops/2/inputs/0"),
        (lambda g: g["ops"][0].update(inputs=[8]), "/graph/ops/0/inputs/0"),
        (lambda g: g["tensors"][1].update(bytes=-1), "/graph/tensors/1/bytes"),
        (lambda g: g.pop("ops"), "/graph/ops"),
    ],
)
def test_a_bad_graph_says_where(ask, body, document, spoil, pointer):
    spoil(document)
    assert problem(ask(body), 422, "invalid-input")["pointer"] == pointer


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"[" * 100_000])
def test_a_body_that_is_no_request_is_refused(ask, text):
    problem(ask(text), 422, "invalid-input")


def test_not_a_number_is_refused(ask, body):
    text = json.dumps(body).replace('"cost_us": 1.0', '"cost_us": NaN', 1).encode()
    assert b"NaN" in text
    problem(ask(text), 422, "invalid-input")


def test_limits_on_body_and_ops(ask, send, body):
    size = len(json.dumps(body))
    assert problem(ask(body, max_body_bytes=100), 413, "body-too-large")["max_body_bytes"] == 100
    assert problem(ask(body, max_ops=8), 413, "too-many-ops")["max_ops"] == 8
    assert ask(body, max_ops=9, max_body_bytes=size).status_code == 200

    async def stream():  # of unknown length: refused while it is read
        for _ in range(10):
            yield b" " * 50

    (response,) = send(("POST", "/plan", {"content": stream()}), max_body_bytes=100)
    problem(response, 413, "body-too-large")


def test_a_time_limit_too_short_for_any_plan_is_said(ask, body, monkeypatch):
    def late(*_, **__):
        raise TimeLimitError("no plan within 1 s")

    monkeypatch.setattr(service, "plan", late)
    problem(ask(body), 504, "time-limit")


def test_a_failure_of_ours_is_a_problem_and_the_next_request_works(ask, body, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("secret detail")

    with monkeypatch.context() as patch:
        patch.setattr(service, "plan", broken)
        assert "secret" not in problem(ask(body), 500, "internal-error")["detail"]
    assert ask(body).status_code == 200


def test_addresses(send):
    missing, wrong, nowhere, health = send(
        ("GET", f"/plans/{'0' * 64}", {}),
        ("GET", "/plan", {}),
        ("GET", "/nope", {}),
        ("GET", "/healthz", {}),
    )
    problem(missing, 404, "not-found")
    problem(wrong, 405, "method-not-allowed")
    problem(nowhere, 404, "not-found")
    assert health.json()["status"] == "ok"


def test_openapi_describes_the_request_with_an_example_that_works(send, ask):
    (response,) = send(("GET", "/openapi.json", {}))
    document = response.json()
    content = document["paths"]["/plan"]["post"]["requestBody"]["content"]["application/json"]
    assert content["example"] == EXAMPLE
    assert {"PlanRequest", "Graph", "Op", "Plan"} <= set(document["components"]["schemas"])
    plan = parse_plan(ask(content["example"]).content)
    assert plan.recomputed_ops > 0
