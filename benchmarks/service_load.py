"""
Load on a cluster whose parts are killed: 1 000 identical requests from 100 connections.

    python -m benchmarks.service_load

Each line is a new question to two servers with two workers. `solves` counts the leases of its job.
A client whose connection breaks, or that gets a 503, asks the other server. Exits 1 after an error,
a plan that differs, or too many solves.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import redis

from benchmarks.local_cluster import LocalCluster, Process, children

ATTEMPTS = 60

JOBS = "coop-plan:job:" + "?" * 32


@dataclass
class Outcome:
    """Answers to the clients: digests of plans, errors, repeated requests, seconds."""

    plans: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    again: int = 0
    seconds: list[float] = field(default_factory=list)

    def line(self) -> str:
        longest = max(self.seconds, default=0.0)
        half = statistics.median(self.seconds) if self.seconds else 0.0
        return (
            f"{len(self.seconds)} answers, {len(self.plans)} plan, {len(self.errors)} errors,"
            f" {self.again} asked again, median {half * 1000:.0f} ms, last {longest:.1f} s"
        )


def example() -> dict[str, Any]:
    """A request for the repository's example."""
    path = Path(__file__).parents[1] / "examples" / "graph.json"
    return {"graph": json.loads(path.read_text()), "budget": "50%"}


def question(seed: int, seconds: float) -> dict[str, Any]:
    """A request whose solve lasts until its time limit."""
    draw = random.Random(seed)
    layers = 60
    tensors: list[dict[str, Any]] = [{"id": 0, "bytes": 4096, "kind": "input"}]
    ops: list[dict[str, Any]] = []

    def op(inputs: list[int], kind: str = "activation") -> int:
        tensor = len(tensors)
        size = draw.randrange(1, 40) << 14
        tensors.append({"id": tensor, "bytes": size, "kind": kind})
        cost = draw.randrange(5, 200)
        ops.append({"id": len(ops), "inputs": inputs, "outputs": [tensor], "cost_us": cost})
        ops[-1]["name"] = "op"
        return tensor

    forward = [0]
    for layer in range(layers):
        skip = [forward[draw.randrange(layer)]] if layer > 2 else []
        forward.append(op(list({forward[-1], *skip})))
    last = forward[-1]
    for layer in reversed(range(1, layers)):
        last = op(list({last, forward[layer], forward[draw.randrange(layer)]}))
    op([last], "output")
    graph = {"schema": "coop-plan/graph/1", "name": f"{seed}", "tensors": tensors, "ops": ops}
    return {"graph": graph, "budget": "45%", "method": "optimal", "time_limit": seconds}


async def ask(client: httpx.AsyncClient, urls: list[str], content: bytes, to: Outcome) -> None:
    """One request, again and elsewhere until it is answered; the first address is asked first."""
    began = time.monotonic()
    headers = {"Content-Type": "application/json", "Prefer": "wait=60, respond-async"}
    problem = ""
    for _ in range(ATTEMPTS):
        try:
            answer = await client.post(f"{urls[0]}/plan", content=content, headers=headers)
        except httpx.TransportError as error:
            problem = repr(error)
            urls.append(urls.pop(0))
        else:
            if answer.status_code == 200:
                to.plans.add(hashlib.sha256(answer.content).hexdigest())
                to.seconds.append(time.monotonic() - began)
                return
            problem = f"{answer.status_code} {answer.text[:200]}"
            if answer.status_code not in (202, 503):
                break
        to.again += 1
        await asyncio.sleep(0.1 + random.random() * 0.2)
    to.errors.append(problem)


async def ask_many(
    urls: list[str],
    body: dict[str, Any],
    *,
    requests: int,
    connections: int,
    meanwhile: Callable[[], Awaitable[None]] | None = None,
) -> Outcome:
    """Send identical requests while `meanwhile` runs."""
    outcome, content = Outcome(), json.dumps(body).encode()
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)

    async def several(client: httpx.AsyncClient, number: int) -> None:
        own = urls[number % len(urls) :] + urls[: number % len(urls)]
        for _ in range(number, requests, connections):
            await ask(client, own, content, outcome)

    async with httpx.AsyncClient(limits=limits, timeout=120) as client:
        work = [several(client, number) for number in range(connections)]
        if meanwhile is not None:
            work.append(meanwhile())
        await asyncio.gather(*work)
    return outcome


