"""Authentication: tokens, their scopes and limits; answers reveal nothing of the server."""

import json
import re
import stat
from pathlib import Path

import pytest

from coop_plan.api.jobs.request_handler import Limits, ProblemError
from coop_plan.api.service.app import create_app
from coop_plan.api.service.auth import Caller
from coop_plan.api.service.metrics import Metrics
from coop_plan.api.service.plan_service import ServiceSettings
from coop_plan.api.service.tokens import TokenLimits, add, hash_of, load
from coop_plan.schemas import InvalidInputError
from tests.api.server import serving

ROOT = Path(__file__).parents[2]
PROBLEM = "urn:coop-plan:problem:"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "tokens.json"


def test_a_token_is_printed_once_and_only_its_hash_is_stored(run, file):
    code, printed, _ = run("token", "trainer", "--tokens", file)
    token = printed.strip()
    assert code == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert token not in file.read_text()
    assert load(file).find(token).name == "trainer"
    assert load(file).find(token).scopes == ["plan"]
    assert load(file).find(token + "x") is None
    assert load(file).find("") is None
    assert load(file).find(hash_of(token)) is None  # who has read the file has no token
    other = run("token", "grafana", "--tokens", file, "--scope", "admin")[1].strip()
    assert other != token
    assert [t.name for t in load(file).tokens] == ["trainer", "grafana"]
    code, out, error = run("token", "trainer", "--tokens", file)
    assert (code, out) == (2, "")
    assert "two tokens are named 'trainer'" in error


@pytest.mark.parametrize(
    ("document", "pointer"),
    [
        ({"tokens": []}, "/tokens"),
        ({"tokens": [{"name": "a", "sha256": "ab", "scopes": ["plan"]}]}, "/tokens/0/sha256"),
        ({"tokens": [{"name": "a", "sha256": "0" * 64, "scopes": []}]}, "/tokens/0/scopes"),
        ({"tokens": [{"name": "a", "sha256": "0" * 64, "scopes": ["root"]}]}, "/tokens/0/scopes/0"),
        ({"tokens": [{"name": "a", "sha256": "0" * 64, "scopes": ["plan"]}] * 2}, "/tokens/1/name"),
        ({}, "/tokens"),
    ],
)
def test_a_file_of_tokens_that_is_none_is_refused(file, document, pointer):
    file.write_text(json.dumps(document))
    with pytest.raises(InvalidInputError) as wrong:
        load(file)
    assert wrong.value.pointer == pointer
    assert wrong.value.source == str(file)


def test_an_address_that_others_reach_needs_tokens(run, file):
    code, out, error = run("serve", "--host", "0.0.0.0", "--port", "0", "--store", "plans")
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert "--tokens" in error
    code, _, error = run("serve", "--host", "0.0.0.0", "--tokens", file, "--store", "plans")
    assert code == 2
    assert "tokens.json: cannot be read" in error


