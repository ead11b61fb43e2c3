"""Cost of a cached plan: CPU time in a reader, then latency and rate of requests over HTTP.

    python -m benchmarks.cache_hits ../shared/data/graphs

Requests by digest are repeated for a server whose solvers are busy, and for one server a core on
one store. Then `/livez` is polled while a body of the largest size is read, and the largest memory
of a process of the service is printed. CPU time is of the server and its readers, per request; on a
busy machine it is the one reliable figure.
"""

import contextlib
import gc
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.local_cluster import children
from benchmarks.report import Column, Report, parser
from coop_plan.api.jobs.request_handler import Limits, RequestHandler
from coop_plan.api.service.graph_store import SqliteGraphStore
from coop_plan.planner.plan_cache.store import SqliteStore
from coop_plan.schemas.fingerprint import digest_of

LARGEST = 64 << 20
"""Bytes of the largest request body."""

SOLVE_SECONDS = 10
"""Observed part of the solve of the largest graph."""

REQUESTS = 1000
CONNECTIONS = 8

COLUMNS = (
    *("request", "connections", Column("offered", "offered/s")),
    Column("median", "median ms", ".1f"),
    Column("p99", "p99 ms", ".1f"),
    Column("rate", "answers/s", ".1f"),
    Column("cpu", "CPU ms", ".1f"),
)

OFFERED = 200
"""Requests a second in the open-loop runs."""


def chain(layers: int) -> dict[str, Any]:
    """A chain of layers and their gradients."""
    kinds = ["input", *["activation"] * (2 * layers)]
    tensors = [{"id": t, "bytes": 1 << 20, "kind": kind} for t, kind in enumerate(kinds)]
    ops = [
        {"id": i, "name": "f", "inputs": [i], "outputs": [i + 1], "cost_us": 10.5 + i % 7}
        for i in range(layers)
    ]
    for i in range(layers, 2 * layers):
        saved = 2 * layers - i
        ops.append(
            {"id": i, "name": "b", "inputs": [i, saved], "outputs": [i + 1], "cost_us": 20.5}
        )
    return {"schema": "coop-plan/graph/1", "tensors": tensors, "ops": ops}


def main() -> None:
    command = parser(__doc__)
    command.add_argument("folder", type=Path)
    args = command.parse_args()
    graphs = {
        name: json.loads((args.folder / f"{name}.json").read_text())
        for name in ("unet", "densenet121")
    }
    graphs["chain of 10 000"] = chain(5_000)
    in_a_reader(graphs)
    report = Report(*COLUMNS, progress=True)
    over_http(graphs, report)
    of_servers(graphs["unet"], report)
    report.finish(args.csv)


