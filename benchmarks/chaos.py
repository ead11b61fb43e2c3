"""
Chaos run: 200 clients ask a cluster of two servers and two workers while its processes are killed.

    python -m benchmarks.chaos --seconds 600

Every few seconds a server, a reader, a worker, a solver or a Redis gets SIGKILL, and starts again.
Half of the requests are for `HOT` common graphs, the others for new ones; each with one of two sets
of costs. `AsyncClient` verifies each plan under its own costs. A client whose server is away asks
another one. Exits 1 after a wrong plan, a request without an answer, a job that is left, or a
process that outlives its parent. The exchanges of a request without an answer are printed.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextvars import ContextVar
from pathlib import Path

import httpx
import msgspec
import redis

from benchmarks.local_cluster import LocalCluster, Process, children
from benchmarks.service_load import question
from coop_plan import AsyncClient
from coop_plan.client.protocol import ServerAwayError
from coop_plan.schemas import Graph, parse_graph

HOT = 20
SOLVE_SECONDS = 1.0
ANSWER_SECONDS = 300.0
"""A request without an answer for so long is lost.

The rule: after the plans' Redis has restarted empty, up to 96 jobs wait (20 common graphs and some
28 new ones, two sets of costs each), oldest first, for two workers; a job takes up to 5 s.
"""

KINDS = ("server", "reader", "worker", "solver", "broker", "plans")

EXCHANGES: ContextVar[list[str]] = ContextVar("EXCHANGES")
"""Of the current request: time, request, and answer or error of each."""


class Recorded(httpx.AsyncHTTPTransport):
    """Transport that records the exchanges of each request."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        began, outcome = time.monotonic(), "no answer"
        try:
            answer = await super().handle_async_request(request)
            outcome = f"{answer.status_code} {answer.headers.get('location', '')}"
        except httpx.TransportError as error:
            outcome = repr(error)
            raise
        finally:
            took = time.monotonic() - began
            EXCHANGES.get().append(f"{request.method} {request.url}: {outcome} in {took:.1f} s")
        return answer