def test_every_route_but_probes_needs_a_token_of_its_scopes():
    document = create_app(ServiceSettings(store="nowhere", secret=b"")).openapi()
    scopes = {
        f"{method.upper()} {path}": operation.get("security")
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    read = [{"token": ["read", "plan"]}]
    assert scopes == {
        "POST /plan": [{"token": ["plan"]}],
        "GET /plans/{key}": read,
        "GET /jobs/{job_id}": read,
        "GET /jobs/{job_id}/events": read,
        "DELETE /jobs/{job_id}": [{"token": ["plan", "admin"]}],
        "PUT /graphs/{digest}": [{"token": ["plan"]}],
        "GET /graphs/{digest}": read,
        "GET /graphs": read,
        "GET /metrics": [{"token": ["admin"]}],
        "GET /livez": None,
        "GET /readyz": None,
    }


def test_settings_are_printed_without_secrets():
    settings = ServiceSettings(
        store="redis://:word@host/0", secret=b"word", broker="redis://:word@b"
    )
    assert "word" not in f"{settings} {settings!r}"
    with pytest.raises(ValueError, match="solvers"):
        ServiceSettings(store="plans", secret=b"", solvers="many")


def test_limits_of_a_caller():
    class Solve:
        finished = False

    limits = TokenLimits(running_jobs=1, seconds=10.0, ops=5, bytes=100)
    caller, solve, other = Caller("a", limits), Solve(), Solve()
    assert caller.within(Limits(200, 10, 7.0)) == Limits(100, 5, 7.0)
    assert caller.within(Limits(50, 3, 7.0)) == Limits(50, 3, 7.0)
    assert [caller.check_time_limit(asked) for asked in (None, 3.0, 10.0)] == [10.0, 3.0, 10.0]
    with pytest.raises(ProblemError):
        caller.check_time_limit(11.0)
    caller.count_job(solve)
    caller.count_job(solve)  # eight ranks that ask one question have one solve
    with pytest.raises(ProblemError) as refused:
        caller.count_job(other)
    assert refused.value.name == "too-many-requests"
    solve.finished = True
    caller.count_job(other)


def test_the_dashboard_shows_metrics_that_are_there():
    metrics = Metrics()
    metrics.watch_jobs(lambda: {"running": 2})
    metrics.observe_solve("done", 1.0, 0.01)
    metrics.observe_request("POST", "/plan", 200, 0.1, "hit")
    metrics.dropped.inc()
    text = metrics.text().decode()
    assert 'coop_plan_jobs{state="running"} 2.0' in text
    there = set(re.findall(r"^(\w+)[ {]", text, re.MULTILINE))
    store = json.loads((ROOT / "docker" / "grafana.json").read_text())
    asked = {
        name
        for panel in store["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\b(?:coop_plan|process)_\w+", target["expr"])
    }
    assert len(asked) == 8
    assert asked <= there


def test_over_http(tmp_path, file, document):
    made = {name: add(file, name, [name]) for name in ("plan", "read", "admin")}
    made["slow"] = add(file, "slow", ["read"])
    tokens = json.loads(file.read_text())
    tokens["tokens"][0]["limits"] = {"ops": 9, "bytes": 5000, "seconds": 50}
    tokens["tokens"][3]["limits"] = {"requests_per_second": 1}
    file.write_text(json.dumps(tokens))
    question = {"graph": document, "budget": 330, "alignment": 1}

    def problem(response):
        assert response.headers["content-type"] == "application/problem+json"
        return response.status_code, response.json()["type"].removeprefix(PROBLEM)

    with serving(tmp_path, "--store", str(tmp_path / "plans"), "--tokens", str(file)) as client:

        def ask(method, address, token, **more):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            return client.request(method, address, headers=headers, **more)

        for wrong in ("", "nonsense", hash_of(made["plan"])):
            refused = ask("POST", "/plan", wrong, json=question)
            assert problem(refused) == (401, "unauthorized")
            assert refused.headers["www-authenticate"] == "Bearer"
        assert ask("GET", "/livez", "").status_code == 200
        assert ask("GET", "/openapi.json", "").json()["info"]["version"] == "1"
        assert problem(ask("GET", "/nowhere", "")) == (401, "unauthorized")
        assert problem(ask("POST", "/plan", made["read"], json=question)) == (403, "forbidden")
        assert problem(ask("GET", "/metrics", made["plan"])) == (403, "forbidden")
        answer = ask("POST", "/plan", made["plan"], json=question)
        assert answer.status_code == 200, answer.text
        place = answer.headers["location"]
        assert problem(ask("GET", place, made["admin"])) == (403, "forbidden")
        assert ask("GET", place, made["read"]).content == answer.content
        long = question | {"seed": 1, "time_limit": 51}
        assert problem(ask("POST", "/plan", made["plan"], json=long)) == (422, "invalid-input")
        ops = [*document["ops"], document["ops"][0] | {"id": 77, "outputs": []}]
        more = question | {"graph": document | {"ops": ops}}
        assert problem(ask("POST", "/plan", made["plan"], json=more)) == (413, "too-many-ops")
        padded = question | {"graph": document | {"name": "x" * 5000}}
        assert problem(ask("POST", "/plan", made["plan"], json=padded)) == (413, "body-too-large")
        metrics = ask("GET", "/metrics", made["admin"]).text
        count = 'coop_plan_requests_total{method="POST",route="/plan",status="200"} 1.0'
        assert count in metrics
        assert 'coop_plan_plans_total{cache="miss"} 1.0' in metrics
        crowd = [ask("GET", place, made["slow"]).status_code for _ in range(8)]
        assert crowd[0] == 200
        assert 429 in crowd


def test_traces_logs_and_headers(tmp_path, document):
    trace = "0af7651916cd43dd8448eb211c80319c"
    with serving(tmp_path, "--store", str(tmp_path / "plans")) as client:
        known = client.get("/livez", headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
        version, answered, span, flags = known.headers["traceparent"].split("-")
        assert (version, answered, flags) == ("00", trace, "01")
        assert span != "b7ad6b7169203331"
        for wrong in ("", "00-0-0-0", f"ff-{trace}-b7ad6b7169203331-01", f"00-{'0' * 32}-1-01"):
            fresh = client.get("/livez", headers={"traceparent": wrong})
            assert trace not in fresh.headers["traceparent"]
        for header in ("x-content-type-options", "content-security-policy", "referrer-policy"):
            assert header in known.headers
        assert not {"server", "access-control-allow-origin", "x-powered-by"} & set(known.headers)
    lines = (tmp_path / "log").read_text().splitlines()
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    [mine] = [line for line in logged if line.get("trace_id") == trace]
    assert (mine["event"], mine["method"], mine["route"]) == ("request", "GET", "/livez")
    assert (mine["status"], mine["span_id"], mine["client"]) == (200, span, "127.0.0.1")
    assert len(lines) - len(logged) <= 1  # where it listens