def in_a_reader(graphs: dict[str, Any]) -> None:
    gc.disable()  # as in the service's workers
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plans"
        handler = RequestHandler(SqliteStore(path), Limits(), SqliteGraphStore(path))
        for name, graph in graphs.items():
            handler.solve(_body(graph), "", lambda *_: None)
            for op in graph["ops"]:
                op["cost_us"] *= 1.01
            document = json.dumps(graph).encode()
            handler.put_graph(document, "", digest_of(document))
            for how, body in (("body", _body(graph)), ("digest", _body(digest_of(document)))):
                spent = []
                for _ in range(9):
                    started = time.process_time()
                    reply, _ = handler.find(body, "", b"")
                    spent.append(time.process_time() - started)
                    assert reply.found
                middle = sorted(spent)[len(spent) // 2]
                size = f"{len(body) / 1e6:5.2f} MB"
                print(f"{name:16} by {how:6} {size}  {middle * 1e3:6.1f} ms of CPU a hit")


def over_http(graphs: dict[str, Any], report: Report) -> None:
    with serving() as (port, process):
        for name, graph in graphs.items():
            document = json.dumps(graph).encode()
            digest = digest_of(document)
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
            status, _ = _exchange(connection, "PUT", f"/graphs/{digest}", document)
            assert status == 201
            while status != 200:
                status, answer = _exchange(connection, "POST", "/plan", _body(digest))
                assert status in (200, 202), answer
            for how, body, count in (
                ("digest", _body(digest), REQUESTS),
                ("body", _body(graph), REQUESTS // 10),
            ):
                measure(report, f"{name} by {how}", [(port, process)], body, count)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        name = next(iter(graphs))
        body = _body(digest_of(json.dumps(graphs[name]).encode()))
        for number in range(os.cpu_count() or 1):
            hard = chain(60 + number)
            question = {"graph": hard, "budget": "30%", "method": "optimal", "time_limit": 60}
            status, answer = _exchange(
                connection, "POST", "/plan", json.dumps(question).encode(), 0
            )
            assert status == 202, answer
        measure(report, f"{name} by digest, solvers busy", [(port, process)], body, REQUESTS)
        for layers in (LARGEST // len(json.dumps(chain(100_000))) * 100_000, 50_000):
            beside_a_large_body(port, process, layers)


def of_servers(graph: dict[str, Any], report: Report) -> None:
    """Ask one server, then one more at a time up to the number of cores."""
    document = json.dumps(graph).encode()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers: list[tuple[int, int]] = []
        while len(servers) < (os.cpu_count() or 1):
            servers.append(stack.enter_context(serving(f"{folder}/plans")))
            connection = http.client.HTTPConnection("127.0.0.1", servers[-1][0], timeout=600)
            _exchange(connection, "PUT", f"/graphs/{digest_of(document)}", document)
            body = _body(digest_of(document))
            assert _exchange(connection, "POST", "/plan", body)[0] == 200
            measure(report, f"{len(servers)} servers, by digest", servers, body, REQUESTS)


def beside_a_large_body(port: int, process: int, layers: int) -> None:
    """Poll `/livez` while a valid body of 64 MiB is read, and planned if its size is allowed."""
    body = _body(chain(layers)).ljust(LARGEST)
    found: list[tuple[int, str]] = []

    def send() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        status, answer = _exchange(connection, "POST", "/plan", body, 0)
        document = json.loads(answer)
        found.append((status, document.get("type", "")))
        if status == 202:
            time.sleep(SOLVE_SECONDS)
            assert _exchange(connection, "DELETE", f"/jobs/{document['id']}", b"")[0] == 200

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    sender = threading.Thread(target=send)
    sender.start()
    seconds, resident = [], 0
    while sender.is_alive():
        began = time.perf_counter()
        assert _exchange(connection, "GET", "/livez", b"")[0] == 200
        seconds.append(time.perf_counter() - began)
        resident = max(resident, *map(_resident_bytes, _processes(process)))
        time.sleep(0.01)
    status, problem = found[0]
    print(
        f"a body of {len(body) / 2**20:.1f} MiB, {2 * layers} ops: {status} {problem};"
        f" /livez meanwhile at most {max(seconds) * 1e3:.0f} ms of {len(seconds)} times,"
        f" a process at most {resident / 2**20:.0f} MiB"
    )


def measure(
    report: Report, label: str, servers: list[tuple[int, int]], body: bytes, count: int
) -> None:
    """
    Send `count` requests from one connection, then from several to all servers.

    At an offered rate the latency includes the wait for the connection's earlier answer.
    """
    ways = [(1, 0), (CONNECTIONS, 0)] + [(CONNECTIONS, OFFERED)] * (b"sha256:" in body)
    for connections, rate in ways:
        seconds: list[float] = []

        def ask(port: int, seconds: list[float], each: int, pause: float, first: float) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
            due = time.perf_counter() + first
            for _ in range(each):
                began = time.perf_counter()
                if pause:
                    time.sleep(max(due - began, 0))
                    began, due = due, due + pause
                status, _ = _exchange(connection, "POST", "/plan", body)
                seconds.append(time.perf_counter() - began)
                assert status == 200

        processes = [process for _, process in servers]
        spent, began = sum(map(_cpu_seconds, processes)), time.perf_counter()
        ports = [servers[number % len(servers)][0] for number in range(connections)]
        each = count // connections
        pause = connections / rate if rate else 0.0
        threads = [
            threading.Thread(target=ask, args=[port, seconds, each, pause, pause * i / connections])
            for i, port in enumerate(ports)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done = len(seconds) / (time.perf_counter() - began)
        cpu = (sum(map(_cpu_seconds, processes)) - spent) / len(seconds)
        seconds.sort()
        median, p99 = (seconds[int(len(seconds) * share)] * 1e3 for share in (0.5, 0.99))
        about = {"request": label, "connections": connections, "offered": rate or None}
        report.add(**about, median=median, p99=p99, rate=done, cpu=cpu * 1e3)


@contextlib.contextmanager
def serving(store: str | None = None) -> Iterator[tuple[int, int]]:
    """Port and process id of a server of this checkout, on its own store or a given one."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        script = "from coop_plan.api.cli.main import main; main()"
        store = store or str(Path(folder) / "plans")
        command = [sys.executable, "-c", script, "serve", "--port", "0", "--store", store]
        command += ["--no-improve"]
        with log.open("wb") as file, subprocess.Popen(command, stderr=file) as process:
            try:
                while (found := re.search(r"http://[^:]+:(\d+),", log.read_text())) is None:
                    assert process.poll() is None, log.read_text()
                    time.sleep(0.1)
                yield int(found[1]), process.pid
            finally:
                process.terminate()


def _exchange(
    connection: http.client.HTTPConnection, method: str, path: str, body: bytes, wait: int = 600
) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json", "Prefer": f"wait={wait}"}
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    return response.status, response.read()


def _cpu_seconds(process: int) -> float:
    """CPU time of a process and its children."""
    ticks = 0
    for number in _processes(process):
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _processes(process: int) -> list[int]:
    """A process and its children."""
    return [process, *children(process)]


def _resident_bytes(process: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
    return 0


def _body(graph: dict[str, Any] | str) -> bytes:
    return json.dumps({"graph": graph, "budget": "60%"}).encode()


if __name__ == "__main__":
    main()
