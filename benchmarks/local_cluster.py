"""
A cluster of the service as processes on this machine: Redis twice, servers, workers.

`make cluster` starts it, sends many requests at once, and stops it. `benchmarks.service_load`
measures it, and tests kill parts of it. It listens on the loopback alone.
"""

import argparse
import asyncio
import contextlib
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]

START_SECONDS = 120.0

COMMAND = [sys.executable, "-c", "from coop_plan.api.cli.main import main; main()"]

BROKER = ("--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction")
PLANS = ("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru")


class Process:
    """A process that logs to a file; it is ready when its log matches the pattern `ready`."""

    def __init__(self, name: str, folder: Path, command: list[str], ready: str) -> None:
        self.name, self._command, self._ready = name, command, ready
        self._log = folder / f"{name}.log"
        self._folder = folder
        self.ready: re.Match[str] | None = None
        self.start()

    def start(self) -> None:
        """Start the process; `wait` waits until it is ready."""
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(  # its own group: a signal to us is not one to it
                self._command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self._folder,
                env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        """Output so far."""
        return self._log.read_text(errors="replace")

    def wait(self) -> "Process":
        """Wait until the process is ready."""
        until = time.monotonic() + START_SECONDS
        while (found := re.search(self._ready, self.log)) is None:
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{self.name} did not start:\n{self.log}")
            time.sleep(0.05)
        self.ready = found
        return self

    def kill(self) -> None:
        """Kill the process without warning."""
        self.process.kill()
        self.process.wait()

    def stop(self, seconds: float = 20.0) -> float:
        """Terminate the process; returns the seconds until it ended."""
        began = time.monotonic()
        self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
        return time.monotonic() - began


class LocalCluster:
    """
    Two Redis, servers, and workers with one solve at a time each; a context manager.

    The broker's Redis writes every command to its file, so that it can be restarted.
    """

    def __init__(
        self, folder: Path, *, replicas: int = 2, workers: int = 2, seconds: float = 60.0
    ) -> None:
        self._folder, self._stack = folder, contextlib.ExitStack()
        key = folder / "key"
        key.write_bytes(secrets.token_bytes(32))
        ports = [free_port(), free_port()]
        self.broker_address, self.store_address = (f"redis://127.0.0.1:{p}/0" for p in ports)
        self._options = ["--broker", self.broker_address, "--store", self.store_address]
        self._options += ["--store-key", str(key), "--max-time-limit", f"{seconds:g}"]
        try:
            self.broker = self._redis("broker", ports[0], *BROKER).wait()
            self.store = self._redis("plans", ports[1], *PLANS).wait()
            self.workers = [self.start_worker() for _ in range(workers)]
            self.replicas = [self.start_server() for _ in range(replicas)]
            for process in (*self.workers, *self.replicas):
                process.wait()
        except BaseException:
            self.close()
            raise

    def _redis(self, name: str, port: int, *options: str) -> Process:
        folder = self._folder / name
        folder.mkdir()
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        return self._add(Process(name, folder, [*command, *options], "Ready to accept"))

    def _add(self, process: Process) -> Process:
        self._stack.callback(process.stop)
        return process

    def _start(self, *arguments: str) -> Process:
        name = f"{arguments[0]}-{secrets.token_hex(3)}"
        ready = r"http://\S+(?=,)" if arguments[0] == "serve" else r" ready\."
        command = [*COMMAND, *arguments, *self._options]
        return self._add(Process(name, self._folder, command, ready))

    def start_worker(self) -> Process:
        """Start one more worker."""
        return self._start("worker", "--solvers", "1")

    def start_server(self) -> Process:
        """Start one more server."""
        return self._start("serve", "--port", "0", "--no-improve")

    @property
    def urls(self) -> list[str]:
        """Addresses of the servers."""
        return [replica.ready[0] for replica in self.replicas if replica.ready is not None]

    def close(self) -> None:
        """Stop all processes, the last started first."""
        self._stack.close()

    def __enter__(self) -> "LocalCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def children(process_id: int) -> list[int]:
    """Ids of the running children of a process."""
    found = Path(f"/proc/{process_id}/task").glob("*/children")
    return [int(number) for path in found for number in path.read_text().split()]


def free_port() -> int:
    """A free port of the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def main() -> None:
    """Start a cluster, send requests and stop it; with `--stay` serve until Ctrl-C."""
    from benchmarks.service_load import ask_many, example

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stay", action="store_true", help="serve until Ctrl-C")
    arguments = parser.parse_args()
    if shutil.which("redis-server") is None:
        sys.exit("redis-server is not installed: apt-get install redis-server")
    with tempfile.TemporaryDirectory() as folder, LocalCluster(Path(folder)) as cluster:
        print(f"broker {cluster.broker_address}, plans {cluster.store_address}")
        for url in cluster.urls:
            print(f"server {url}")
        print(f"{len(cluster.workers)} workers")
        outcome = asyncio.run(ask_many(cluster.urls, example(), requests=100, connections=20))
        print(f"100 clients at once: {outcome.line()}")
        if arguments.stay:
            with contextlib.suppress(KeyboardInterrupt):
                cluster.replicas[0].process.wait()


if __name__ == "__main__":
    main()
