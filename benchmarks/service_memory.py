"""
Memory of one server with its processes: the largest bodies, and many different questions.

    python -m benchmarks.service_memory

1 000 different questions name one graph. Four bodies of 64 MiB with 400 000 ops are sent at once
to a server that allows as many ops, and to one that does not. The figures are MiB that no other
process shares (USS), at their largest; exits 1 if a server with its readers has 1 GiB or more.
Solvers are apart: `--solver-memory` is their limit.
"""

import contextlib
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from benchmarks.cache_hits import chain
from benchmarks.local_cluster import COMMAND, Process, children
from coop_plan.schemas.fingerprint import digest_of

OPS, BODIES, QUESTIONS = 400_000, 4, 1000
BODY_BYTES = (64 << 20) - 1000
LIMIT = 1 << 30
JSON = {"Content-Type": "application/json"}


class Memory:
    """Sampler of the memory of a server with its readers, and of its solvers, which are nice."""

    def __init__(self, pid: int) -> None:
        self._pid, self._stop = pid, threading.Event()
        self.server = self.solvers = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            found = [(_is_nice(pid), _unshared(pid)) for pid in children(self._pid)]
            solvers = sum(size for nice, size in found if nice)
            readers = sum(size for nice, size in found if not nice)
            self.server = max(self.server, _unshared(self._pid) + readers)
            self.solvers = max(self.solvers, solvers)

    def close(self) -> None:
        """Stop sampling."""
        self._stop.set()
        self._thread.join()


def _is_nice(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return os.getpriority(os.PRIO_PROCESS, pid) > 0
    return False


def _unshared(pid: int) -> int:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return sum(int(size) << 10 for size in re.findall(r"Private_\w+: +(\d+) kB", text))
    return 0


@contextlib.contextmanager
def server(name: str, *options: str) -> Iterator[tuple[str, Memory]]:
    """A server's address and its memory."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*COMMAND, "serve", "--port", "0", "--store", f"{folder}/plans", "--no-improve"]
        process = Process("serve", Path(folder), [*command, *options], r"http://\S+(?=,)").wait()
        memory = Memory(process.process.pid)
        try:
            yield str(process.ready and process.ready[0]), memory
        finally:
            memory.close()
            process.stop()
    of_server, of_solvers = memory.server >> 20, memory.solvers >> 20
    print(f"{name}: server with readers {of_server} MiB, solvers {of_solvers}", flush=True)


def large_bodies(url: str) -> list[str]:
    """The answers to the largest bodies, sent at once."""
    graph = json.dumps(chain(OPS // 2), separators=(",", ":"))
    graph = f'{graph[:-1]},"name":"{"x" * (BODY_BYTES - len(graph))}"}}'

    def send(seed: int) -> str:
        body = f'{{"graph":{graph},"budget":"90%","method":"keep-all","seed":{seed}}}'
        headers = JSON | {"Prefer": "wait=0"}
        answer = httpx.post(f"{url}/plan", content=body, headers=headers, timeout=300)
        return f"{answer.status_code} of {len(body) >> 20} MiB"

    with ThreadPoolExecutor(BODIES) as pool:
        return list(pool.map(send, range(BODIES)))


def many_questions(url: str) -> int:
    """Number of plans for different questions about one graph."""
    document = json.dumps(chain(100)).encode()
    digest = digest_of(document)
    with httpx.Client(base_url=url, timeout=120) as client, ThreadPoolExecutor(BODIES) as pool:
        client.put(f"/graphs/{digest}", content=document, headers=JSON).raise_for_status()

        def ask(seed: int) -> bool:
            question = {"graph": digest, "budget": "100%", "method": "keep-all", "seed": seed}
            return client.post("/plan", json=question).status_code == 200

        return sum(pool.map(ask, range(QUESTIONS)))


def main() -> None:
    """Run both and print the figures."""
    began = time.monotonic()
    servers = []
    with server(f"{QUESTIONS} questions", "--solvers", "1") as made:
        print(f"{many_questions(made[0])} plans", flush=True)
        servers.append(made[1])
    for name, options in (("allowed", ("--max-ops", f"{OPS}")), ("refused", ())):
        with server(f"{BODIES} bodies of {OPS} ops, {name}", "--solvers", "1", *options) as made:
            print(", ".join(large_bodies(made[0])), flush=True)
            servers.append(made[1])
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(max(memory.server for memory in servers) >= LIMIT)


if __name__ == "__main__":
    main()
