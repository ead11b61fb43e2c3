"""The service over HTTP, as a process: plans, the cache, jobs, and a problem for all else."""

import concurrent.futures
import contextlib
import gzip
import json
import os
import signal
import socket
import sqlite3
import time
from pathlib import Path

import httpx
import pytest

from benchmarks.local_cluster import children
from coop_plan.api.jobs.worker_process import SOLVER_NICENESS
from coop_plan.api.service.routes_plans import EXAMPLE
from coop_plan.planner import find_faults
from coop_plan.schemas import parse_graph, parse_plan
from tests.api.server import serving
from tests.support import make_graph

PROBLEM = "application/problem+json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(folder):
    options = ["--store", str(folder / "plans"), "--max-ops", "5000", "--max-body", "2MiB"]
    with serving(folder, *options, "--solvers", "2", "--queue", "2") as client:
        yield client


@pytest.fixture
def ask(server):
    """POST /plan with one body."""

    def call(body, **headers):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Prefer": "wait=100"} | headers
        return server.post("/plan", content=content, headers=headers)

    return call


@pytest.fixture
def body(document, request):
    """A question of the test's own: nobody else has asked it."""
    name = request.node.name
    return {"graph": document, "budget": 330, "alignment": 1} | {"seed": hash(name) % 2**31}


def problem(response, status, name):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == PROBLEM
    document = response.json()
    assert document["type"] == f"urn:coop-plan:problem:{name}"
    assert document["status"] == status
    assert "\n" not in document["detail"]
    return document


def slow(name):
    """A question that takes far longer than any test waits."""
    n = 1200
    tensors = {0: ("input", 1)} | dict.fromkeys(range(1, 2 * n + 1), ("activation", 100))
    ops = [{"inputs": [t - 1], "outputs": [t], "name": name} for t in range(1, n + 1)]
    ops += [{"inputs": [t - 1, 2 * n + 1 - t], "outputs": [t]} for t in range(n + 1, 2 * n + 1)]
    graph = json.loads(make_graph(tensors, ops).to_json())
    return {"graph": graph, "budget": "30%", "time_limit": 500, "alignment": 1}


def test_solvers_leave_the_cores_to_readers(server, ask, body):
    assert ask(body).status_code == 200
    niceness = {os.getpriority(os.PRIO_PROCESS, pid) for pid in children(server.process.pid)}
    ours = os.getpriority(os.PRIO_PROCESS, server.process.pid)
    assert niceness == {ours, min(19, ours + SOLVER_NICENESS)}


def test_a_plan_is_made_once_then_served_and_kept(ask, server, body, chain):
    first, second = ask(body), ask(body)
    assert [r.status_code for r in (first, second)] == [200, 200], first.text
    assert [r.headers["coop-plan-cache"] for r in (first, second)] == ["miss", "hit"]
    assert first.content == second.content
    plan = parse_plan(first.content)
    assert plan.peak_bytes <= 330
    assert not find_faults(chain, plan)
    stored = server.get(first.headers["location"])
    assert parse_plan(stored.content) == plan
    assert "server" not in stored.headers


def test_the_cache_is_hit_by_structure_and_answers_in_the_asked_ids_and_costs(ask, body, document):
    ask(body)
    for tensor in document["tensors"]:
        tensor["id"] += 1000
        tensor["name"] = "renamed"
    for number, op in enumerate(document["ops"]):
        op["id"] += 500
        op["cost_us"] = 2.0 + number / 100
        for field in ("inputs", "outputs"):
            op[field] = [t + 1000 for t in op[field]]
    response = ask(body)
    assert response.headers["coop-plan-cache"] == "hit"
    plan = parse_plan(response.content)
    assert not find_faults(parse_graph(document), plan)
    assert plan.base_cost_us == pytest.approx(sum(2.0 + n / 100 for n in range(9)))
    assert plan.base_cost_us <= plan.lower_bound_us <= plan.cost_us


@pytest.mark.parametrize(
    "change",
    [
        {"budget": "90%"},
        {"method": "coop"},
        {"outputs": "arena"},
        {"alignment": 2},
        {"method": "coop", "time_limit": 50.0},
        {"method": "coop", "switches": {"sliding-window": False}},
    ],
)
def test_another_question_is_another_plan(ask, body, change):
    ask(body)
    assert ask({**body, **change}).headers["coop-plan-cache"] == "miss"


def test_identical_requests_at_once_get_one_plan(ask, body):
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        responses = list(threads.map(ask, [body] * 8))
    assert {r.status_code for r in responses} == {200}
    assert len({r.content for r in responses}) == 1