class Chaos:
    """Clients and kills on one cluster; what happened is counted by name."""

    def __init__(self, cluster: LocalCluster, clients: int, kill_every: float) -> None:
        self._cluster, self._clients, self._kill_every = cluster, clients, kill_every
        self._https: dict[str, AsyncClient] = {}
        self._draw = random.Random(51)
        self._until = 0.0
        self._new = HOT
        self._orphans: list[int] = []
        self.kills: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.seconds: list[float] = []

    async def run(self, seconds: float) -> None:
        """Send requests for `seconds`, wait for the last answers and check what is left."""
        self._until = time.monotonic() + seconds
        killing = asyncio.create_task(self._kill())
        await asyncio.gather(*(self._client() for _ in range(self._clients)))
        await killing
        await self._check_rest()
        for client in self._https.values():
            await client.close()

    async def _client(self) -> None:
        while time.monotonic() < self._until:
            graph = self._graph()
            options = {"method": "auto", "time_limit": SOLVE_SECONDS}
            began, exchanges = time.monotonic(), list[str]()
            EXCHANGES.set(exchanges)
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    while not await self._ask(graph, options):
                        await asyncio.sleep(self._draw.uniform(0.1, 0.5))
            except TimeoutError:
                self.faults["lost"] += 1
                print(f"no answer for graph {graph.name}:", *exchanges, sep="\n  ", flush=True)
            except Exception as error:  # a wrong plan, or a problem that is no answer
                self.faults[f"{type(error).__name__}: {error}"[:200]] += 1
            else:
                self.seconds.append(time.monotonic() - began)
            await asyncio.sleep(self._draw.uniform(0.0, 2.0))

    async def _ask(self, graph: Graph, options: dict[str, object]) -> bool:
        """True if a server answered with a plan, which is then verified."""
        url = self._draw.choice(self._cluster.urls)
        if url not in self._https:
            transport = Recorded(limits=httpx.Limits())
            self._https[url] = AsyncClient(url, patience_seconds=5.0, transport=transport)
        try:
            await self._https[url].plan(graph, "50%", **options)
        except ServerAwayError:
            return False
        return True

    def _graph(self) -> Graph:
        if self._draw.random() < 0.5:
            seed = self._draw.randrange(HOT)
        else:
            seed = self._new = self._new + (self._draw.random() < 0.03)
        graph = parse_graph(msgspec.json.encode(question(seed, SOLVE_SECONDS)["graph"]))
        if self._draw.random() < 0.5:
            dear = [op.model_copy({"cost_us": op.cost_us * (1 + op.id % 7)}) for op in graph.ops]
            graph = graph.model_copy({"ops": dear})
        return graph

    async def _kill(self) -> None:
        """Kill one process of each kind in turn, and start it again."""
        turn = 0
        while time.monotonic() + 3 * self._kill_every < self._until:
            await asyncio.sleep(self._kill_every * self._draw.uniform(0.5, 1.5))
            kind = KINDS[turn % len(KINDS)]
            turn += 1
            if kind in ("reader", "solver"):
                await self._kill_child(kind)
                continue
            victim = {
                "server": self._draw.choice(self._cluster.replicas),
                "worker": self._draw.choice(self._cluster.workers),
                "broker": self._cluster.broker,
                "plans": self._cluster.store,
            }[kind]
            await self._kill_process(kind, victim)

    async def _kill_process(self, kind: str, victim: Process) -> None:
        family = _descendants(victim.process.pid)
        victim.kill()
        self.kills[kind] += 1
        self._orphans += family
        await asyncio.sleep(1.0)
        victim.start()
        await asyncio.to_thread(victim.wait)

    async def _kill_child(self, kind: str) -> None:
        """Kill a process that reads requests for a server, or solves for a worker."""
        parents = self._cluster.replicas if kind == "reader" else self._cluster.workers
        found = [pid for parent in parents for pid in _descendants(parent.process.pid)]
        if leaves := [pid for pid in found if _is_ours(pid, b"worker_process")]:
            os.kill(self._draw.choice(leaves), signal.SIGKILL)
            self.kills[kind] += 1

    async def _check_rest(self) -> None:
        """Count unfinished jobs and children of killed processes, after a minute at most."""
        broker = redis.Redis.from_url(self._cluster.broker_address)
        for _ in range(60):
            jobs = sum(broker.zcard(f"coop-plan:{name}") for name in ("queued", "running"))
            orphans = sum(_is_ours(pid) for pid in self._orphans)
            if not (jobs or orphans):
                return
            await asyncio.sleep(1.0)
        self.faults["jobs are left"] += jobs
        self.faults["processes outlive their parent"] += orphans


def _descendants(pid: int) -> list[int]:
    own = children(pid)
    return own + [each for child in own for each in _descendants(child)]


def _is_ours(pid: int, part: bytes = b"coop_plan") -> bool:
    try:
        return part in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def main() -> None:
    """Run it and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--kill-every", type=float, default=8.0, help="seconds, on average")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, LocalCluster(Path(folder)) as cluster:
        chaos = Chaos(cluster, arguments.clients, arguments.kill_every)
        asyncio.run(chaos.run(arguments.seconds))
    kills = ", ".join(f"{chaos.kills[kind]} {kind}" for kind in KINDS)
    median = statistics.median(chaos.seconds or [0.0])
    print(f"{len(chaos.seconds)} answers, each verified; median {median:.2f} s,", end=" ")
    print(f"last {max(chaos.seconds, default=0.0):.1f} s; {chaos.kills.total()} kills: {kills}")
    for fault, count in (+chaos.faults).items():
        print(f"  {count} x {fault} <- wrong")
    sys.exit(bool(+chaos.faults) or not chaos.seconds)


if __name__ == "__main__":
    main()
