"""A cluster of real processes: nothing is lost when parts of it die, nothing is left behind."""

import asyncio
import json
import signal
import time
import zlib
from pathlib import Path

import httpx
import pytest

from benchmarks.local_cluster import LocalCluster, children
from benchmarks.service_load import Load, ask_many, question
from coop_plan.planner import find_faults, plan
from coop_plan.schemas import parse_graph, parse_plan
from tests.redis_server import needs_redis

pytestmark = needs_redis

SECONDS = 3.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    asked = question(1, 1.0)  # kernels may have to be compiled, which no time limit is for
    plan(parse_graph(asked["graph"]), asked["budget"], method="optimal", time_limit=1.0)
    with LocalCluster(tmp_path_factory.mktemp("cluster"), seconds=20.0) as made:
        yield made


@pytest.fixture(scope="module")
def load(cluster):
    return Load(cluster, 40, 10)


@pytest.fixture
def body(request):
    """A question of the test's own that keeps a solver busy."""
    return question(zlib.crc32(request.node.name.encode()), SECONDS)


def until(condition):
    while not (found := condition()):
        time.sleep(0.05)
    return found


def post(url, body, **headers):
    content = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | headers
    return httpx.post(f"{url}/plan", content=content, headers=headers, timeout=300)


def solvers(cluster):
    """The processes that belong to workers and solve, or could."""
    found = set()
    for worker in cluster.workers:
        for child in children(worker.process.pid):
            found |= {pid for pid in children(child) if is_solver(pid)}
    return found


def is_solver(pid):
    try:
        return b"coop_plan.api.jobs.worker_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.slow
def test_one_solve_on_any_server_whatever_dies(cluster, load, body):
    assert load.run("nothing dies", body)
    for name in ("kill_worker", "restart_broker", "kill_solver"):
        happens = getattr(load, name)
        assert load.run(name, question(zlib.crc32(name.encode()), SECONDS), happens, most_solves=2)
    for worker in cluster.workers:
        worker.wait()


def test_the_plan_is_valid_and_the_same_on_every_server(cluster, body):
    plans = [post(url, body, Prefer="wait=100") for url in cluster.urls]
    assert {plan.status_code for plan in plans} == {200}
    assert len({plan.content for plan in plans}) == 1
    graph = parse_graph(body["graph"])
    assert find_faults(graph, parse_plan(plans[0].content)) == []
    stored = httpx.get(cluster.urls[1] + plans[0].headers["location"])
    assert parse_plan(stored.content) == parse_plan(plans[0].content)


@pytest.mark.slow
def test_a_job_is_followed_on_one_server_and_cancelled_on_another(cluster, body):
    one, two = cluster.urls
    body |= {"time_limit": 18}
    job = post(one, body, Prefer="wait=0, respond-async").headers["location"]
    assert post(two, body, Prefer="wait=0, respond-async").headers["location"] == job
    with httpx.stream("GET", f"{two}{job}/events", timeout=300) as events:
        for line in events.iter_lines():
            if line.startswith("data: ") and json.loads(line[6:])["gap"] is not None:
                printed = json.loads(line[6:])
                break
        assert printed["overhead"] >= printed["bound"] >= 0
        busy = solvers(cluster)
        assert httpx.delete(one + job).json()["state"] == "cancelled"
    assert httpx.get(two + job).json()["state"] == "cancelled"
    until(lambda: busy - solvers(cluster))


@pytest.mark.slow
def test_a_client_that_leaves_leaves_no_solve_behind(cluster, load, body):
    running = load._broker
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{cluster.urls[0]}/plan",
            content=json.dumps(body | {"time_limit": 18}),
            headers={"Content-Type": "application/json", "Prefer": "wait=100"},
            timeout=httpx.Timeout(100, read=3),
        )
    until(lambda: not running.zcard("coop-plan:running") and not running.zcard("coop-plan:queued"))


@pytest.mark.slow
def test_sigterm_hands_a_job_back(cluster, load, body):
    async def stop_the_solver():
        await load.solving()
        worker = load.solver()
        worker.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(worker.process.wait, 60)
        assert worker.process.returncode == 0
        cluster.workers.remove(worker)
        cluster.workers.append(cluster.start_worker())

    assert load.run("sigterm", body, stop_the_solver, most_solves=2)


