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
from coop_plan.api.jobs.worker_process import JobRequest, WorkerRequest, WorkerSettings

START_SECONDS = 120.0
"""Limit on the start of a worker, in which kernels may be compiled."""

MESSAGE_SECONDS = 60.0
"""Limit on the transfer of one message between server and worker."""

GRACE_SECONDS = 30.0
"""Time from a solve's time limit until its process is killed."""

OnProgress = Callable[[Reply], None]


class WorkerLostError(Exception):
    """A worker ended without an answer: killed at its deadline (`late`), or crashed."""

    def __init__(self, *, late: bool) -> None:
        self.late = late
        super().__init__("out of time" if late else "lost")


class WorkerProcess:
    """One process; one call at a time."""

    def __init__(self, settings: WorkerSettings) -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        module = "coop_plan.api.jobs.worker_process"
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path},
            )
        seconds = struct.pack("ll", int(MESSAGE_SECONDS), 0)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, seconds)
        self._connection = Connection(ours.detach())
        self._settings: bytes | None = msgspec.msgpack.encode(settings)

    def call(
        self,
        task: WorkerRequest,
        body: bytes,
        record: bytes,
        seconds: float,
        on_progress: OnProgress | None = None,
    ) -> tuple[Reply, bytes]:
        """The final reply and its bytes; `on_progress` gets the replies before it.

        Raises:
            WorkerLostError: the process ended, or was killed after `seconds`.
        """
        if self._settings is not None:
            self._exchange(time.monotonic() + START_SECONDS, None, self._settings)
            self._settings = None
        messages = [msgspec.json.encode(task), body, *([record] if task.with_record else [])]
        reply = self._exchange(time.monotonic() + seconds, on_progress, *messages)
        try:
            return reply, self._connection.recv_bytes()
        except (EOFError, OSError):
            self.kill()
            raise WorkerLostError(late=False) from None

    def _exchange(self, deadline: float, on_progress: OnProgress | None, *messages: bytes) -> Reply:
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
                if on_progress is not None:
                    on_progress(reply)
        except (EOFError, OSError):
            self.kill()
            raise WorkerLostError(late=late) from None

    @property
    def ended(self) -> bool:
        """True once the process was killed."""
        return self._process.returncode is not None

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._process.wait()


class ProcessPool:
    """Up to `size` workers, started on demand; a lost one is replaced."""

    def __init__(self, settings: WorkerSettings, size: int) -> None:
        self._settings = settings
        self._free: queue.SimpleQueue[WorkerProcess | None] = queue.SimpleQueue()
        self._busy: set[WorkerProcess] = set()
        self._lock = threading.Lock()
        self._closed = False
        for _ in range(size):
            self._free.put(None)

    def call(
        self,
        task: WorkerRequest,
        body: bytes = b"",
        record: bytes = b"",
        *,
        seconds: float,
        on_progress: OnProgress | None = None,
        on_start: Callable[[WorkerProcess], None] | None = None,
    ) -> tuple[Reply, bytes]:
        """Wait for a free worker and return its answer, within `seconds` of its start.

        `on_progress` gets the replies before the final one; `on_start` the worker, so that the
        caller can kill it.

        Raises:
            WorkerLostError: the worker ended without an answer.
        """
        worker = self._free.get()
        try:
            if self._closed:
                raise WorkerLostError(late=False)
            worker = worker or WorkerProcess(self._settings)
            with self._lock:
                self._busy.add(worker)
            if on_start is not None:
                on_start(worker)
            return worker.call(task, body, record, seconds, on_progress)
        except BaseException:  # half a message may be on its way
            if worker is not None:
                worker.kill()
            raise
        finally:
            if worker is not None:
                with self._lock:
                    self._busy.discard(worker)
            self._free.put(None if worker is None or worker.ended else worker)

    def close(self) -> None:
        """Kill all workers."""
        self._closed = True
        with self._lock:
            busy = list(self._busy)
        for worker in busy:
            worker.kill()
        for _ in range(self._free.qsize()):
            free = self._free.get()
            if free is not None:
                free.kill()
            self._free.put(None)


class Solve:
    """One job in a process of a pool; `kill` may be called at any time, from any thread."""

    def __init__(
        self, pool: ProcessPool, request: JobRequest, body: bytes, on_progress: OnProgress
    ) -> None:
        self._pool, self._request, self._body = pool, request, body
        self._on_progress = on_progress
        self._worker: WorkerProcess | None = None
        self._killed = False

    def run(self) -> tuple[Reply, bytes]:
        """The answer; raises `WorkerLostError`, as `ProcessPool.call` does."""
        return self._pool.call(
            self._request.task,
            self._body,
            seconds=self._request.seconds + GRACE_SECONDS,
            on_progress=self._on_progress,
            on_start=self._on_start,
        )

    def _on_start(self, worker: WorkerProcess) -> None:
        self._worker = worker
        if self._killed:
            worker.kill()

    def kill(self) -> None:
        """Kill the process, or let it be killed when it starts."""
        self._killed = True
        if self._worker is not None:
            self._worker.kill()
