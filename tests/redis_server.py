"""A Redis of our own on the loopback; tests say so where redis-server is not installed."""

import contextlib
import shutil

import pytest

from benchmarks.local_cluster import Process, free_port

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="redis-server is not installed"
)


class Server:
    """Its address; it keeps what it is told only in memory."""

    def __init__(self, folder):
        port = free_port()
        self.address = f"redis://127.0.0.1:{port}/0"
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        self.process = Process("redis", folder, ["redis-server", *options], "Ready to accept")


@contextlib.contextmanager
def redis_server(folder):
    """One that is there as long as this lasts."""
    server = Server(folder)
    try:
        server.process.wait()
        yield server
    finally:
        server.process.stop()
