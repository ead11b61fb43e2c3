"""Worker processes as the server sees them: called from threads, killed at a deadline."""

import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from coop_plan.api.jobs.request_handler import Reply
from coop_plan.api.jobs.worker_process import Settings, Task

START_SECONDS = 120.0
"""A worker that is not up by then never will be; kernels may have to be compiled."""

MESSAGE_SECONDS = 60.0
"""How long one message between a server and a worker may take, once begun."""

GRACE_SECONDS = 30.0
"""How long a solve may go on after its time limit before its process is killed."""

Say = Callable[[Reply], None]


class WorkerLostError(Exception):
    """A worker ended before it answered: killed by us at a deadline, by the system, or crashed."""

    def __init__(self, *, late: bool) -> None:
        self.late = late
        super().__init__("out of time" if late else "lost")


class Worker:
    """One process; one call at a time."""

    def __init__(self, settings: Settings) -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", "coop_plan.api.jobs.worker_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path},
            )
        # Whoever began a message ends it by then.
        seconds = struct.pack("ll", int(MESSAGE_SECONDS), 0)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, seconds)
        self._connection = Connection(ours.detach())
        self._settings: bytes | None = msgspec.msgpack.encode(settings)

    def call(
        self, task: Task, body: bytes, record: bytes, seconds: float, say: Say | None = None
    ) -> tuple[Reply, bytes]:
        """
        The final reply and its bytes; `say` hears the others.

        Raises:
            WorkerLostError: it ended, or was killed because it took more than `seconds`.
        """
        if self._settings is not None:
            self._exchange(time.monotonic() + START_SECONDS, None, self._settings)
            self._settings = None
        messages = [msgspec.json.encode(task), body, *([record] if task.with_record else [])]
        reply = self._exchange(time.monotonic() + seconds, say, *messages)
        try:
            return reply, self._connection.recv_bytes()
        except (EOFError, OSError):
            self.kill()
            raise WorkerLostError(late=False) from None

    def _exchange(self, deadline: float, say: Say | None, *messages: bytes) -> Reply:
        late = False
        try:
            for message in messages:
                self._connection.send_bytes(message)
            while True:
                if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                    late = True
                    raise TimeoutError
                reply = msgspec.json.decode(self._connection.recv_bytes(), type=Reply)
                if reply.final:
                    return reply
                if say is not None:
                    say(reply)
        except (EOFError, OSError):
            self.kill()
            raise WorkerLostError(late=late) from None

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()


class Pool:
    """So many workers, started when they are first needed; a lost one is replaced."""

    def __init__(self, settings: Settings, size: int) -> None:
        self._settings = settings
        self._free: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        self._busy: set[Worker] = set()
        self._lock = threading.Lock()
        self._closed = False
        for _ in range(size):
            self._free.put(None)

    def call(
        self,
        task: Task,
        body: bytes = b"",
        record: bytes = b"",
        *,
        seconds: float,
        say: Say | None = None,
        taken: Callable[[Worker], None] | None = None,
    ) -> tuple[Reply, bytes]:
        """
        What a worker answers, within `seconds` of its beginning; waits for a free one.

        `taken` is told the worker, so that it can be killed.

        Raises:
            WorkerLostError: no answer will come.
        """
        worker = self._free.get()
        try:
            if self._closed:
                raise WorkerLostError(late=False)
            if worker is None:
                worker = Worker(self._settings)
            with self._lock:
                self._busy.add(worker)
            if taken is not None:
                taken(worker)
            return worker.call(task, body, record, seconds, say)
        except WorkerLostError:
            if worker is not None:
                worker.kill()
                with self._lock:
                    self._busy.discard(worker)
            worker = None
            raise
        finally:
            if worker is not None:
                with self._lock:
                    self._busy.discard(worker)
            self._free.put(worker)

    def close(self) -> None:
        """End all workers and their work."""
        self._closed = True
        with self._lock:
            busy = list(self._busy)
        for worker in busy:
            worker.kill()
        idle = []
        while not self._free.empty():
            idle.append(self._free.get())
        for free in idle:
            if free is not None:
                free.kill()
            self._free.put(None)