def test_a_damaged_record_is_planned_again(ask, server, folder, body):
    good = ask(body)
    with sqlite3.connect(folder / "plans") as connection:
        key = good.headers["location"].rpartition("/")[2][:64]
        connection.execute("update answer set record = x'00' where key = ?", (key,))
    connection.close()
    assert server.get(good.headers["location"]).status_code == 404
    again = ask(body)
    assert again.headers["coop-plan-cache"] == "miss"
    assert parse_plan(again.content).steps == parse_plan(good.content).steps
    assert ask(body).headers["coop-plan-cache"] == "hit"


def test_an_infeasible_budget_is_a_conflict_with_the_bound(ask, body):
    for _ in range(2):
        answer = problem(ask({**body, "budget": 200}), 409, "budget-infeasible")
    assert answer["budget_bytes"] == 200
    assert answer["min_feasible_bytes"] is None
    assert 200 < answer["budget_lower_bound_bytes"] <= answer["met_bytes"]
    assert answer["blocking_op_name"]
    for _ in range(2):
        asked = {**body, "budget": 200, "smallest": True}
        answer = problem(ask(asked), 409, "budget-infeasible")
    assert answer["budget_lower_bound_bytes"] <= answer["min_feasible_bytes"]
    assert ask({**body, "budget": answer["min_feasible_bytes"]}).status_code == 200
    assert ask({**body, "budget": answer["min_feasible_bytes"] - 1}).status_code == 409


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"budget": 0}, "/budget"),
        ({"budget": "lots"}, "/budget"),
        ({"budget": None}, "/budget"),
        ({"budget": True}, "/budget"),
        ({"budget": "9" * 20 + "%"}, "/budget"),
        ({"method": "magic"}, "/method"),
        ({"outputs": "nowhere"}, "/outputs"),
        ({"alignment": 3}, "/alignment"),
        ({"time_limit": -1}, "/time_limit"),
        ({"time_limit": 601}, "/time_limit"),
        ({"seed": -1}, "/seed"),
        ({"switches": {"magic": False}}, "/switches/magic"),
        ({"extra": 1}, "/extra"),
        ({"graph": []}, "/graph"),
        ({"graph": {}}, "/graph/schema"),
    ],
)
def test_a_wrong_request_has_a_pointer(ask, body, change, pointer):
    assert problem(ask({**body, **change}), 422, "invalid-input")["pointer"] == pointer


@pytest.mark.parametrize(
    ("spoil", "pointer"),
    [
        (lambda g: g["ops"][2].update(inputs=[77]), "/graph/ops/2/inputs/0"),
        (lambda g: g["ops"][0].update(inputs=[8]), "/graph/ops/0/inputs/0"),
        (lambda g: g["tensors"][1].update(bytes=-1), "/graph/tensors/1/bytes"),
        (lambda g: g["ops"][0].update(cost_us=float("nan")), "/graph/ops/0/cost_us"),
        (lambda g: g["ops"][0].update(cost_us=1e308), "/graph/ops/0/cost_us"),
        (lambda g: g.pop("ops"), "/graph/ops"),
    ],
)
def test_a_bad_graph_has_a_pointer(ask, body, document, spoil, pointer):
    spoil(document)
    assert problem(ask(body), 422, "invalid-input")["pointer"] == pointer


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"[" * 100_000])
def test_a_body_that_is_no_request_is_refused(ask, text):
    problem(ask(text), 422, "invalid-input")


def test_limits_on_body_and_ops(ask, server):
    assert problem(ask(b" " * (3 << 20)), 413, "body-too-large")["max_body_bytes"] == 2 << 20
    bomb = gzip.compress(b" " * (64 << 20))
    packed = {"Content-Encoding": "gzip"}
    assert problem(ask(bomb, **packed), 413, "body-too-large")["max_body_bytes"] == 2 << 20
    ops = [{"inputs": [], "outputs": []}] * 5001
    graph = json.loads(make_graph({}, ops).to_json())
    for op in graph["ops"]:
        op.pop("variants")
    content = gzip.compress(json.dumps({"graph": graph, "budget": 1}).encode())
    assert problem(ask(content, **packed), 413, "too-many-ops")["max_ops"] == 5000

    def stream():  # of unknown length: refused while it is read
        for _ in range(30):
            yield b" " * (1 << 17)

    json_type = {"Content-Type": "application/json"}
    response = server.post("/plan", content=stream(), headers=json_type)
    problem(response, 413, "body-too-large")


