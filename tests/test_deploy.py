"""What ships in docker/: as far as it can be checked without a container engine."""

from pathlib import Path

import pytest
import yaml

from coop_plan.api.cli.main import cli
from coop_plan.api.cluster.redis_job_store import JobStore
from coop_plan.api.jobs.worker_process import JobRequest, WorkerRequest
from tests.redis_server import needs_redis, redis_server

DOCKER = Path(__file__).parents[1] / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
MANIFESTS = [
    manifest
    for path in sorted((DOCKER / "kubernetes").glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
]
PODS = {
    manifest["metadata"]["name"]: manifest["spec"]["template"]
    for manifest in MANIFESTS
    if manifest["kind"] in ("Deployment", "StatefulSet")
}


def options_of(arguments):
    """The command's options as it reads them; it refuses what it does not know."""
    name, *rest = arguments
    return name, cli.commands[name].make_context(name, list(rest)).params


def services(*names):
    return [COMPOSE["services"][name] for name in names]


def test_compose_has_what_a_cluster_needs():
    servers, workers = services("server-1", "server-2"), services("worker")
    assert workers[0]["deploy"]["replicas"] == 2
    for service in servers + workers:
        name, options = options_of(service["command"])
        assert (name == "serve") == (service in servers)
        assert options["broker"] == "redis://broker:6379/0"
        assert options["store"] == "redis://plans:6379/0"
        for secret in ("store_key", "tokens") if service in servers else ("store_key",):
            path = Path(options[secret])
            assert path.parent == Path("/run/secrets")
            assert path.name in COMPOSE["secrets"]
            assert path.name in service["secrets"]
        assert service["mem_limit"]
    assert options["solver_memory"] == "6GiB"


def test_compose_names_only_what_is_there():
    for name, service in COMPOSE["services"].items():
        assert set(service["networks"]) <= COMPOSE["networks"].keys(), name
        assert set(service.get("depends_on", ())) <= COMPOSE["services"].keys(), name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            there = source in COMPOSE["volumes"] or (DOCKER / source).is_file()
            assert there, volume
        if "ports" in service:
            assert name == "proxy"
            assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    proxy = (DOCKER / "nginx.conf").read_text()
    assert all(f"server {name}:8000" in proxy for name in ("server-1", "server-2"))
    assert proxy.count("{") == proxy.count("}")


def redis_command(name):
    return services(name)[0]["command"], PODS[f"coop-plan-{name}"]["spec"]["containers"][0]["args"]


def test_the_broker_forgets_nothing_and_the_plans_may():
    for command in redis_command("broker"):
        words = " ".join(command)
        assert "--appendonly yes --appendfsync always" in words
        assert "--maxmemory-policy noeviction" in words
    for command in redis_command("plans"):
        assert "--maxmemory-policy allkeys-lru" in " ".join(command)


def test_pods_are_selected_limited_and_ask_for_no_rights():
    for manifest in MANIFESTS:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            labels = manifest["spec"]["template"]["metadata"]["labels"]
            assert manifest["spec"]["selector"]["matchLabels"] == labels
        if manifest["kind"] == "Service":
            name, selector = manifest["metadata"]["name"], manifest["spec"]["selector"]
            (pod,) = [pod for pod in PODS.values() if pod["metadata"]["labels"] == selector]
            ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
            assert {port["targetPort"] for port in manifest["spec"]["ports"]} <= ports, name
    for pod in PODS.values():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        (container,) = spec["containers"]
        assert container["resources"]["limits"]["memory"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        volumes = {volume["name"] for volume in spec.get("volumes", ())}
        mounts = {mount["name"] for mount in container.get("volumeMounts", ())}
        assert mounts - {"data"} <= volumes


@pytest.mark.parametrize("part", ["server", "worker"])
def test_the_commands_of_pods_are_ours(part):
    (container,) = PODS[f"coop-plan-{part}"]["spec"]["containers"]
    name, options = options_of(container["args"])
    names = {
        manifest["metadata"]["name"] for manifest in MANIFESTS if manifest["kind"] == "Service"
    }
    for address in (options["broker"], options["store"]):
        assert address.removeprefix("redis://").partition(":")[0] in names
    assert name == {"server": "serve", "worker": "worker"}[part]
    if part == "server":
        probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("liveness", "readiness")}
        assert [probe["path"] for probe in probes.values()] == ["/livez", "/readyz"]


def test_secrets_are_read_by_their_owner_and_nobody_else():
    """`coop-plan token` and a default umask: files of one user, closed to others."""
    documents = [
        (DOCKER / "compose.yaml").read_text(),
        (DOCKER.parent / "docs/service.md").read_text(),
    ]
    for service in COMPOSE["services"].values():
        user = service.get("user", "")
        assert user.startswith("${COOP_PLAN_USER:?") == ("secrets" in service), user
    for text in documents:
        assert "COOP_PLAN_USER=$(id -u) docker compose" in text
        assert "chmod" not in text
    (run,) = [part for part in documents[1].split("\n$ ") if part.startswith("docker run")]
    assert "--user $(id -u)" in run


@needs_redis
def test_workers_are_scaled_by_jobs_and_not_by_messages(tmp_path):
    (scaled,) = [manifest for manifest in MANIFESTS if manifest["kind"] == "ScaledObject"]
    assert scaled["spec"]["scaleTargetRef"]["name"] in PODS
    modifiers, triggers = scaled["spec"]["advanced"]["scalingModifiers"], scaled["spec"]["triggers"]
    assert modifiers["formula"].split(" + ") == [trigger["name"] for trigger in triggers]
    work = JobRequest(key="k" * 64, task=WorkerRequest("solve"), seconds=7.0)
    with redis_server(tmp_path) as server:
        jobs = JobStore(server.address, b"secret")

        def wanted():  # KEDA asks for the size of a sorted set so
            names = [trigger["metadata"]["listName"] for trigger in triggers]
            assert {jobs.redis.type(name) for name in names} <= {b"zset", b"none"}
            return sum(map(jobs.redis.zcard, names))

        asked = [f"{number:032x}" for number in range(3)]
        for job in asked:
            jobs.submit(job, "server", work, b"", 9)
            for _ in range(5):  # a message each, for a job that waits
                jobs.redis.hset(f"coop-plan:job:{job}", "published", 1)
                assert jobs.view(job).resend
                jobs.redis.hset(f"coop-plan:job:{job}", "publishes", 1)
        assert wanted() == 3
        lease = jobs.lease(asked[0])
        assert wanted() == 3
        jobs.finish(lease, None, b"answer")
        assert wanted() == 2
        for job in asked:
            jobs.cancel(job)
        assert wanted() == 0
        jobs.close()