class Load:
    """Scenarios on one cluster."""

    def __init__(self, cluster: LocalCluster, requests: int, connections: int) -> None:
        self.cluster = cluster
        self._requests, self._connections = requests, connections
        self._broker = redis.Redis.from_url(cluster.broker_address)

    async def solving(self) -> None:
        """Wait until a worker solves."""
        while not self._broker.zcard("coop-plan:running"):
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)

    def run(
        self,
        name: str,
        body: dict[str, Any],
        happens: Callable[[], Awaitable[None]] | None = None,
        *,
        most_solves: int = 1,
    ) -> bool:
        """Run one scenario and print its line; returns whether it held."""
        before = set(self._broker.scan_iter(JOBS))
        outcome = asyncio.run(
            ask_many(
                self.cluster.urls,
                body,
                requests=self._requests,
                connections=self._connections,
                meanwhile=happens,
            )
        )
        names = set(self._broker.scan_iter(JOBS)) - before
        jobs = {name: self._broker.hgetall(name) for name in names}
        solves = sum(int(job[b"token"]) for job in jobs.values())
        over = all(job[b"state"] == b"done" for job in jobs.values())
        good = not outcome.errors and len(outcome.plans) == 1 and over
        good = good and len(outcome.seconds) == self._requests and 1 <= solves <= most_solves
        print(f"{name}: {solves} solves, {outcome.line()}{'' if good else ' <- wrong'}", flush=True)
        for error in sorted(set(outcome.errors)):
            print(f"  {error}")
        return good

    def solver(self) -> Process:
        """The worker that solves: it has received more tasks than it has finished."""
        for worker in self.cluster.workers:
            if worker.process.poll() is None and _open_tasks(worker) > 0:
                return worker
        raise RuntimeError("no worker solves")

    async def kill_worker(self) -> None:
        """kill -9 of the worker that solves; its children die with it."""
        await self.solving()
        worker = self.solver()
        worker.kill()
        self.cluster.workers.remove(worker)
        self.cluster.workers.append(self.cluster.start_worker())

    async def kill_solver(self) -> None:
        """kill -9 of the solving process, as the kernel does when memory is short."""
        await self.solving()
        for child in children(self.solver().process.pid):
            for solver in children(child):
                os.kill(solver, signal.SIGKILL)

    async def stop_worker(self) -> None:
        """SIGTERM to the worker that solves: it releases its lease."""
        await self.solving()
        worker = self.solver()
        seconds = await asyncio.to_thread(worker.stop)
        print(f"a worker ended {seconds:.1f} s after SIGTERM, with {worker.process.returncode}")
        self.cluster.workers.remove(worker)
        self.cluster.workers.append(self.cluster.start_worker())

    def cancel(self, body: dict[str, Any]) -> None:
        """Print the seconds between `DELETE` and the end of the solve's process."""
        url = self.cluster.urls[-1]
        headers = {"Prefer": "wait=0, respond-async"}
        job = httpx.post(f"{url}/plan", json=body, headers=headers).headers["location"]
        asyncio.run(self.solving())
        solvers = [p for c in children(self.solver().process.pid) for p in children(c)]
        began = time.monotonic()
        httpx.delete(url + job)
        while any(Path(f"/proc/{process_id}").exists() for process_id in solvers):
            time.sleep(0.01)
        print(f"a cancelled solve's process was gone after {time.monotonic() - began:.2f} s")

    async def stop_server(self) -> None:
        """SIGTERM to a server that clients wait at; another one is started."""
        await self.solving()
        seconds = await asyncio.to_thread(self.cluster.replicas[0].stop)
        print(f"a server ended {seconds:.1f} s after SIGTERM")
        self.cluster.replicas[0] = self.cluster.start_server()
        await asyncio.to_thread(self.cluster.replicas[0].wait)

    async def kill_replica(self) -> None:
        """kill -9 of a server that clients wait at."""
        await self.solving()
        self.cluster.replicas[0].kill()

    async def restart_broker(self) -> None:
        """Kill Redis and start it a second later."""
        await self.solving()
        self.cluster.broker.kill()
        await asyncio.sleep(1.0)
        self.cluster.broker.start()
        await asyncio.to_thread(self.cluster.broker.wait)


def _open_tasks(worker: Process) -> int:
    return worker.log.count(" received") - worker.log.count(" succeeded in")


def main() -> None:
    """Run every scenario."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--connections", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a solve")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, LocalCluster(Path(folder)) as cluster:
        load = Load(cluster, arguments.requests, arguments.connections)
        good = False
        with contextlib.suppress(KeyboardInterrupt):
            good = load.run("warm-up", example())
            for number, (name, happens, most) in enumerate(
                [
                    ("nothing dies", None, 1),
                    ("kill -9 of the worker that solves", load.kill_worker, 2),
                    ("kill -9 of its solving process", load.kill_solver, 2),
                    ("SIGTERM to it", load.stop_worker, 2),
                    ("Redis restarted", load.restart_broker, 2),
                    ("SIGTERM to a server", load.stop_server, 1),
                    ("kill -9 of a server", load.kill_replica, 2),
                ]
            ):
                body = question(number, arguments.seconds)
                good &= load.run(name, body, happens, most_solves=most)
            load.cancel(question(99, 50))
        sys.exit(not good)


if __name__ == "__main__":
    main()