@pytest.mark.slow
def test_a_server_that_ends_leaves_its_jobs_to_the_others(cluster, load, body):
    """Its waiting clients are sent to another server, which has the same job."""
    body |= {"time_limit": 8}  # longer than a server waits for what is under way
    assert load.run("SIGTERM to a server", body, load.stop_server)


@pytest.mark.slow
def test_what_a_worker_started_dies_with_it(cluster):
    worker = cluster.start_worker().wait()
    processes = until(lambda: children(worker.process.pid))
    worker.kill()
    until(lambda: not any(Path(f"/proc/{process}").exists() for process in processes))


@pytest.mark.slow
def test_a_server_that_dies_loses_nothing(cluster, load, body):
    assert load.run("kill -9 of a server", body, load.kill_replica, most_solves=2)


@pytest.mark.slow
def test_each_worker_touches_its_file(cluster):
    """Probes read it: docker/compose.yaml and docker/kubernetes/service.yaml."""

    def alive():
        files = Path("/tmp").glob("coop-plan-worker.*/alive")
        return sum(time.time() - file.stat().st_mtime < 60 for file in files)

    until(lambda: alive() >= len(cluster.workers))


@pytest.mark.slow
def test_readiness_is_that_of_the_broker(cluster):
    url = cluster.urls[1]
    assert httpx.get(f"{url}/readyz").status_code == 200
    cluster.broker.kill()
    refused = httpx.get(f"{url}/readyz", timeout=300)
    assert (refused.status_code, "broker" in refused.text) == (503, True)
    assert "retry-after" in refused.headers
    assert httpx.get(f"{url}/livez").status_code == 200
    cluster.broker.start()
    cluster.broker.wait()
    until(lambda: httpx.get(f"{url}/readyz", timeout=300).status_code == 200)


@pytest.mark.slow
def test_a_plan_for_less_is_served_while_a_better_one_is_made(cluster):
    body = question(77, SECONDS) | {"method": "coop-offline", "budget": "50%"}
    body.pop("time_limit")
    url = cluster.urls[1]
    assert post(url, body, Prefer="wait=100").status_code == 200
    answer = post(url, body | {"budget": "60%"}, Prefer="wait=0")
    assert (answer.status_code, answer.headers["coop-plan-cache"]) == (200, "provisional")
    assert find_faults(parse_graph(body["graph"]), parse_plan(answer.content)) == []
    job = answer.headers["link"].partition(">")[0].removeprefix("<")
    until(lambda: httpx.get(url + job).json()["state"] == "done")
    final = post(url, body | {"budget": "60%"}, Prefer="wait=0")
    assert final.headers["coop-plan-cache"] == "hit"
    assert parse_plan(final.content).cost_us <= parse_plan(answer.content).cost_us

    better = f"{url}{final.headers['location']}?better-than="
    assert httpx.get(f"{better}10").json() == final.json()
    looking = httpx.get(f"{better}0")
    assert looking.status_code == 202
    until(lambda: httpx.get(url + looking.headers["location"]).json()["state"] == "done")
    assert httpx.get(f"{better}-1").status_code == 204
    found = parse_plan(httpx.get(f"{better}10").content)
    assert found.cost_us <= parse_plan(final.content).cost_us
    assert httpx.get(f"{better}much").status_code == 422
    asked = asyncio.run(ask_many([url], body | {"budget": "60%"}, requests=2, connections=1))
    assert not asked.errors


def test_missing_options_of_a_cluster_end_in_one_line(run, tmp_path):
    broker, store = "redis://127.0.0.1:1/0", "redis://127.0.0.1:2/0"
    key = tmp_path / "key"
    for arguments, words in [
        (["serve", "--broker", broker, "--store", store], "needs --store-key"),
        (
            ["serve", "--broker", broker, "--store", broker, "--store-key", key],
            "are the same Redis",
        ),
        (["serve", "--broker", "amqp://x", "--store", tmp_path / "p"], "redis://HOST:PORT/N"),
        (["worker", "--broker", broker, "--store", "redis://h:port"], "needs --store-key"),
        (["worker", "--store", tmp_path / "plans"], "Missing option '--broker'"),
    ]:
        code, out, err = run(*arguments)
        assert (code != 0, out, err.count("\n")) == (True, "", 1), err
        assert words in err
