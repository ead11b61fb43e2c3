"""The client: what it sends is in the OpenAPI description, what comes back is what was asked."""

import asyncio
import gzip
import json
from dataclasses import replace

import httpx
import jsonschema
import pytest

import coop_plan
from coop_plan.api.service.graph_store import digest_of
from coop_plan.client import protocol
from coop_plan.planner import InfeasibleBudgetError, PlanOptions, TimeLimitError
from coop_plan.schemas import InvalidInputError, load_plan, parse_plan
from tests.api.server import serving

AT = "http://planner.example"
OPTIONS = {"budget": 330, "alignment": 1, "switches": {"sliding-window": False}, "method": "coop"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, "--store", str(folder / "plans"), "--max-ops", "5000") as client:
        yield client


@pytest.fixture
def url(server):
    return str(server.base_url).rstrip("/")


def test_a_plan_is_the_servers_and_a_graph_is_sent_once(server, url, chain):
    with coop_plan.Client(url) as client:
        made = client.plan(chain, 330, alignment=1)
        assert made.peak_bytes <= 330
        again = client.plan(chain, 330, alignment=1)
        assert again == made

        async def both():
            async with coop_plan.AsyncClient(url) as other:
                return await asyncio.gather(*(other.plan(chain, 330, alignment=1) for _ in "ab"))

        assert asyncio.run(both()) == [made, made]
        graph = server.get(f"/graphs/{client.put_graph(chain)}")
        assert graph.json()["ops"]
    counted = server.get("/metrics").text
    assert 'requests_total{method="PUT",route="/graphs/{digest}",status="201"} 1.0' in counted


def test_a_refusal_is_the_librarys_own_error(url, chain):
    with coop_plan.Client(url) as client:
        with pytest.raises(InfeasibleBudgetError) as small:
            client.plan(chain, 200, alignment=1, smallest=True)
        assert 200 < small.value.budget_lower_bound_bytes <= small.value.min_feasible_bytes
        assert client.plan(chain, small.value.min_feasible_bytes, alignment=1)
        with pytest.raises(InvalidInputError, match="no switch"):
            client.plan(chain, 330, switches={"magic": False})
        with pytest.raises(InvalidInputError) as beyond:
            client.plan(chain, 330, time_limit=1e6)
        assert beyond.value.pointer == "/time_limit"
        with pytest.raises(coop_plan.ServerProblemError) as absent:
            client.job("0" * 32)
        assert (absent.value.name, absent.value.status) == ("not-found", 404)


@pytest.mark.parametrize("address", ["", "localhost:8000", "ftp://there", "http://", "http://[1"])
def test_what_is_no_server_is_refused(address):
    with pytest.raises(InvalidInputError, match="not the URL of a server"):
        coop_plan.Client(address)


def answering(*answers, seen=None):
    """A client whose server answers so, one after the other."""
    left = list(answers)

    def handle(request):
        if seen is not None:
            seen.append(request)
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    transport = httpx.MockTransport(handle)
    return coop_plan.Client(AT, token="secret", patience_seconds=3.0, transport=transport)


def problem(status, name, **headers):
    document = {"type": f"urn:coop-plan:problem:{name}", "title": "", "status": status}
    return httpx.Response(status, json=document | {"detail": "so"}, headers=headers)


def test_every_exchange_is_in_the_openapi_description(server, chain):
    """By method and path, with the body's schema and the statuses that the client takes."""
    document = server.get("/openapi.json").json()
    options = PlanOptions.of(OPTIONS)
    made = coop_plan.plan(chain, options)
    ask = protocol.plan_exchanges(chain, options)
    posted = next(ask)
    put = ask.send(problem(404, "unknown-graph"))
    alone = next(protocol.put_exchanges(gzip.decompress(put.content), put.path[8:]))
    assert alone == replace(put, statuses=put.statuses - {protocol.NOT_STORED})
    with pytest.raises(StopIteration) as end:
        ask.send(httpx.Response(204))
        ask.send(httpx.Response(200, content=made.to_json()))
    assert end.value.value == made
    exchanges = {
        "/plan": posted,
        "/graphs/{digest}": put,
        "/plans/{key}": next(protocol.stored_plan_exchanges("k")),
        "/jobs/{job_id}": next(protocol.job_exchanges("j", "GET")),
    }
    cancel = next(protocol.job_exchanges("j", "DELETE"))
    for path, exchange in [*exchanges.items(), ("/jobs/{job_id}", cancel)]:
        operation = document["paths"][path][exchange.method.lower()]
        assert {str(status) for status in exchange.statuses} <= set(operation["responses"]), path
        prefix = path.partition("{")[0]
        assert exchange.path.startswith(prefix)
        if exchange.content:
            content = operation["requestBody"]["content"]["application/json"]["schema"]
            body = exchange.content
            if exchange.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            schema = content | {"components": document["components"]}
            jsonschema.validate(json.loads(body), schema)
    sent = json.loads(posted.content)
    assert sent == {**sent, **OPTIONS}
    assert sent["graph"] == digest_of(chain.to_json().encode())