def test_who_may_ask(server, body):
    content = json.dumps(body)
    for headers, status, name in [
        ({"Content-Type": "text/plain"}, 415, "unsupported-media-type"),
        ({"Content-Type": "application/json", "Content-Encoding": "br"}, 415, None),
        ({"Content-Type": "application/json", "Host": "evil.example"}, 403, "forbidden"),
        ({"Content-Type": "application/json", "Origin": "http://evil.example"}, 403, "forbidden"),
    ]:
        response = server.post("/plan", content=content, headers=headers)
        problem(response, status, name or "unsupported-media-type")


def test_addresses(server):
    problem(server.get(f"/plans/{'0' * 64}"), 404, "not-found")
    problem(server.get("/plans/nonsense"), 404, "not-found")
    problem(server.get("/jobs/nonsense"), 404, "not-found")
    problem(server.get("/nope"), 404, "not-found")
    wrong = server.get("/plan")
    problem(wrong, 405, "method-not-allowed")
    assert wrong.headers["allow"] == "POST"
    assert server.patch("/jobs/1").headers["allow"] == "DELETE, GET"
    for address in ("/livez", "/readyz", "/healthz"):
        assert server.get(address).json() == {"status": "ok"}


def test_a_long_solve_is_a_job_that_can_be_followed_and_cancelled(ask, server):
    response = ask(slow("followed"), Prefer="wait=0")
    assert response.status_code == 202, response.text
    assert int(response.headers["retry-after"]) > 0
    job = response.headers["location"]
    while not server.get(job).json()["message"]:  # its process has begun
        time.sleep(0.02)
    again = ask(slow("followed"), Prefer="wait=0")
    assert again.headers["location"] == job
    busy = set(children(server.process.pid))
    with server.stream("GET", f"{job}/events") as events:
        lines = events.iter_lines()
        first = dict(line.split(": ", 1) for line in iter(lambda: next(lines), ""))
        assert (first["event"], first["id"].isdigit()) == ("running", True)
        assert json.loads(first["data"])["elapsed_seconds"] >= 0
        assert server.delete(job).json()["state"] == "cancelled"
        assert any(line == "event: cancelled" for line in lines)
    assert server.get(job).json()["state"] == "cancelled"
    assert busy - set(children(server.process.pid))  # its process is gone
    assert server.get("/livez").status_code == 200


def test_too_many_solves_are_refused(ask, server):
    asked = [ask(slow(f"crowd {n}"), Prefer="wait=0") for n in range(5)]
    try:
        assert [r.status_code for r in asked] == [202, 202, 202, 202, 503]
        problem(asked[-1], 503, "busy")
        assert int(asked[-1].headers["retry-after"]) > 0
    finally:
        for response in asked[:-1]:
            server.delete(response.headers["location"])


def test_openapi_describes_the_request_with_an_example_that_works(server, ask):
    document = server.get("/openapi.json").json()
    content = document["paths"]["/plan"]["post"]["requestBody"]["content"]["application/json"]
    assert content["example"] == EXAMPLE
    schemas = document["components"]["schemas"]
    assert {"PlanRequest", "Graph", "Op", "Plan", "Problem"} <= set(schemas)
    for operations in document["paths"].values():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                if int(status) >= 400:
                    assert PROBLEM in answer["content"], (status, answer)
    plan = parse_plan(ask(content["example"]).content)
    assert plan.overhead > 0


def test_a_port_in_use_ends_in_one_line(run, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = run("serve", "--port", port, "--store", tmp_path / "plans")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "cannot listen on" in err


def test_a_client_that_leaves_takes_its_solve_along_and_sigterm_all_of_them(tmp_path):
    """Its process is gone; so are all at the end, whatever is being solved."""
    content, json_type = json.dumps(slow("left")).encode(), {"Content-Type": "application/json"}
    with serving(tmp_path, "--store", str(tmp_path / "plans"), "--solvers", "1") as client:
        process = client.process.pid
        address = client.base_url.host, client.base_url.port
        head = f"POST /plan HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
        with socket.create_connection(address) as connection:
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
            while not (solving := solvers(process)):
                time.sleep(0.02)
        while solving & solvers(process):
            time.sleep(0.02)
        headers = json_type | {"Prefer": "wait=0"}
        assert client.post("/plan", content=content, headers=headers).status_code == 202
        while not solvers(process):
            time.sleep(0.02)
        workers = children(process)
        client.process.send_signal(signal.SIGTERM)
        client.process.wait(60)
        with pytest.raises(httpx.HTTPError):
            client.get("/livez")
    assert not [number for number in workers if alive(number)]


def solvers(process):
    """The children of a server that solve: they leave the cores to the readers."""
    ours, found = os.getpriority(os.PRIO_PROCESS, process), set()
    for pid in children(process):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            if os.getpriority(os.PRIO_PROCESS, pid) > ours:
                found.add(pid)
    return found


def alive(number):
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