def test_temporary_failures_are_retried(chain):
    made = coop_plan.plan(chain, 330, alignment=1)
    good = httpx.Response(200, content=made.to_json())
    seen = []
    failures = [
        httpx.ConnectError("refused"),
        problem(503, "busy", **{"Retry-After": "0"}),
        httpx.Response(502, text="a proxy's page"),
        httpx.ReadError("reset"),
    ]
    with answering(*failures, httpx.Response(202), good, seen=seen) as client:
        assert client.plan(chain, 330, alignment=1) == made
    assert len(seen) == 6
    assert {request.headers["authorization"] for request in seen} == {"Bearer secret"}
    traces = {request.headers["traceparent"] for request in seen}
    assert len(traces) == 1


def test_a_server_that_stays_away_or_busy_is_an_error_in_the_end(chain):
    for answer in (httpx.ConnectError("refused"), problem(503, "busy", **{"Retry-After": "2"})):
        with answering(*[answer] * 50) as client, pytest.raises(coop_plan.ServerAwayError):
            client.plan(chain, 330)


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (problem(504, "time-limit"), TimeLimitError, "so"),
        (problem(401, "unauthorized"), coop_plan.ServerProblemError, "unauthorized"),
        (httpx.Response(404, text="<html>"), coop_plan.ServerError, "not an answer of a coop-plan"),
        (httpx.Response(200, text="{}"), InvalidInputError, "the server's plan"),
        (problem(409, "budget-infeasible"), coop_plan.ServerProblemError, "infeasible"),
    ],
)
def test_other_answers_are_errors_at_once(chain, answer, error, words):
    with answering(answer) as client, pytest.raises(error, match=words):
        client.plan(chain, 330)


def test_a_graph_that_is_not_kept_is_not_sent_for_ever(chain):
    unknown = [problem(404, "unknown-graph"), httpx.Response(201)] * protocol.PUTS
    unknown += [problem(404, "unknown-graph")] * (protocol.SENDS - 1)
    with answering(*unknown) as client, pytest.raises(coop_plan.ServerProblemError):
        client.plan(chain, 330)


@pytest.mark.parametrize("losses", range(6))
def test_a_store_that_loses_a_graph_again_and_again_costs_no_answer(chain, losses):
    made, seen = coop_plan.plan(chain, 330, alignment=1), []
    lost = [problem(404, "unknown-graph"), httpx.Response(201)] * min(losses, protocol.PUTS)
    lost += [problem(404, "unknown-graph")] * (losses - protocol.PUTS)
    good = httpx.Response(200, content=made.to_json())
    with answering(*lost, good, seen=seen) as client:
        assert client.plan(chain, 330, alignment=1) == made
    whole = seen[-1].headers.get("content-encoding") == "gzip"
    assert whole == (losses > protocol.PUTS)


def test_a_plan_for_another_question_is_refused(chain):
    other = coop_plan.plan(chain, 530, alignment=1)
    spoilt = parse_plan(json.dumps(other.to_dict() | {"steps": other.to_dict()["steps"][:-1]}))
    for wrong, budget in ((other, 330), (spoilt, 530)):
        answer = httpx.Response(200, content=wrong.to_json())
        with (
            answering(answer) as client,
            pytest.raises(coop_plan.ServerError, match="not valid"),
        ):
            client.plan(chain, budget, alignment=1)


def test_the_command_asks_a_server(run, url, folder, monkeypatch):
    options = ["graph.json", "--budget", "330", "--alignment", "1"]
    code, out, error = run(*options, "--server", url, "-o", "plan.json")
    assert (code, error) == (0, "")
    assert "recomputed ops" in out
    assert load_plan(folder / "plan.json").peak_bytes <= 330
    assert run("verify", "graph.json", "plan.json")[0] == 0
    monkeypatch.setenv("COOP_PLAN_SERVER", url)
    assert run(*options, "-o", "again.json")[0] == 0
    assert load_plan(folder / "again.json") == load_plan(folder / "plan.json")
    assert run("graph.json", "--budget", "200", "--alignment", "1")[0] == 3
    code, _, error = run(*options, "--time-limit", "9999")
    assert (code, error.count("\n")) == (2, 1)
    code, _, error = run(*options, "--server", "nonsense")
    assert (code, error.count("\n")) == (2, 1)
